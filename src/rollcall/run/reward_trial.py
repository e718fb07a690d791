"""`rollcall reward test`: tries a run's rewards on a few of its rows, before training.

Each row is scored as a group of three completions: the row's own answer, an empty text, and a text without an answer.
This finds a reward that cannot be loaded, that always fails, or that scores correct answers with 0, before training wastes
hours on it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rollcall.base.process_table import refuse_few_files
from rollcall.base.types import Completion, Prompt
from rollcall.config import Config
from rollcall.config.rewards import AskedReward
from rollcall.reward.scorer import Failure, Scorer, columns_needed

ANSWER, EMPTY, SAMPLE = "its answer", "empty", "a text"
_NEED_THE_POLICY = ("self_certainty", "environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A trial completion and its score."""

    row: str
    completion: str  # the kind: ANSWER, EMPTY or SAMPLE
    text: str
    score: float  # the weighted sum
    parts: dict[str, float]
    errors: dict[str, str]
    notes: dict[str, str]  # from reward services
    seconds: float  # the time to score the row's group, divided by the group's size


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    scored: list[Scored]
    failures: list[Failure]  # the first failure of each reward and kind, with its traceback
    in_force: dict[str, dict[str, str]]  # which limits apply to each reward's processes on this machine
    left_out: list[str]  # rewards that need the policy

    @property
    def broken(self) -> list[str]:
        """The rewards that failed on every completion."""
        names = self.scored[0].parts if self.scored else ()
        return [name for name in names if all(name in scored.errors for scored in self.scored)]

    @property
    def is_constant(self) -> bool:
        return len({scored.score for scored in self.scored}) == 1

    @property
    def gives_answers_nothing(self) -> bool:
        answers = [scored for scored in self.scored if scored.completion == ANSWER and not scored.errors]
        return bool(answers) and all(scored.score <= 0 for scored in answers)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.broken,
            "broken": self.broken,
            "answers_score_nothing": self.gives_answers_nothing,
            "scored": [asdict(scored) for scored in self.scored],
            "failures": [asdict(failure) for failure in self.failures],
            "in_force": self.in_force,
            "left_out": self.left_out,
        }


def try_run(config: Config, *, num_rows: int) -> Trial:
    """Score the first rows of the run's training data."""
    from rollcall.loop.data.load import load_prompts
    from rollcall.model.files import resolve_model
    from rollcall.model.load import load_tokenizer

    refuse_few_files()
    model, data = config.model, config.data
    path = resolve_model(model.path)
    tokenizer = load_tokenizer(path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code)
    needs = columns_needed(config.reward)
    found = load_prompts(data.train, data=data, tokenizer=tokenizer, limit=num_rows, needs=needs)
    # On a cluster, the environment may be installed only on the nodes.
    if config.cluster is None and config.environment is not None:
        from rollcall.run.build import build_environments

        environments = build_environments(config.environment, tokenizer, found)
        assert environments is not None
        asyncio.run(environments.aclose())
    return try_rewards(config, found.prompts)


def try_rewards(config: Config, prompts: list[Prompt]) -> Trial:
    """Score each prompt's own answer, an empty completion, and a text without an answer."""
    # The trial does not wait for a service that is down.
    rewards = [
        reward.model_copy(update={"outage_s": 0.0}) if isinstance(reward, AskedReward) else reward
        for reward in config.reward
        if reward.type not in _NEED_THE_POLICY
    ]
    left_out = [reward.type for reward in config.reward if reward.type in _NEED_THE_POLICY]
    if not rewards:
        return Trial(scored=[], failures=[], in_force={}, left_out=left_out)
    from rollcall.model.load import resolve_device
    from rollcall.reward.model import load_reward_models

    device, trust = resolve_device(config.model.device), config.model.trust_remote_code
    models = load_reward_models(rewards, device=device, trust_remote_code=trust)
    with Scorer(rewards, num_workers=1, model_rewards=models) as scorer:
        if not (readers := scorer.environment_readers):
            scored = [scored for prompt in prompts for scored in _score(scorer, prompt)]
            return Trial(scored=scored, failures=scorer.failures, in_force=scorer.in_force, left_out=left_out)
    others = [reward for reward, name in zip(rewards, scorer.names, strict=True) if name not in readers]
    return replace(try_rewards(config.model_copy(update={"reward": others}), prompts), left_out=[*left_out, *readers])


def _score(scorer: Scorer, prompt: Prompt) -> list[Scored]:
    """Score the completions as one group, because some rewards compare the completions of a group."""
    texts = [(EMPTY, ""), (SAMPLE, "Let me think about it. I do not know the answer.")]
    if prompt.answer.strip():
        texts.insert(0, (ANSWER, prompt.answer))
    completions = tuple(Completion.given(np.zeros(1, dtype=np.int32), text=text) for _, text in texts)
    started = time.perf_counter()
    scores = asyncio.run(scorer.score(prompt, completions))
    seconds = (time.perf_counter() - started) / len(texts)
    return [
        Scored(
            row=prompt.id,
            completion=kind,
            text=text,
            score=score.value,
            parts=score.parts,
            errors=score.errors,
            notes=score.notes,
            seconds=seconds,
        )
        for (kind, text), score in zip(texts, scores, strict=True)
    ]
