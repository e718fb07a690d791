"""Runs reward functions in worker processes, so that code that hangs, raises or crashes costs only one score.

Rewards with the same limits (confine.py) share a crew of worker processes. Each crew has its own queue. While the queue has items, a
task in the caller's event loop serves each worker:

    queue --chunk--> worker: item, item, item --results, in order--> the caller of score
                        |
                        +-- no result within the item's limit, or the process is gone:
                            that item fails, the items after it go back to the front of the queue,
                            and the process is replaced

An item's time limit starts at the worker's last sign of progress (process/worker.py). It never includes a worker's startup, which has
its own limit. The limit is paused while somebody is debugging the worker (process/debug/here.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from rollcall.base.words import visible
from rollcall.observe.logs import ChildPrints
from rollcall.process.debug.here import POST_MORTEM, DebugLine
from rollcall.process.here import spawn
from rollcall.process.worker import Call, Lost, Raised, Worker, reader
from rollcall.reward.confine import (
    Confinement,
    confinement_of,
    environment,
    make_folder,
    refuse_unset,
    remove_folder,
    sweep_folders,
)
from rollcall.reward.functions import check_score
from rollcall.reward.worker import MAX_ANSWER_BYTES, About, FailureKind, Item, Ready, RewardResult

START_TIMEOUT_S = 120.0
_READ_RESULTS = reader(list[RewardResult] | None)


@dataclass(slots=True)
class _Asked:
    """Items whose results are awaited together. They share a future, because creating a future for each item would take the event loop
    more time than all its other work for the item."""

    done: asyncio.Future[list[list[RewardResult]]]
    results: list[list[RewardResult]]
    num_missing: int


@dataclass(slots=True)
class _Task:
    item: Item
    timeout_s: float
    asked: _Asked
    place: int  # index among the items that are awaited together

    @property
    def is_over(self) -> bool:
        """Whether nobody is waiting for the results any longer."""
        return self.asked.done.done()

    @property
    def num_results(self) -> int:
        completion = self.item.completion
        return len(completion) if isinstance(completion, list) else 1

    def finish(self, results: list[RewardResult]) -> None:
        for place, result in enumerate(results):
            # This process may have been too busy to stop the worker in time, but the limit still applies.
            if result.elapsed_s > self.timeout_s:
                why = f"took {result.elapsed_s:.1f} s; the limit is timeout_s={self.timeout_s:g}"
                results[place] = RewardResult(0.0, "hung", why)
        asked = self.asked
        asked.results[self.place] = results
        asked.num_missing -= 1
        if not asked.num_missing and not self.is_over:
            asked.done.set_result(asked.results)


@dataclass(slots=True, kw_only=True)
class _Crew:
    """Processes with the same limits, and the items waiting for them."""

    specs: dict[int, dict[str, Any]]
    confinement: Confinement
    ready: Ready | None = None  # from the last worker that started
    queue: deque[_Task] = field(default_factory=deque)
    seats: list[_Seat] = field(default_factory=list)
    num_starts_lost: int = 0

    def serve(self) -> None:
        """Start a task for each worker that does not have one."""
        for seat in self.seats:
            if seat.task is None:
                seat.task = asyncio.get_running_loop().create_task(seat.serve())

    def take(self) -> deque[_Task]:
        """Take a chunk for one worker. Chunks are large while the queue is long and shrink to single items near its end, so that a slow
        item delays few others. All items in a chunk have the same limit."""
        share = min(32, -(-len(self.queue) // (2 * len(self.seats))))
        chunk: deque[_Task] = deque()
        while self.queue and len(chunk) < share and (not chunk or self.queue[0].timeout_s == chunk[0].timeout_s):
            task = self.queue.popleft()
            if not task.is_over:  # otherwise its group was abandoned
                chunk.append(task)
        return chunk

    def fail(self, error: BaseException) -> None:
        """Raise the error in all waiting callers."""
        waiting = [*self.queue, *(task for seat in self.seats for task in seat.chunk)]
        self.queue.clear()
        for task in waiting:
            if not task.is_over:
                task.asked.done.set_exception(error)


class RewardPool(AbstractContextManager["RewardPool"]):
    """Worker processes for the rewards in ``specs`` (index in the run file's list -> fields).

    The constructor waits for one worker per crew, and raises if a reward cannot be loaded. Only one event loop may use it at a time.
    """

    def __init__(self, specs: dict[int, dict[str, Any]], *, num_workers: int) -> None:
        crews: dict[Confinement, _Crew] = {}
        for index, spec in specs.items():
            confinement = confinement_of(spec)
            refuse_unset(confinement.env, key=f"reward.{index}.env")
            crews.setdefault(confinement, _Crew(specs={}, confinement=confinement)).specs[index] = spec
        self._crews = list(crews.values())
        self._crew_of = {index: crew for crew in self._crews for index in crew.specs}
        self._prints = ChildPrints()
        sweep_folders()
        try:
            for place, crew in enumerate(self._crews):
                for number in range(place * num_workers, (place + 1) * num_workers):
                    crew.seats.append(_Seat(crew, number=number, output_fd=self._prints.fd))
            for crew in self._crews:
                crew.seats[0].wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def in_force(self) -> dict[int, dict[str, str]]:
        """How this machine confines each reward's processes. The keys are indices in the run file's list."""
        return {index: crew.ready.in_force for index, crew in self._crew_of.items() if crew.ready}

    @property
    def functions(self) -> dict[int, About]:
        """How each of the user's functions is called. The keys are indices in the run file's list."""
        return {index: about for crew in self._crews if crew.ready for index, about in crew.ready.functions.items()}

    def score(self, items: list[Item], *, timeout_s: float) -> asyncio.Future[list[list[RewardResult]]]:
        """Queue the items of one reward immediately. The future resolves to a list for each item: one result per completion."""
        asked = _Asked(asyncio.get_running_loop().create_future(), [[]] * len(items), len(items))
        crew = self._crew_of[items[0].reward]
        crew.queue.extend(_Task(item, timeout_s, asked, place) for place, item in enumerate(items))
        crew.serve()
        return asked.done

    def close(self) -> None:
        """Stop all workers and drop pending items."""
        for crew in self._crews:
            crew.queue.clear()
            for seat in crew.seats:
                seat.close()
        self._prints.close()


class _Seat:
    """Owns one worker and replaces it when it is lost."""

    def __init__(self, crew: _Crew, *, number: int, output_fd: int) -> None:
        self._crew, self._number, self._output_fd = crew, number, output_fd
        self.task: asyncio.Task[None] | None = None
        self.chunk: deque[_Task] = deque()  # the items that the worker is processing
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        confinement = self._crew.confinement
        with ExitStack() as undo:
            self._folder = make_folder()
            undo.callback(remove_folder, self._folder)
            line = DebugLine(role="reward", number=self._number)
            undo.callback(line.close)
            with line.theirs:
                self.worker: Worker = spawn(
                    "rollcall.reward.worker:RewardWorker",
                    name=f"reward worker {self._number}",
                    env=environment(confinement.env, folder=self._folder, own_home=confinement.own_files),
                    cwd=self._folder if confinement.own_files else None,
                    fds=(line.theirs.fileno(),),
                    output=self._output_fd,
                    line=line,
                    answers={"load": reader(Ready | None), "score": read_results},
                    longest=MAX_ANSWER_BYTES,
                )
            undo.callback(self.worker.close)
            # Built-in scorers do not need the user's working directory.
            here, path = os.getcwd(), [os.getcwd(), *sys.path]
            if confinement.own_files:
                path = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
            given = (self._crew.specs, confinement, path, self._folder, bool(os.environ.get(POST_MORTEM)))
            self._loading: Call | None = self.worker.begin("load", *given, deadline_s=START_TIMEOUT_S)
            undo.pop_all()

    def wait_until_ready(self) -> None:
        assert self._loading is not None
        try:
            self._is_ready(self.worker.wait(self._loading))
        except (Raised, Lost) as error:
            raise self._cannot_start(error) from None

    def _is_ready(self, ready: Ready) -> None:
        self._loading = None
        self._crew.ready, self._crew.num_starts_lost = ready, 0

    def _cannot_start(self, error: Raised | Lost) -> Exception:
        if isinstance(error, Raised):
            return ValueError(error.message)
        what = f"was not ready within {START_TIMEOUT_S:g} s" if error.is_late else f"{error.why} during startup"
        at = f"\nit was at\n{error.stack}" if error.stack else ""
        return RuntimeError(f"a reward worker {what}{at}\ncheck what the reward's module does when imported")

    async def serve(self) -> None:
        """Score chunks until the queue is empty."""
        crew = self._crew
        try:
            while crew.queue:
                if await self._become_ready():
                    self.chunk = crew.take()
                    if self.chunk:
                        await self._score_chunk()
        except asyncio.CancelledError:
            if self.chunk:  # the event loop is ending, so nobody reads the worker's current results
                self.chunk.clear()
                self._replace()
            raise
        except BaseException as error:
            crew.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.task = None

    async def _become_ready(self) -> bool:
        """Wait for the process to start. Return False if it was lost and a new one is starting."""
        if self._loading is None:
            return True
        try:
            self._is_ready(await self.worker.result_of(self._loading))
            return True
        except Raised as error:
            raise self._cannot_start(error) from None
        except Lost as error:
            self._crew.num_starts_lost += 1
            if self._crew.num_starts_lost >= 3 or self._crew.ready is None:  # the machine is at fault, not an item
                raise self._cannot_start(error) from None
            self._replace()
            return False

    async def _score_chunk(self) -> None:
        chunk, last = self.chunk, None

        def take(results: list[RewardResult] | None) -> None:
            nonlocal last
            if results is None or not chunk or last is not None or len(results) != chunk[0].num_results:
                raise ValueError("the worker did not return one result for each completion of an item")
            if len(chunk) == 1:
                last = results  # deliver it after the call has returned, because its receiver may stop the event loop
            else:
                chunk.popleft().finish(results)

        given = [(task.item, task.timeout_s) for task in chunk]
        error: Lost | Raised | None = None
        try:
            await self.worker.call("score", given, deadline_s=chunk[0].timeout_s, each=take)
        except (Lost, Raised) as found:
            error = found
        task = chunk.popleft()
        task.finish([_failure(error, task)] * task.num_results if last is None else last)
        self._crew.queue.extendleft(reversed(chunk))
        chunk.clear()
        if error is not None or last is None:
            self._replace()
            self._crew.serve()

    def _replace(self) -> None:
        self._end()
        if not self._is_closed:
            self._start()

    def close(self) -> None:
        self._is_closed = True
        if self.task is not None and not self.task.get_loop().is_closed():
            self.task.cancel()
        self._end()

    def _end(self) -> None:
        self.worker.close()
        remove_folder(self._folder)


def _failure(error: Lost | Raised | None, task: _Task) -> RewardResult:
    if error is None:
        return RewardResult(0.0, "died", "its process returned no result")
    if isinstance(error, Raised):
        return RewardResult(0.0, "raised", error.trace)
    is_late = error.is_late or error.status == -signal.SIGXCPU
    kind: FailureKind = "hung" if is_late else "died"
    why = f"no score within {task.timeout_s:g} s" if is_late else f"its process {error.why}"
    return RewardResult(0.0, kind, f"{why}\nit was at\n{error.stack}" if error.stack else why)


def read_results(body: bytes) -> list[RewardResult] | None:
    """Parse an item's results. Return None after the last item. Raise ValueError if the results are invalid."""
    said = _READ_RESULTS(body)
    return said and [
        RewardResult(
            0.0 if one.kind else None if one.value is None else check_score(one.value),
            one.kind,
            visible(one.why),
            one.elapsed_s,
        )
        for one in said
    ]
