"""Which processes of a lab host belong to a run, by their numbers on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from lab.lab import Host

from rollcall.process.groups.host import GROUP_MARK
from rollcall.process.groups.pulse import PULSE


def rank_of(pid: int) -> int | None:
    """Of a worker, which has its pulse in its memory; None: it looks after workers, or is none."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = re.search(rf"{PULSE}-(\d+)", maps)
    return int(found.group(1)) if found else None


def workers_on(host: Host) -> list[int]:
    """All processes of the run's group there."""
    found = []
    for pid in host.seen_from_here():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if any(variable.startswith(f"{GROUP_MARK}=".encode()) for variable in variables):
            found.append(pid)
    return found
