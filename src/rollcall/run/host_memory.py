"""Keeps freed memory in the process, in large pages.

An update on a CPU allocates and frees the same large tensors again and again. glibc returns blocks of that size to the
kernel at once, and each new allocation costs a page fault and a zeroed page for every 4 KiB. Memory that is kept can be in
pages of 2 MiB, which also need fewer walks through the page tables.
"""

from __future__ import annotations

import ctypes
import os

# Of malloc.h and mman.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_MADV_HUGEPAGE = 14
_SETTINGS = (
    (_ARENA_MAX, 1),  # the arenas of further threads cannot hold blocks beyond 64 MiB
    (_MMAP_MAX, 0),  # large blocks come from the heap too
    (_TRIM_THRESHOLD, -1),  # which is never cut
    (_TOP_PAD, 64 << 20),  # and grows by this much
)
LARGE_PAGE = 2 << 20
LARGE_SHARE = 4  # a quarter of the machine's memory may be in large pages


def keep_freed_memory() -> None:
    """Do so for this thread and for threads that start later. C libraries other than glibc are left unchanged."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for setting, value in _SETTINGS:
        libc.mallopt(setting, value)
    _ask_for_large_pages(libc)


def _ask_for_large_pages(libc: ctypes.CDLL) -> None:
    """Ask for large pages in the unused part of the heap. The heap is first made long enough, because each later extension would have to be
    asked for again; no memory is taken before it is used. If the kernel has no large pages, or the process's size is limited, it refuses and
    nothing changes."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // LARGE_SHARE
    block = libc.malloc(size)
    if not block:
        return
    start = -(-block // LARGE_PAGE) * LARGE_PAGE
    libc.madvise(start, (block + size - start) // LARGE_PAGE * LARGE_PAGE, _MADV_HUGEPAGE)
    libc.free(block)
