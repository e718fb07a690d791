"""This process's limit on open files."""

from __future__ import annotations

import resource

SPARE_FILES = 1024  # for other files that a process opens
FEWEST_FILES = 256  # a run with two reward processes opens 60


def allow_files(count: int) -> int:
    """Raise this process's open-file limit to ``count`` plus some spare, as far as allowed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(count + SPARE_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def refuse_few_files() -> None:
    """Refuse to start if the open-file limit is too low: the run would fail later, in places that cannot say why."""
    if (limit := allow_files(0)) < FEWEST_FILES:
        raise ValueError(
            f"this shell allows a process {limit} open files (ulimit -Hn), and a run needs {FEWEST_FILES}; start it where more are allowed"
        )
