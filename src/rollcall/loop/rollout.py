"""Engine and rewards as awaitables.

``attempt`` submits one prompt and waits for its group of scored completions; ``sample`` waits for one turn of an episode
(``loop/episodes.py``). One pump drives all of them: it polls the engine, has finished completions
scored, and wakes the callers. When there is nothing to do it sleeps until the next request.

An engine in this process decodes inside ``poll``. With an engine in other processes (``Elsewhere``) a poll only looks, so the
pump sleeps until there is something to see, and does not hold up the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

from rollcall.engine.protocol import Engine, Request, Sampling
from rollcall.loop.aside import in_thread
from rollcall.observe.calls import BusySpans
from rollcall.observe.live import REWARDS
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Group, Ints, Prompt, Score

# Environments that are quick bring the next turns within moments. Filled and decoded together, those cost far less than one by one,
# so the engine waits while they keep coming: for each until the pause is long, and for all of them for a share of the time that it
# decoded. Where environments are slow, it waits for one pause in vain. Episodes that begin together stay together, so an engine
# without work waits for them too.
QUIET_S, QUIET_SHARE, GATHER_SHARE = 0.002, 0.05, 0.5
FIRST_QUIET_S, FIRST_GATHER_S, BURST = 0.005, 0.2, 8
KEEP_EVERY_S = 1.0  # what has ended of a group that goes on is kept this often
HERE = "local"

UNSCORED = Score(value=0.0, parts={}, errors={})

Keep = Callable[[int, Group], Awaitable[Any]]
"""(place in the group, a group of this attempt alone)"""


@runtime_checkable
class Elsewhere(Protocol):
    """An engine that works in other processes."""

    async def changed(self) -> None:
        """Returns when a poll may find something new."""
        ...

    def take_maker(self, request_id: str) -> str:
        """Which worker made the request that ``poll`` returned; asked once for each request."""
        ...


@dataclass(slots=True)
class Clock:
    """How the pump spent its time since the last ``take``."""

    engine_s: float = 0.0  # while the engine had work
    reward_s: float = 0.0  # while the engine had none, and something was scored
    engine_tokens: int = 0

    def take(self) -> Clock:
        taken = Clock(self.engine_s, self.reward_s, self.engine_tokens)
        self.engine_s, self.reward_s, self.engine_tokens = 0.0, 0.0, 0
        return taken


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A group that is not finished."""

    step: int
    draw: int
    prompt: Prompt
    scorer: Scorer
    started_s: float
    done: asyncio.Future[Group]
    completions: tuple[Completion, ...] = ()
    worker: str = HERE
    made: dict[int, Completion] = field(
        default_factory=dict
    )  # by place in the group; the other places are in the engine
    places: tuple[int, ...] = ()  # in the group, of the engine's completions
    ended: dict[int, Completion] = field(default_factory=dict)  # by place, of those that nobody has kept

    def group(self, completions: tuple[Completion, ...], scores: tuple[Score, ...]) -> Group:
        return Group(
            step=self.step,
            draw=self.draw,
            prompt=self.prompt,
            completions=completions,
            scores=scores,
            started_s=self.started_s,
            finished_s=time.time(),
            worker=self.worker,
        )

    def receive(self, completions: tuple[Completion, ...]) -> None:
        self.made |= dict(zip(self.places, completions, strict=True))
        self.completions = tuple(self.made[place] for place in sorted(self.made))


