"""Episodes driven by a program that uses the OpenAI API and contains no code for training.

    Episodes ──▶ AgentPlayer.play: creates a key and runs the program as a separate process, locally or on a host
                     program ──HTTP──▶ endpoint (its own thread) ──▶ histories ──▶ sample, in the run's event loop
                     the program exits or reaches a limit; if its host is lost, the episode restarts on a different host
                 ◀── the first history as the Completion, the others as its branches

The program decides what to ask. The run decides how tokens are sampled (temperature, top-p, seed), so the samples can be used for
training. Requests count towards `max_turns`, and tokens of all histories count towards `rollout.max_response_tokens`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rollcall.base.types import Completion, EndReason, FinishReason, Prompt
from rollcall.base.wait import warn
from rollcall.base.words import visible
from rollcall.config.environments import EnvironmentBase
from rollcall.engine.protocol import Sampling
from rollcall.environments.conversation import Conversations
from rollcall.environments.endpoint import LOOPBACK, Caller, Endpoint, EndpointServer, Open, in_loop, take_reward
from rollcall.environments.episode import LONGEST_ERROR, TooLong, row_of, turn_seed, within
from rollcall.environments.histories import Histories, HistoryRow
from rollcall.environments.program import KEY
from rollcall.environments.protocol import Ended, EnvironmentFailed, EnvironmentLost, ProgramHost, Programs, SampleTurn
from rollcall.environments.wire import Refused, Wanted

GRACE_S = 10.0  # time a program has to exit on its own after it reaches a limit


class AgentEnvironments:
    """Episodes driven by programs. A program has no ``reset`` and ``step``, so ``player`` plays whole episodes. The endpoint listens on
    ``address``, which the programs must be able to reach."""

    def __init__(self, section: EnvironmentBase, *, programs: Programs, address: str = LOOPBACK) -> None:
        self.section, self.programs, self.address = section, programs, address
        self._players: list[AgentPlayer] = []

    def player(self, *, tokenizer: Any, max_prompt_tokens: int, max_response_tokens: int) -> AgentPlayer:
        self._players.append(AgentPlayer(self, tokenizer=tokenizer, max_row=max_prompt_tokens + max_response_tokens))
        return self._players[-1]

    async def find_host(self) -> NoReturn:
        raise EnvironmentFailed("a program drives its own episode, so it has no steps to call")

    def tools_of(self, kind: str) -> tuple[dict[str, Any], ...]:
        return ()  # a program sends its own tools with its requests

    async def aclose(self) -> None:
        self.programs.ends()
        try:
            while self._players:
                await self._players.pop().aclose()
        finally:
            await self.programs.aclose()


@dataclass(slots=True, kw_only=True)
class EpisodeRules(Open):
    """Limits what an episode's program may request. ``default`` are the run's settings; its ``max_tokens`` limits the total over all
    histories."""

    section: EnvironmentBase
    seed_of_attempt: int
    histories: Histories
    num_turns: int = 0
    num_seeds: int = 0
    met: EndReason | None = None  # the limit that a request reached
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    overruled: set[str] = field(default_factory=set)  # request parameters that the run overrides

    @property
    def used(self) -> int:
        return sum(row.length for row in self.histories.rows)

    def admit(self, num_choices: int) -> None:
        most = self.section.max_turns
        if self.num_turns + num_choices > most:
            raise self._over(EndReason.TURNS, f"{most} turns (environment.max_turns)", code="turn_limit")
        self.num_turns += num_choices

    def sampling(self, wanted: Wanted, *, room: int, num_added: int) -> Sampling:
        base = self.default
        own = {"temperature": base.temperature, "top_p": base.top_p, "top_k": base.top_k, "seed": None}
        self.overruled |= {name for name, value in own.items() if getattr(wanted, name) not in (None, value)}
        left = base.max_tokens - num_added - self.used
        if left < 1:
            limit = f"{base.max_tokens} tokens (rollout.max_response_tokens)"
            raise self._over(EndReason.TOKENS, limit, code="token_limit")
        return replace(
            base,
            max_tokens=min(room, left, self.section.max_turn_tokens or left, wanted.token_limit or left),
            stop_token_ids=tuple(dict.fromkeys((*base.stop_token_ids, *wanted.stop_token_ids))),
            stop_strings=tuple(dict.fromkeys((*base.stop_strings, *wanted.stop))),
        )

    def seed(self, wanted: Wanted, place: int) -> int:
        self.num_seeds += 1
        return turn_seed(self.seed_of_attempt, self.num_seeds - 1)

    def _over(self, met: EndReason, limit: str, *, code: str) -> Refused:
        self.met = self.met or met
        self.is_over.set()
        return Refused(400, f"this episode has used up its {limit}; report the reward and exit", code=code)


class AgentPlayer:
    """Plays the run's episodes. They run in the thread of the endpoint's server."""

    def __init__(self, environments: AgentEnvironments, *, tokenizer: Any, max_row: int) -> None:
        self.section = environments.section
        self._programs = environments.programs  # used in the server's loop only
        own = copy.deepcopy(tokenizer)  # another thread uses the run's tokenizer
        self._conversations = Conversations(own)
        self._callers: dict[str, Caller] = {}
        app = Endpoint(self._callers, name="policy", max_model_len=max_row, vocabulary=len(tokenizer), tokenizer=own)
        self._server = EndpointServer(app, host=environments.address)
        self._playing: set[asyncio.Task[Any]] = set()
        self._has_warned = False

    async def play(
        self, prompt: Prompt, *, seed: int, sampling: Sampling, session: str, sample: SampleTurn
    ) -> Completion:
        """Play one attempt at a prompt. ``sampling.max_tokens`` limits the total number of tokens after the prompts of all
        its histories."""
        crossing = in_loop(sample, asyncio.get_running_loop())

        async def there() -> Completion:
            task = asyncio.current_task()
            assert task is not None
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
            while True:
                host = await self._programs.find_host()
                # The loss was already reported. find_host gives up if no host comes back.
                with suppress(EnvironmentLost):
                    return await self._play_at(host, prompt, seed, sampling, session, crossing)

        return await asyncio.wrap_future(self._server.run(there()))

    async def aclose(self) -> None:
        async def stop() -> None:
            for task in self._playing:
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)

        await asyncio.wrap_future(self._server.run(stop()))
        await asyncio.to_thread(self._server.close)

    async def _play_at(
        self, host: ProgramHost, prompt: Prompt, seed: int, sampling: Sampling, session: str, sample: SampleTurn
    ) -> Completion:
        histories = Histories(self._conversations, name=session)
        # A program may use any model name.
        rules = EpisodeRules(
            model=None, default=sampling, section=self.section, seed_of_attempt=seed, histories=histories
        )
        caller = Caller(rules=rules, histories=histories, sample=sample, takes_reward=True)
        key = secrets.token_urlsafe(32)
        self._callers[key] = caller
        row = json.dumps(row_of(prompt))
        variables = {"OPENAI_BASE_URL": f"{self._server.address}/v1", KEY: key, "ROLLCALL_ROW": row}
        try:
            ended, error = await self._run_program(host, caller, rules, variables)
        finally:
            del self._callers[key]
            await caller.end_requests()
        first = histories.rows[0] if histories.rows else HistoryRow(prompt_ids=prompt.token_ids, session="")
        return first.completion(
            prompt,
            seed=seed,
            branches=tuple(row.branch() for row in histories.rows[1:]),
            reward=caller.reward,
            metrics={**caller.metrics, "requests_refused": float(caller.num_refused)},
            ended=ended,
            error=error[:LONGEST_ERROR],
            opening="" if prompt.text else first.opening,
        )

    async def _run_program(
        self, host: ProgramHost, caller: Caller, rules: EpisodeRules, variables: dict[str, str]
    ) -> tuple[EndReason, str]:
        """Return why the episode ended and what went wrong."""
        limit_s = self.section.episode_timeout_s
        try:
            program, is_late = await _run_within(limit_s, host, variables, rules.is_over)
        except EnvironmentFailed as error:
            return EndReason.ERROR, str(error)
        if rules.met is None and is_late:
            return EndReason.TIMEOUT, f"the episode took longer than environment.episode_timeout_s={limit_s:g}"
        if rules.overruled and not self._has_warned:
            self._has_warned = True
            warn(
                f"the program sets {', '.join(sorted(rules.overruled))} in its requests; the run's values replace them, because only "
                "tokens that were sampled with the run's values can be used for training"
            )
        _take_printed_reward(caller, program.stdout)
        if rules.met is not None:
            return rules.met, ""
        if program.how:
            return EndReason.ERROR, f"the program ended with {program.how}; stderr: {_tail(program.stderr)}"
        if not caller.histories.rows:
            why = f"the program ended without sending a request to OPENAI_BASE_URL; stderr: {_tail(program.stderr)}"
            if caller.last_error:
                why = f"none of the program's requests was answered; the last error: {caller.last_error}"
            elif caller.num_requests:
                why = f"the program ended before any of its requests was answered; stderr: {_tail(program.stderr)}"
            return EndReason.ERROR, why
        is_cut = any(row.finish is FinishReason.LENGTH for row in caller.histories.rows)
        return EndReason.TOKENS if is_cut and rules.used >= rules.default.max_tokens else EndReason.DONE, ""


async def _run_within(
    limit_s: float, host: ProgramHost, variables: dict[str, str], is_over: asyncio.Event
) -> tuple[Ended, bool]:
    """Run the program. Return how it ended and whether it was stopped, either after ``limit_s`` or soon after an episode limit."""
    stop = asyncio.Event()
    running, over = asyncio.create_task(host.run(variables, stop=stop)), asyncio.create_task(is_over.wait())
    try:
        with suppress(TooLong):
            await within(asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED), limit_s, "")
            if not running.done():
                await within(asyncio.wait({running}), GRACE_S, "")
        is_late = not running.done()
        stop.set()
        return await running, is_late
    finally:
        over.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _take_printed_reward(caller: Caller, printed: str) -> None:
    """Take the reward from the last line that the program printed, if that line is JSON with a reward."""
    last = printed.rstrip().rpartition("\n")[2]
    if not (last.startswith("{") and '"reward"' in last):
        return
    try:
        take_reward(caller, last.encode())
    except Refused:
        caller.num_refused += 1  # ordinary program output, not a reward


def _tail(text: str) -> str:
    return visible(text.strip()[-LONGEST_ERROR // 2 :]) or "(nothing)"
