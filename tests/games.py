"""Environments of tests, as a user writes them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any


class LetterGame:
    """The model writes something, is told the letter, and writes again."""

    async def reset(self, row: dict[str, Any]) -> None:
        self.answer, self.num_turns = row["answer"], 0

    async def step(self, text: str, token_ids: list[int]) -> Any:
        self.num_turns += 1
        if self.num_turns == 1:
            return f"{self.answer}="
        return None, float(self.answer in text), True, {"tries": 2.0}


class SlowLetterGame(LetterGame):
    """Some of a group's episodes end at once, the others after what has ended was written."""

    async def step(self, text: str, token_ids: list[int]) -> Any:
        await asyncio.sleep(3.0 if sum(token_ids) % 2 else 0.0)
        return await super().step(text, token_ids)


class SuicidalGame(LetterGame):
    """Its process dies in the first turn of some rows."""

    async def step(self, text: str, token_ids: list[int]) -> Any:
        if self.answer == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(text, token_ids)
