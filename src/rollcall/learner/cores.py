"""Micro-batches side by side on the cores of a CPU.

A learner's operations on a CPU are many and short. Two threads inside each operation wait for each other at every one of
them; two micro-batches on a thread each do not. Results come in the order of the items, so sums over them do not depend
on who was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_side_by_side(device: torch.device) -> int:
    """How many micro-batches run at once: one on an accelerator, one per thread of torch's on a CPU."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def map_side_by_side(function: Callable[[Item], Result], items: Sequence[Item], *, width: int) -> Iterator[Result]:
    if width == 1 or len(items) == 1:
        return map(function, items)
    return _threads(width).map(function, items)


@cache
def _threads(width: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(width, thread_name_prefix="micro-batch", initializer=torch.set_num_threads, initargs=(1,))
    # All of them now, and this thread's own number again: torch gives the number set last to every thread that comes.
    list(pool.map(_wait_for_others, [Barrier(width)] * width))
    torch.set_num_threads(width)
    return pool


def _wait_for_others(barrier: Barrier) -> None:
    barrier.wait(timeout=60)
