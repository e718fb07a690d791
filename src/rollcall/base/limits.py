"""The limit of open files of this process."""

from __future__ import annotations

import resource

SPARE_FILES = 1024  # for everything else that a process opens
FEWEST_FILES = 256  # a run with two reward processes has 60


def allow_files(count: int) -> int:
    """Raise this process's limit of open files, as far as allowed, to this many and some to spare; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(count + SPARE_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def refuse_few_files() -> None:
    """Refuse to start where too few files may be opened: the run would fail later, in places that cannot say why."""
    if (limit := allow_files(0)) < FEWEST_FILES:
        raise ValueError(
            f"this shell allows a process {limit} open files (ulimit -Hn), and a run needs {FEWEST_FILES}; start it where more are allowed"
        )
