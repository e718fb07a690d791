"""Decides which groups a training step gets, and when their rollouts may begin.

A supply passes draws in data order to ``make``, which returns the finished group (from the journal or the engine), and
collects finished groups into steps. It never runs further ahead of training than ``staleness`` allows, so every token
in step n was sampled from version n - 1 - staleness or later.

- ``InOrder``: step n gets the n-th batch of ``wanted`` draws. The rollout of this batch begins once version n - 1 - staleness exists.
- ``AsCompleted``: step n gets the groups that finished first; other groups go to later steps. A group whose rollout
  began at version v must be trained by step v + 1 + staleness, so step v + 1 + staleness waits for it.

``run`` waits until a weight version is announced (``announce``), and then starts rollouts. ``batch`` waits until the groups of its step
are finished.

No draw is skipped or used twice, because each checkpoint stores where the next step begins in the data order (``Cursor``).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollcall.base.append_file import is_count
from rollcall.base.types import Group, failed_on_all, rows_of
from rollcall.loop.phases import steps_ahead


class NothingLeftError(Exception):
    """The journal has no group for a draw, and this command cannot generate one, because it only trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppliedGroup:
    """A finished group, and whether it came from the journal."""

    group: Group
    from_journal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The draws that come next: first those that were started but not yet trained on, then all draws from ``next_draw`` on."""

    pending: tuple[int, ...]
    next_draw: int

    @classmethod
    def of(cls, state: Mapping[str, Any], *, where: str) -> Cursor:
        """Read the cursor from a checkpoint's state. A manifest that leaves out the state does not vouch for it, so it may be anything."""
        pending, next_draw = state.get("pending", []), state.get("next_draw")
        if not is_count(next_draw) or not isinstance(pending, list) or not all(map(is_count, pending)):
            raise ValueError(
                f"{where}: its state does not contain the next draw; move this checkpoint away to continue from an earlier one"
            )
        return cls(pending=tuple(pending), next_draw=next_draw)

    def take(self, count: int) -> tuple[list[int], Cursor]:
        first = list(self.pending[:count])
        new = count - len(first)
        rest = Cursor(pending=self.pending[count:], next_draw=self.next_draw + new)
        return first + list(range(self.next_draw, self.next_draw + new)), rest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything that one step trains on."""

    step: int
    groups: list[Group]  # in order of draw
    cursor: Cursor  # where the next step begins in the data order
    num_refills: int
    num_from_journal: int
    zero_variance: float  # fraction of the generated groups that have no signal
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run's steps need, and the functions that provide it."""

    start_step: int  # already trained
    steps: int
    wanted: int  # groups per step
    staleness: int
    max_refills: int | None  # None if groups without signal are trained on too
    make: Callable[[int, int], Awaitable[SuppliedGroup]]  # step, draw
    has_signal: Callable[[Group], bool]


class Supply(ABC):
    def __init__(self, demand: Demand, *, cursor: Cursor) -> None:
        self._demand = demand
        self._cursor = cursor
        self._version = demand.start_step
        self._changed = asyncio.Condition()

    async def announce(self, version: int) -> None:
        """Announce that all rollouts that start from now on sample from this version or a later one."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    @abstractmethod
    async def run(self) -> None:
        """Start rollouts as versions allow, until the last step's rollouts have started."""

    @abstractmethod
    async def batch(self, step: int) -> StepBatch:
        """Return a step's batch. Call it for the steps in order. Raises ``NothingLeftError`` if this command cannot get the groups."""