class Rollouts:
    def __init__(self, engine: Engine, *, max_running: int, rewards: BusySpans | None = None):
        """``max_running``: most completions that the engine decodes at once. ``rewards`` is told when reward functions are busy."""
        self.engine = engine
        self._max_running = max_running
        self._num_playing = 0
        self._rewards = rewards or BusySpans(REWARDS)
        self.clock = Clock()
        self._elsewhere = engine if isinstance(engine, Elsewhere) else None
        self._waiting: dict[int, _Waiting] = {}
        self._turns: dict[int, asyncio.Future[tuple[Completion, str]]] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Condition()
        self._num_attempts = 0
        self._is_pumping = False
        self._held_back: list[Request] | None = None  # a list: the engine gets nothing new for now
        self._change: asyncio.Task[None] | None = None
        self._scoring: set[asyncio.Task[None]] = set()
        self._only_scores_since_s: float | None = None  # while rewards are all that is waited for
        self._one_asks = asyncio.Lock()
        self._looked_s = time.perf_counter()

    async def attempt(
        self,
        prompt: Prompt,
        *,
        step: int,
        draw: int,
        seeds: tuple[int, ...],
        sampling: Sampling,
        scorer: Scorer,
        earlier: Mapping[int, Completion] | None = None,
        keep: Keep | None = None,
    ) -> Group:
        """One completion for each seed, but for those that an ``earlier`` process has made. ``keep`` is given what has ended
        while the rest of the group goes on."""
        key, waiting = self._expect(prompt, step=step, draw=draw, scorer=scorer)
        waiting.made = dict(earlier or {})
        waiting.places = tuple(place for place in range(len(seeds)) if place not in waiting.made)
        if not waiting.places:
            waiting.receive(())
            self._hand_to_rewards(key, waiting)
            return await waiting.done
        missing = tuple(seeds[place] for place in waiting.places)
        self._request(Request(id=str(key), prompt_ids=prompt.token_ids, seeds=missing, sampling=sampling))
        if keep is not None:
            await _keep_what_ends(waiting, keep)
        return await waiting.done

    async def sample(self, prompt_ids: Ints, *, seed: int, sampling: Sampling, session: str) -> tuple[Completion, str]:
        """One turn, and the worker that made it. Turns of one ``session`` extend each other."""
        key, self._num_attempts = self._num_attempts, self._num_attempts + 1
        turn = self._turns[key] = asyncio.get_running_loop().create_future()
        self._request(Request(id=str(key), prompt_ids=prompt_ids, seeds=(seed,), sampling=sampling, session=session))
        try:
            return await turn
        except asyncio.CancelledError:
            self._give_up(key)
            raise

    @contextmanager
    def playing(self) -> Iterator[None]:
        """An episode goes on while the block runs."""
        self._num_playing += 1
        try:
            yield
        finally:
            self._num_playing -= 1
            self._work.set()  # nobody waits for its next turn

    def end_session(self, session: str) -> None:
        """No turn of it comes any more."""
        if self._is_pumping:
            self.engine.end_session(session)

    async def score_again(self, group: Group, *, scorer: Scorer) -> Group:
        """The same completions with new scores; the time at which it was finished is that of the completions."""
        key, waiting = self._expect(group.prompt, step=group.step, draw=group.draw, scorer=scorer)
        waiting.completions = group.completions
        self._hand_to_rewards(key, waiting)
        return replace(group, scores=(await waiting.done).scores)

    def _expect(self, prompt: Prompt, *, step: int, draw: int, scorer: Scorer) -> tuple[int, _Waiting]:
        key, self._num_attempts = self._num_attempts, self._num_attempts + 1
        done: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[key] = _Waiting(
            step=step, draw=draw, prompt=prompt, scorer=scorer, started_s=time.time(), done=done
        )
        return key, waiting

    def _request(self, request: Request) -> None:
        if self._held_back is None:
            self._submit(request)
        else:
            self._held_back.append(request)

    def _give_up(self, key: int) -> None:
        """Nobody waits for this turn any more."""
        held_back = self._held_back or []
        if any(request.id == str(key) for request in held_back):
            self._held_back = [request for request in held_back if request.id != str(key)]
            del self._turns[key]
        elif self._is_pumping and key in self._turns:
            self.engine.abort(str(key))

    async def drain(self) -> None:
        """Give the engine nothing new, and wait until it has finished its requests."""
        self._held_back = [] if self._held_back is None else self._held_back
        async with self._idle:
            await self._idle.wait_for(lambda: not self.engine.num_unfinished)

    def go_on(self) -> None:
        """Give the engine the requests that were held back; later ones go straight to it."""
        held_back, self._held_back = self._held_back or [], None
        for request in held_back:
            self._submit(request)

    async def pump(self) -> None:
        """Runs beside the callers of ``attempt``, until cancelled."""
        _spare_the_collector()
        self._is_pumping, is_busy = True, False
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                if self._elsewhere is None and not is_busy and self._turns:
                    await self._gather(math.inf, quiet_s=FIRST_QUIET_S, most_s=FIRST_GATHER_S, burst=BURST)
                worked = bool(self.engine.num_unfinished)
                num_turns = len(self._turns)
                decoded_s = self._poll_engine()
                if worked and not self.engine.num_unfinished:
                    async with self._idle:
                        self._idle.notify_all()
                if self._elsewhere is None:
                    await self._gather(
                        num_turns - len(self._turns),
                        quiet_s=max(QUIET_S, QUIET_SHARE * decoded_s),
                        most_s=GATHER_SHARE * decoded_s,
                    )
                elif self.engine.num_unfinished:
                    await self._rest(self._elsewhere)
                is_busy = bool(self.engine.num_unfinished)
                if is_busy:
                    self._work.set()
                elif self._scoring:
                    self._only_scores_since_s = time.perf_counter()
                await asyncio.sleep(0)
        finally:
            self._is_pumping = False
            for task in (self._change, *self._scoring):
                if task is not None:
                    task.cancel()

    async def _gather(self, count: float, *, quiet_s: float, most_s: float, burst: int = 1) -> None:
        """Wait for this many more requests, as many as there are episodes, or as the engine decodes at once; no longer once none has come for
        ``quiet_s``, or up to ``burst`` times as long: the more have come, the more are on their way."""
        wanted = min(self.engine.num_unfinished + count, self._max_running)
        until = time.perf_counter() + most_s
        while (num_there := self.engine.num_unfinished) < min(wanted, self._num_playing or math.inf):
            pause_s, now = quiet_s * min(max(num_there, 1), burst), time.perf_counter()
            if now >= until:
                return
            self._work.clear()
            try:
                async with asyncio.timeout(pause_s):  # wait_for (3.11) may forget that it is cancelled
                    await self._work.wait()
            except TimeoutError:
                if time.perf_counter() - now < 2 * pause_s:  # else others were at work here, and it was not quiet
                    return

    def _submit(self, request: Request) -> None:
        if not self.engine.num_unfinished:
            self._looked_s = time.perf_counter()
            self._count_rewards()
        try:
            self.engine.submit(request)
        except ValueError as error:
            key = int(request.id)
            done = self._turns.pop(key) if key in self._turns else self._waiting.pop(key).done
            if not done.cancelled():
                done.set_exception(error)
        self._work.set()

    async def _rest(self, engine: Elsewhere) -> None:
        """Sleep until the engine has news, or a new request comes."""
        news = asyncio.create_task(self._work.wait())
        self._change = self._change or asyncio.create_task(engine.changed())
        try:
            done, _ = await asyncio.wait({news, self._change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if self._change in done:
            change, self._change = self._change, None
            change.result()

    def _poll_engine(self) -> float:
        """Returns the seconds it took."""
        started = time.perf_counter()
        unfinished = self.engine.num_unfinished
        finished = self.engine.poll() if unfinished else []
        now = time.perf_counter()
        if self._elsewhere is None:
            self.clock.engine_s += now - started
        elif unfinished:
            self.clock.engine_s += now - self._looked_s
        self._looked_s = now
        for ended in self.engine.take_ended() if unfinished else []:
            waiting = self._waiting[int(ended.request_id)]
            waiting.ended[waiting.places[ended.place]] = ended.completion
        for result in finished:
            key = int(result.request_id)
            worker = self._elsewhere.take_maker(result.request_id) if self._elsewhere is not None else HERE
            self.clock.engine_tokens += sum(len(completion.token_ids) for completion in result.completions)
            if key in self._turns:
                turn = self._turns.pop(key)
                if not turn.cancelled():
                    turn.set_result((result.completions[0], worker))
                continue
            waiting = self._waiting[key]
            waiting.worker = worker
            waiting.receive(result.completions)
            self._hand_to_rewards(key, waiting)
        return now - started

    def _hand_to_rewards(self, key: int, waiting: _Waiting) -> None:
        self._rewards.note(True)
        task = asyncio.create_task(self._score(key, waiting))
        self._scoring.add(task)
        task.add_done_callback(self._has_scored)

    def _has_scored(self, task: asyncio.Task[None]) -> None:
        self._scoring.discard(task)
        self._rewards.note(bool(self._scoring))
        if not self._scoring:
            self._count_rewards()

    def _count_rewards(self) -> None:
        if self._only_scores_since_s is not None:
            self.clock.reward_s += time.perf_counter() - self._only_scores_since_s
            self._only_scores_since_s = None

    async def _score(self, key: int, waiting: _Waiting) -> None:
        ask_model = self._ask_elsewhere if self._elsewhere is not None else None
        try:
            scores = await waiting.scorer.score(waiting.prompt, waiting.completions, ask_model=ask_model)
        except Exception as error:  # noqa: BLE001 - who waits for the group gets it
            if not waiting.done.done():
                waiting.done.set_exception(error)
            return
        finally:
            del self._waiting[key]
        if not waiting.done.done():
            waiting.done.set_result(waiting.group(waiting.completions, scores))

    async def _ask_elsewhere(self, function: Callable[..., Any], *args: Any) -> Any:
        """Ask a model in another process, for one group at a time."""
        async with self._one_asks:
            return await in_thread(function, *args)


async def _keep_what_ends(waiting: _Waiting, keep: Keep) -> None:
    """Returns when the engine has made everything, or there is an error."""
    try:
        while not waiting.completions and not waiting.done.done():
            await asyncio.wait((waiting.done,), timeout=KEEP_EVERY_S)
            ended, waiting.ended = waiting.ended, {}
            for place, completion in ended.items():
                if not waiting.completions:
                    await keep(place, waiting.group((completion,), (UNSCORED,)))
    except asyncio.CancelledError:
        waiting.done.cancel()
        raise


def sampling_seeds(run_seed: int, step: int, prompt_id: str, count: int) -> tuple[int, ...]:
    """The seeds of a group's attempts, a function of (run seed, step, prompt, attempt) alone."""
    seeds: list[int] = []
    for attempt in range(count):
        digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_id}/{attempt}".encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little", signed=True))
    return tuple(seeds)


@cache
def _spare_the_collector() -> None:
    """What this process has loaded by now stays, so Python's collector need not look at it again: with torch and transformers a full look
    takes a fifth of a second, and everything waits."""
    gc.collect()
    gc.freeze()
