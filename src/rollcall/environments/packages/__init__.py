"""Wraps environments from other packages in the step-by-step interface, with one module per package.

A module imports its package only when an environment is created. It imports only those Rollcall modules that need nothing beyond the
standard library, because with ``environment.python`` it runs in the Python that has the package.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def package(name: str) -> Any:
    """Import the package that an environment comes from."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"{name} is not installed in {sys.executable}; install it there, or set environment.python to a Python that has it"
        ) from None


class Echo:
    """The environment for a rehearsal (`rollcall simulate`). It answers the model once, whatever the model wrote, and runs in the same
    kind of process as the real environment."""

    def reset(self, row: dict[str, Any]) -> None:
        self.num_turns = 0

    def step(self, text: str, token_ids: list[int]) -> tuple[str, float, bool]:
        self.num_turns += 1
        return text[:2] or "?", 0.0, self.num_turns == 2
