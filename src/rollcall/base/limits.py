"""Facts about this process and its peers: accelerator memory, open files, whose process is at the other end of a socket."""

from __future__ import annotations

import os
import resource
import struct
import sys
from typing import Any

SPARE_FILES = 1024  # for everything else that a process opens
FEWEST_FILES = 256  # a run with two reward processes has 60


def device_bytes() -> int:
    """Bytes of accelerator memory that torch has reserved in this process. Neither imports torch nor starts CUDA."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


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


def is_own_users(peer: Any) -> bool:
    """Whether the other end of a Unix socket is a process of this user, or root's."""
    import socket  # few processes need it, and children have to start fast

    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user in (0, os.getuid())
