"""Keeps freed memory in the process, in huge pages.

An update on a CPU allocates and frees the same large tensors again and again. glibc returns blocks of that size to the
kernel at once, so each new allocation pays for a page fault and a zeroed page per 4 KiB. Memory that stays in the process
can use 2 MiB pages, which also need fewer page table walks.
"""

from __future__ import annotations

import ctypes
import os

_MADV_HUGEPAGE = 14  # from mman.h
LARGE_PAGE = 2 << 20


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, in this thread and in threads that start later. Does nothing with C libraries other than glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    # The settings have these numbers in malloc.h.
    libc.mallopt(-8, 1)  # M_ARENA_MAX: other threads' arenas cannot contain blocks beyond 64 MiB
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never trim the heap
    libc.mallopt(-2, 64 << 20)  # M_TOP_PAD: grow the heap by this much
    # Ask for huge pages in the unused part of the heap. The heap is extended first, because each later extension would need another
    # request; the kernel provides the memory only when it is used. If the kernel has no huge pages, or limits the size of the process,
    # nothing changes.
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4  # of the machine's memory
    block = libc.malloc(size)
    if not block:
        return
    start = -(-block // LARGE_PAGE) * LARGE_PAGE
    libc.madvise(start, (block + size - start) // LARGE_PAGE * LARGE_PAGE, _MADV_HUGEPAGE)
    libc.free(block)
