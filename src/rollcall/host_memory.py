"""Freed memory stays with the process.

An update on a CPU allocates and frees the same large tensors over and over. glibc gives blocks of that size back to the
kernel at once, and getting them again costs a page fault and a zeroed page for every 4 KiB.
"""

from __future__ import annotations

import ctypes

# Of malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = (
    (_ARENA_MAX, 1),  # the arenas of further threads cannot hold blocks beyond 64 MiB
    (_MMAP_MAX, 0),  # large blocks come from the heap too
    (_TRIM_THRESHOLD, -1),  # which is never cut
    (_TOP_PAD, 64 << 20),  # and grows by this much
)


def keep_freed_memory() -> None:
    """From now on, and for threads that start from now on. Other C libraries than glibc are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _SETTINGS:
            mallopt(setting, value)