class InOrder(Supply):
    def __init__(self, demand: Demand, *, cursor: Cursor) -> None:
        super().__init__(demand, cursor=cursor)
        self._fills: asyncio.Queue[asyncio.Task[StepBatch]] = asyncio.Queue()

    async def run(self) -> None:
        demand, fills = self._demand, []
        try:
            for step in range(demand.start_step + 1, demand.steps + 1):
                async with self._changed:
                    await self._changed.wait_for(lambda oldest=step - 1 - demand.staleness: self._version >= oldest)
                draws = self._take(demand.wanted)
                fills.append(asyncio.create_task(self._fill(step, draws, self._cursor)))
                self._fills.put_nowait(fills[-1])
                if demand.max_refills:
                    await asyncio.wait({fills[-1]})  # only then is it known how many draws the step used
            await asyncio.gather(*fills, return_exceptions=True)
        finally:
            for fill in fills:
                if fill.done() and not fill.cancelled():
                    fill.exception()  # ``batch`` has raised this error, or the error of an earlier step
                fill.cancel()

    async def batch(self, step: int) -> StepBatch:
        batch = await (await self._fills.get())
        assert batch.step == step, "batches must be requested in step order"
        return batch

    def _take(self, count: int) -> list[int]:
        draws, self._cursor = self._cursor.take(count)
        return draws

    async def _fill(self, step: int, draws: list[int], cursor: Cursor) -> StepBatch:
        """Make the step's groups. ``draws`` are the step's first draws, and ``cursor`` points to the draw after them. Groups without
        signal are dropped and replaced by groups of new draws, for up to ``max_refills`` rounds."""
        started, demand = time.perf_counter(), self._demand
        made: list[SuppliedGroup] = []
        kept: list[Group] = []
        num_refills, filtered = 0, demand.max_refills is not None
        while True:
            new = await asyncio.gather(*(demand.make(step, draw) for draw in draws))
            made += new
            kept += [item.group for item in new if not filtered or demand.has_signal(item.group)]
            if len(kept) == demand.wanted or num_refills == demand.max_refills:
                break
            num_refills += 1
            draws = self._take(demand.wanted - len(kept))
            cursor = self._cursor
        if not kept:
            # No group has a signal. Train on one group, whose gradient is zero. Choose one that could be scored, because a step in which
            # nothing could be scored ends the run.
            kept = [next((item.group for item in made if not failed_on_all([item.group])), made[0].group)]
        return StepBatch(
            step=step,
            groups=sorted(kept, key=lambda group: group.draw),
            cursor=cursor,
            num_refills=num_refills,
            num_from_journal=sum(item.from_journal for item in made),
            zero_variance=float(np.mean([not demand.has_signal(item.group) for item in made])),
            wall_s=time.perf_counter() - started,
        )


@dataclass(slots=True, kw_only=True)
class Begun:
    """A group that was started but not yet assigned to a step."""

    draw: int
    version: int  # the engines' version when the group began; once it has finished, the version of its oldest token
    made: SuppliedGroup | None = None
    place: int = 0  # position in the order in which groups finished
    missing: bool = False  # the group will not finish


