"""reasoning-gym 0.1 tasks with several tries: after a wrong answer, the model reads its score and may try again.

    data:        {train: "builtin:environment"}
    environment:
      type: step
      path: "rollcall.environments.packages.reasoning_gym:Task"
      kwargs: {task: chain_sum, tries: 3, config: {max_terms: 3}}

The reward is the package's own score for the last answer. If the model gets only one try, it is simpler to create rows with
``rollcall data reasoning-gym:TASK`` and use ``reward: [{type: reasoning_gym}]``, without an environment.
"""

from __future__ import annotations

import re
from typing import Any

from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult

_ADVICE = "Give the answer as <answer>...</answer>."
_SIZE = 1_000_000_000  # entries are created on demand from their index


class Task:
    """``task``: a reasoning-gym task name. ``tries``: how many answers the model may give in an episode. ``config``: the task's own
    settings."""

    def __init__(
        self, task: str, *, tries: int = 1, seed: int = 0, config: dict[str, Any] | None = None, advice: str = _ADVICE
    ) -> None:
        self._dataset: Any = package("reasoning_gym").create_dataset(task, size=_SIZE, seed=seed, **(config or {}))
        self._tries, self._advice = tries, advice
        self._entry: dict[str, Any] = {}
        self._num_tried = 0

    def reset(self, row: dict[str, Any]) -> Observation:
        self._entry, self._num_tried = self._dataset[int(row.get("index", 0))], 0
        return Observation(f"{self._entry['question']}\n\n{self._advice}")

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        self._num_tried += 1
        found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = found[-1].strip() if found else text.strip()
        try:
            score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        except Exception:  # noqa: BLE001 - some scorers raise on text that they cannot parse, which is a wrong answer
            score = 0.0
        if score < 1 and self._num_tried < self._tries:
            return StepResult(f"That scores {score:g} out of 1. Try again. {self._advice}")
        return StepResult(reward=score, done=True, metrics={"tries": float(self._num_tried)})
