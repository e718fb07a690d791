"""Errors that several packages use. A package defines its other errors next to the code that raises them.

Each message says what was given, what is needed and what to do.
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
    """The placement cannot work; the message says what was given, what follows from it, and what to write."""


class SizesUnknown(ValueError):
    """The model's sizes cannot be found on this machine; the message says why and how to provide them."""


class ModelFilesError(ValueError):
    """A model, or a file in its directory, cannot be used; the message names the path or the file, and says why."""


# The run directory


class JournalError(RuntimeError, ValueError):
    """The journal cannot be written or is inconsistent; the message says where and what to do."""


class CheckpointError(RuntimeError, ValueError):
    """A checkpoint cannot be written; the message says where and what to do.

    ``errno`` is that of the underlying disk error, if any. Unlike an exception's cause, it is passed between processes.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


# The run


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; no weights were changed."""


class MemoryShortError(RuntimeError):
    """Out of memory; the message says how much was needed and what to change."""


class BatchTooLargeError(MemoryShortError):
    """A micro-batch that all ranks run together does not fit in memory. Another attempt with a smaller one may succeed."""

    def __init__(self, message: str, section: str, tokens: int) -> None:
        """``tokens`` is the size that the next attempt should use for this section (actor or critic)."""
        super().__init__(message, section, tokens)
        self.section, self.tokens = section, tokens

    def __str__(self) -> str:
        return self.args[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, in one of its libraries, or on the host."""
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # A failed allocation of pinned host memory, or in CUDA itself, raises another error class.
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
    """If an allocation fails in the block, raise ``MemoryShortError(sentence(message))`` without a traceback."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortError(sentence(in_one_line(error))) from None


class RestartsSpentError(RuntimeError):
    """Too many failures in too short a time; the message contains the latest reason and the traceback of the first failure."""


class WeightUpdateError(RuntimeError):
    """New weights did not arrive; the message says why and where."""


class MissingPeerError(WeightUpdateError, TimeoutError):
    """A peer did not connect, did not answer by the deadline, or was lost."""


# The cluster


class ClusterError(RuntimeError):
    """A cluster problem that the user can fix; the message says what it is."""


class NoRoomError(ClusterError):
    """The cluster's nodes do not have the requested slots."""


class WorkerError(ClusterError):
    """A worker raised an exception. The message contains its role, rank, node and traceback; ``__cause__`` is the exception."""

    def __init__(self, message: str, *, role: str, ranks: Sequence[int], node_ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.role = role
        self.ranks = tuple(ranks)
        self.node_ranks = tuple(node_ranks)


class WorkerLostError(WorkerError):
    """A worker is lost, but its code is not at fault: another attempt may succeed."""


class WorkerDiedError(WorkerLostError):
    """A worker's process or its node has died."""


class WorkerTimeoutError(WorkerLostError, TimeoutError):
    """Workers did not answer by the deadline."""


class PeerLostError(WorkerLostError):
    """A worker reports that it cannot reach another worker."""
