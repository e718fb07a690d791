"""Errors that more than one room knows. An error of a single room is next to the code that raises it.

Each message says what was given, what was needed and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# The run file and the plan


class ConfigError(ValueError):
    """The run file is wrong; the message says where and what to write instead."""


class PlacementError(ValueError):
    """The placement cannot work; the message says what was given, the sum, and what to write."""


class SizesUnknown(ValueError):
    """The model's sizes are unknown here; the message says why and how to give them."""


class ModelFilesError(ValueError):
    """A file of a model directory is wrong; the message names it, the key and what was given."""


# The run directory


class JournalError(RuntimeError, ValueError):
    """The journal cannot be written or contradicts itself; the message says where and what to do."""


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint cannot be written; the message says where and what to do.

    ``errno`` is that of the fault behind it, if any: an error's cause does not travel between processes, this does.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


# The run


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; no weight was changed by it."""


class MemoryShortError(RuntimeError):
    """Memory is used up; the message has the sum of what was needed and what to change."""


class BatchTooLargeError(MemoryShortError):
    """A micro-batch does not fit where all ranks run it together: another attempt with a smaller one may succeed."""

    def __init__(self, message: str, section: str, tokens: int) -> None:
        """``tokens`` is what the next attempt of this section, actor or critic, should try."""
        super().__init__(message, section, tokens)
        self.section, self.tokens = section, tokens

    def __str__(self) -> str:
        return self.args[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a card, in one of its libraries, or of the host."""
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # Pinned host memory, and what CUDA itself allocates, fail with a class of their own.
    plain = (RuntimeError,) if torch is None else (RuntimeError, torch.AcceleratorError)
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    return type(error) in plain and any(word in str(error) for word in words)


def in_one_line(error: BaseException) -> str:
    """
    >>> in_one_line(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"))
    'CUDA out of memory. Tried to allocate 2.00 GiB'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return ". ".join(text.split(". ")[:2]).rstrip(".")[:200]


@contextmanager
def short_of_memory(sentence: Callable[[str], str]) -> Iterator[None]:
    """If an allocation fails in the block, raise this sentence, which gets torch's message, instead of its traceback."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortError(sentence(in_one_line(error))) from None


class RestartsSpentError(RuntimeError):
    """Too many losses in too short a time; the message has the last reason and the first one's traceback."""


class WeightUpdateError(RuntimeError):
    """Weights did not arrive; the message says why and where."""


class MissingPeerError(WeightUpdateError, TimeoutError):
    """A peer did not come, did not answer by the deadline, or is gone."""


# The cluster


class ClusterError(RuntimeError):
    """Something about the cluster that its user can put right; the message says what."""


class NoRoomError(ClusterError):
    """The nodes of the cluster do not have the slots that were asked for."""


class WorkerError(ClusterError):
    """A worker raised. The message has its role, rank, node and traceback; ``__cause__`` is the exception itself."""

    def __init__(self, message: str, *, role: str, ranks: Sequence[int], node_ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.role = role
        self.ranks = tuple(ranks)
        self.node_ranks = tuple(node_ranks)


class WorkerLostError(WorkerError):
    """A worker is lost, and the code it runs is not at fault: another attempt may succeed."""


class WorkerDiedError(WorkerLostError):
    """A worker's process, or its node, is gone."""


class WorkerTimeoutError(WorkerLostError, TimeoutError):
    """Workers that have not answered by the deadline."""


class PeerLostError(WorkerLostError):
    """A worker complains that it cannot reach another one that it works with."""
