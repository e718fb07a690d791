"""A side of `benchmarks.episodes`: how episodes reach the engine, and what all of its processes cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from rollcall.base.types import Ints


class Lengths(Protocol):
    """An episode: its prompt, tokens sampled in each turn, observations behind all but the last."""

    @property
    def prompt(self) -> Ints: ...
    @property
    def sampled(self) -> tuple[int, ...]: ...
    @property
    def observed(self) -> tuple[Ints, ...]: ...


class Side(Protocol):
    @property
    def pids(self) -> list[int]:
        """Its processes beside this one."""
        ...

    def round(self, plans: Sequence[Lengths], *, tag: str) -> int:
        """Play these episodes; how many tokens were sampled."""
        ...

    def close(self) -> None: ...


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of this process and of these."""
    return time.process_time() + sum(map(_cpu_s_of, pids))


def _cpu_s_of(pid: int) -> float:
    # Behind the name, which may hold anything: state, 10 more, then user and system time in ticks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
