"""Freed memory stays with the process: what the C library is asked for. What a kernel makes of it is its own affair."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollcall.run import host_memory as module
from rollcall.run.host_memory import LARGE_PAGE, keep_freed_memory

BLOCK = 5 * LARGE_PAGE + 4096  # not at the start of a large page, as malloc gives them


class Recorded:
    """A function of a C library, with types to be set on it."""

    def __init__(self, result: Any = 1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._result = result

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self._result


def libc(*, block: int | None = BLOCK) -> SimpleNamespace:
    return SimpleNamespace(mallopt=Recorded(), malloc=Recorded(block), free=Recorded(None), madvise=Recorded(0))


def keep(monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace) -> SimpleNamespace:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    keep_freed_memory()
    return library


def test_large_blocks_come_from_a_heap_that_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(keep(monkeypatch, libc()).mallopt.calls)
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # in malloc.h
    assert asked[mmap_max] == 0 and asked[trim_threshold] == -1
    assert asked[arena_max] == 1, "arenas of threads hold no large blocks, and learners are called from threads"


def test_large_pages_are_asked_for_inside_the_block_and_the_block_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = keep(monkeypatch, libc())
    ((size,),) = library.malloc.calls
    ((start, length, advice),) = library.madvise.calls
    assert start % LARGE_PAGE == 0 and length % LARGE_PAGE == 0 and advice == module._MADV_HUGEPAGE
    assert start >= BLOCK and BLOCK + size - LARGE_PAGE < start + length <= BLOCK + size
    assert library.free.calls == [(BLOCK,)]


def test_without_room_for_the_block_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = keep(monkeypatch, libc(block=None))
    assert library.mallopt.calls and not library.madvise.calls and not library.free.calls


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Recorded()
    keep(monkeypatch, SimpleNamespace(malloc=asked, free=asked, madvise=asked))  # it has no mallopt
    assert asked.calls == []


def test_the_c_library_of_this_machine_takes_what_it_is_asked_for() -> None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        pytest.skip("other C libraries than glibc are left as they are")
    assert library.mallopt(-2, 64 << 20) == 1, "glibc answers 1 where it knows the setting"


@pytest.mark.parametrize(("given", "expected"), [(None, "-1"), ("10", "10")])
def test_torchs_own_allocator_is_told_to_keep_freed_memory_before_torch_is_loaded(
    given: str | None, expected: str
) -> None:
    look = "import ctypes, sys, rollcall; get = ctypes.CDLL(None).getenv; get.restype = ctypes.c_char_p"
    look += "; print(get(b'MIMALLOC_PURGE_DELAY').decode(), 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    env |= {"MIMALLOC_PURGE_DELAY": given} if given else {}
    done = subprocess.run([sys.executable, "-c", look], env=env, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [expected, "False"]
