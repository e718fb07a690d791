"""An environment for `benchmarks.episodes --way class`: a tool that says as much as it is asked for."""

from __future__ import annotations

from typing import Any


class Looking:
    def reset(self, **row: Any) -> None:
        self._num_looks = 0

    def look(self, count: int) -> str:
        """Look around.

        Args:
            count: How many things to see.
        """
        self._num_looks += 1
        return "." * count

    def get_reward(self) -> float:
        return float(self._num_looks)
