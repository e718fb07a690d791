"""This process: its accelerators' memory, how many files it may open, and its end with its parent."""

from __future__ import annotations

import resource
import sys
from typing import Any

SPARE_FILES = 1024  # for all that a process opens besides
FEWEST_FILES = 256  # a run with two reward processes has 60


def device_bytes() -> int:
    """What torch has taken of the accelerators of this process. It neither imports torch nor starts CUDA."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def allow_files(count: int) -> int:
    """Raise this process's own limit of open files, as far as it may be raised, to this many and some for all else. The limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(count + SPARE_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def refuse_few_files() -> None:
    """Before a run loads anything: without files it fails later, in places that cannot say why."""
    if (limit := allow_files(0)) < FEWEST_FILES:
        raise ValueError(
            f"this shell allows a process {limit} open files (ulimit -Hn), and a run needs {FEWEST_FILES}; start it where more are allowed"
        )
