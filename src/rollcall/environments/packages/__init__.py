"""Environments of other packages as classes of the step-by-step interface, one module for each package.

A module imports its package when an environment is made, and only those modules of Rollcall that need nothing but the standard library: with
``environment.python`` it runs in the Python that has the package.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def package(name: str) -> Any:
    """The package that an environment comes from."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"{name} is not installed in {sys.executable}; install it there, or name a Python that has it in environment.python"
        ) from None


class Echo:
    """The environment of a rehearsal (`rollcall simulate`): any text is answered once, in a process where the run's own would be."""

    def reset(self, row: dict[str, Any]) -> None:
        self.num_turns = 0

    def step(self, text: str, token_ids: list[int]) -> tuple[str, float, bool]:
        self.num_turns += 1
        return text[:2] or "?", 0.0, self.num_turns == 2