class AsCompleted(Supply):
    """``recorded`` contains the draws of steps that were trained before a crash. These steps get the same draws again.

    With staleness k, the groups that have been started but not yet trained on fill at most k steps (2 for k = 1, and 1 for k = 0). If
    they filled k + 1 steps, every step would have to wait for the oldest groups and train on exactly these, so it could not choose groups
    that finished earlier.
    """

    def __init__(self, demand: Demand, *, cursor: Cursor, recorded: Mapping[int, Sequence[int]]) -> None:
        super().__init__(demand, cursor=cursor)
        self._recorded = {step: tuple(draws) for step, draws in recorded.items() if step > demand.start_step}
        self._recorded_draws = {draw for draws in self._recorded.values() for draw in draws}
        self._num_taken = demand.start_step * demand.wanted
        self._begun: dict[int, Begun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[SuppliedGroup] = []  # since the last step was assembled
        self._num_finished = 0
        self._num_dropped = 0  # number of groups dropped since then
        self._failure: Exception | None = None
        self._asked_s = time.perf_counter()

    async def run(self) -> None:
        try:
            async with self._changed:
                while self._num_taken < self._demand.steps * self._demand.wanted:
                    self._admit()
                    await self._changed.wait()
                    if self._failure is not None:
                        raise self._failure
        finally:
            for task in self._tasks:
                task.cancel()

    async def batch(self, step: int) -> StepBatch:
        demand = self._demand
        async with self._changed:
            if step in self._recorded:
                while not all(draw in self._begun for draw in self._recorded[step]):
                    self._begin()
            await self._changed.wait_for(lambda: self._choice(step) is not None or self._is_stuck())
            chosen = self._choice(step)
            if chosen is None:
                raise NothingLeftError
            groups = [made.group for draw in sorted(chosen) if (made := self._begun.pop(draw).made)]
            self._num_taken += demand.wanted
            finished, self._finished = self._finished, []
            num_refills, self._num_dropped = self._num_dropped, 0
            asked_s, self._asked_s = self._asked_s, time.perf_counter()
            self._changed.notify_all()
            return StepBatch(
                step=step,
                groups=groups,
                cursor=Cursor(
                    pending=tuple(sorted((*self._begun, *self._cursor.pending))), next_draw=self._cursor.next_draw
                ),
                num_refills=num_refills,
                num_from_journal=sum(made.from_journal for made in finished),
                zero_variance=float(np.mean([not demand.has_signal(made.group) for made in finished] or [0.0])),
                wall_s=self._asked_s - asked_s,
            )

    def _admit(self) -> None:
        demand = self._demand
        most = min(self._version + steps_ahead(demand.staleness, order="as_completed"), demand.steps) * demand.wanted
        while self._num_taken + len(self._begun) < most:
            self._begin()

    def _begin(self) -> None:
        (draw,), self._cursor = self._cursor.take(1)
        begun = self._begun[draw] = Begun(draw=draw, version=self._version)
        task = asyncio.create_task(self._make(begun))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, begun: Begun) -> None:
        try:
            # The step that this draw would belong to if steps took draws in order. It selects the journal file and is part of the seeds.
            made = await self._demand.make(begun.draw // self._demand.wanted + 1, begun.draw)
        except NothingLeftError:
            begun.missing = True
        except Exception as error:  # noqa: BLE001 - raised again by ``run``, whatever it is
            self._failure = error
        else:
            self._note(begun, made)
        async with self._changed:
            self._changed.notify_all()

    def _note(self, begun: Begun, made: SuppliedGroup) -> None:
        demand = self._demand
        self._num_finished += 1
        begun.made, begun.place = made, self._num_finished
        rows = (row for completion in made.group.completions for row in rows_of(completion))
        segments = (segment for row in rows for segment in row.segments)
        begun.version = min((segment.version for segment in segments), default=begun.version)
        self._finished.append(made)
        may_drop = self._num_dropped < (demand.max_refills or 0) * demand.wanted
        if may_drop and begun.draw not in self._recorded_draws and not demand.has_signal(made.group):
            self._num_dropped += 1
            del self._begun[begun.draw]

    def _is_stuck(self) -> bool:
        """Whether no further group will finish."""
        items = self._begun.values()
        return any(item.missing for item in items) and all(item.missing or item.made for item in items)

    def _choice(self, step: int) -> list[int] | None:
        if step in self._recorded:
            draws = self._recorded[step]
            return list(draws) if all(self._begun[draw].made for draw in draws) else None
        return choose(self._begun.values(), step=step, wanted=self._demand.wanted, staleness=self._demand.staleness)


def choose(begun: Iterable[Begun], *, step: int, wanted: int, staleness: int) -> list[int] | None:
    """Choose a step's draws: those that finished first, provided every other group can still be trained before it gets too old. Returns
    None if too few groups have finished, or if a group that must be trained in this step has not finished.

    >>> late, *others = (Begun(draw=draw, version=draw // 2) for draw in range(4))  # with staleness 1, draws 0 and 1 are due in step 2
    >>> for place, item in enumerate(others): item.made, item.place = object(), place
    >>> choose([late, *others], step=1, wanted=2, staleness=1), choose([late, *others], step=2, wanted=2, staleness=1)
    ([1, 2], None)
    """
    begun = list(begun)
    finished = sorted((item for item in begun if item.made), key=lambda item: item.place)
    if len(finished) < wanted:
        return None
    due = {item.draw: item.version + 1 + staleness for item in begun}
    chosen: list[int] = []
    for last in sorted(set(due.values())):
        # The steps after this one, up to ``last``, can train on (last - step) * wanted of the groups that are due by ``last``.
        left = sum(due[item.draw] <= last for item in begun) - sum(due[draw] <= last for draw in chosen)
        must = left - max(last - step, 0) * wanted
        if must > 0:
            able = [item.draw for item in finished if due[item.draw] <= last and item.draw not in chosen]
            if len(able) < must:
                return None
            chosen += able[:must]
    chosen += [item.draw for item in finished if item.draw not in chosen]
    return chosen[:wanted]
