"""Episodes of a class with a tool, for `benchmarks.episodes --way class`: the path of a run from `loop/rollout.py` down, with the
environments' processes, the chat template, a tool call in each turn and the environment's reward.

The model's weights are random, so its text holds no calls. The engine samples every token of a turn; then `Calling` puts the text of a
call in place of the turn's text, and only there. It also gives each turn its planned length.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from benchmarks.sides import Lengths
from rollcall.base.types import Completion, EndReason, Prompt
from rollcall.config.environments import ClassEnvironment
from rollcall.config.rewards import EnvironmentReward
from rollcall.engine.protocol import Core, Request, Sampling
from rollcall.engine.ticker import Ticker
from rollcall.environments.conversation import Conversations
from rollcall.environments.episode import Player
from rollcall.environments.host import make_environments
from rollcall.environments.protocol import Message
from rollcall.loop.rollout import Rewards, Rollouts
from rollcall.reward.scorer import Scorer
from rollcall.reward.trl import MESSAGES

BEGIN, END = "<unused0>", "<unused1>"  # of a message: one token each
TEMPLATE = (
    "{%- if tools %}{{ '" + BEGIN + "system\n<tools>' }}"
    "{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{%- endfor %}"
    "{{ '\n</tools> Call one as <tool_call>{\"name\": NAME, \"arguments\": {...}}</tool_call>" + END + "\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '" + BEGIN + "' + message.role + '\n' + message.content + '" + END + "\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '" + BEGIN + "assistant\n' }}{%- endif %}"
)  # fmt: skip


class Calling:
    """A core whose turns are as long as planned and read as tool calls that ask for the planned observations."""

    def __init__(self, engine: Core, *, num_around: int) -> None:
        self._engine, self._num_around = engine, num_around
        self.plans: Sequence[Lengths] = ()
        self._calls: list[list[str]] = []  # of each plan, in each turn
        self._sessions: dict[str, tuple[int, int]] = {}  # the plan and the next turn
        self._texts: dict[str, str] = {}  # by request

    def submit(self, request: Request) -> None:
        assert request.session is not None
        number, turn = self._sessions.get(request.session, (len(self._sessions), 0))
        self._sessions[request.session] = number, turn + 1
        self._texts[request.id] = self._calls[number][turn]
        max_tokens = self.plans[number].sampled[turn]
        self._engine.submit(replace(request, sampling=replace(request.sampling, max_tokens=max_tokens)))

    def step(self) -> dict[str, Completion]:
        return {name: replace(turn, text=self._texts.pop(name)) for name, turn in self._engine.step().items()}

    def begin(self, plans: Sequence[Lengths]) -> None:
        if plans is not self.plans:
            self.plans = plans
            self._calls = [
                [self._call(plan, turn) for turn in range(len(plan.sampled))] for plan in plans
            ]  # a model's text takes none of the time that is measured
        self._sessions.clear()

    def _call(self, plan: Lengths, turn: int) -> str:
        observed = len(plan.observed[turn]) if turn < len(plan.observed) else self._num_around + 1
        call = json.dumps({"name": "look", "arguments": {"count": observed - self._num_around}})
        return f"<tool_call>\n{call}\n</tool_call>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class ClassSide:
    def __init__(self, engine: Any, *, max_turns: int, episodes: int, running: int) -> None:
        self.tokenizer = engine.tokenizer
        self.tokenizer.add_tokens([BEGIN, END], special_tokens=True)
        self.tokenizer.chat_template = TEMPLATE
        section = ClassEnvironment(
            path="benchmarks.class_environment:Looking", max_turns=max_turns, max_running=episodes
        )
        self._environments = make_environments(section, chat_template=TEMPLATE)
        self._tools = self._environments.tools_of("")
        self._conversations = Conversations(self.tokenizer)
        self._scorer = Scorer([EnvironmentReward()], num_workers=1, model_rewards={})
        self._max_positions: int = engine.max_positions
        self._loop = asyncio.new_event_loop()
        player = Player(
            section=section,
            environments=self._environments,
            conversations=self._conversations,
            max_prompt_tokens=self._max_positions,
        )
        self._engine = Calling(engine, num_around=self._extended(1) - 1)
        ticker = Ticker(self._engine, max_running=running)  # type: ignore[arg-type]
        self._rollouts = Rollouts(engine=ticker, rewards=Rewards(), player=player)
        self._prompts: list[Prompt] = []

    @property
    def least_observed(self) -> int:
        """Tokens of the shortest observation, most of them the template's."""
        return self._extended(1)

    @property
    def prompt_tokens(self) -> int:
        return len(self._make_prompt(0).token_ids)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in psutil.Process().children(recursive=True)]

    def round(self, plans: Sequence[Lengths], *, tag: str) -> int:
        """How many tokens were sampled."""
        self._engine.begin(plans)
        while len(self._prompts) < len(plans):
            self._prompts.append(self._make_prompt(len(self._prompts)))
        return self._loop.run_until_complete(self._play(len(plans)))

    def close(self) -> None:
        self._loop.run_until_complete(self._environments.aclose())
        self._scorer.close()

    async def _play(self, num_episodes: int) -> int:
        longest = self._max_positions - self.prompt_tokens
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=longest, stop_token_ids=(), stop_strings=())
        groups = await asyncio.gather(
            *(
                self._rollouts.group(
                    prompt, step=0, draw=number, seeds=(number,), sampling=sampling, scorer=self._scorer
                )
                for number, prompt in enumerate(self._prompts[:num_episodes])
            )
        )
        for completion in (each for group in groups for each in group.completions):
            episode = completion.episode
            assert episode is not None and episode.ended is EndReason.TURNS, episode
            assert episode.reward == len(episode.turns), "each turn has called the tool"
        return sum(int(each.mask.sum()) for group in groups for each in group.completions)

    def _extended(self, count: int) -> int:
        said = (Message(role="tool", content="." * count, name="look"),)
        return len(self._conversations.extend(said, is_chat=True, tools=self._tools, last_id=-1))

    def _make_prompt(self, number: int) -> Prompt:
        """No two are equal, as on the single-turn side: neither fills one prompt for several episodes."""
        messages = [{"role": "user", "content": f"Look around you, {number:04d}."}]
        ids = self._conversations.open_chat(messages, tools=self._tools)
        text = self._conversations.tokenizer.decode(ids)
        return Prompt(id=f"p{number}", token_ids=ids, text=text, answer="", metadata={MESSAGES: messages})
