"""An environment that the embedded model learns in minutes on a CPU: ask for a hidden number, then answer with it.

An episode opens with `=`. The model asks by writing `1`; the environment answers `7+0=`, where 7 is the hidden number; the model
answers `7`. Anything else in the first turn ends the episode with 0.
"""

from __future__ import annotations

import random
from typing import Any

from rollcall import StepResult

LARGEST = 9


class HiddenNumber:
    def reset(self, row: dict[str, Any]) -> str:
        self.number = random.Random(row["index"]).randint(0, LARGEST)
        self.has_asked = False
        return "="

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        if self.has_asked:
            return StepResult(reward=float(text == str(self.number)), done=True, metrics={"asked": 1.0})
        self.has_asked = text == "1"
        if not self.has_asked:
            return StepResult(reward=0.0, done=True, metrics={"asked": 0.0})
        return StepResult(f"{self.number}+0=")
