"""The interface between scheduling and computation. A runner stores the KV of the running sequences, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from rollcall.base.types import Bools, Floats, Ints, Longs
from rollcall.engine.native.adapters import Served
from rollcall.engine.sequence import Sequence

KV = TypeVar("KV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    tokens: Longs  # [steps, rows]
    logprobs: Floats  # [steps, rows]


class Runner(Protocol):
    """Rows 0..n-1 are the running sequences. The engine has its own list of rows and makes every change there as well."""

    room: int  # the maximum number of KV tokens that a single sequence can have
    ahead_from: float  # with at least this many rows, the engine starts the next chunk before it reads the results of the last one

    def steps(self, remaining: list[int]) -> int:
        """Return how many steps to decode before the results are read. ``remaining``: how many more tokens each row may get."""
        ...

    def admit(self, sequences: list[Sequence]) -> int:
        """Append as many of these sequences as fit, in order, and fill their KV. Return how many fit."""
        ...

    def reserve(self, steps: int) -> bool:
        """Make room for this many more tokens in every row (not past its limit). Return whether there was room."""
        ...

    def carry(self, ended: list[int]) -> bool:
        """Return whether these ended rows may stay for another chunk because they cost next to nothing. No more room is reserved for
        them. If they may not stay, the engine removes them before that chunk."""
        ...

    def start(self, steps: int) -> None:
        """Start sampling this many tokens for every row. If a chunk is already in progress, the rows must not have changed since it was
        started."""
        ...

    def read(self) -> Chunk:
        """Wait for the oldest chunk in progress and return it. Values past a row's limit are meaningless."""
        ...

    def remove(self, row: int) -> None:
        """Remove a row. The last row takes its place."""
        ...

    def keep(self, rows: dict[int, Sequence]) -> None:
        """Keep the KV of these ended rows for the next request of their session, if there is room. Running rows have priority. The caller
        removes the rows next. ``admit`` uses the kept KV. So sessions are sorted by when they were last used."""
        ...

    def forget(self, session: str | None) -> None:
        """Drop the KV kept for this session, or for all sessions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Generic[KV]):
    """The KV that a request left behind for the next request of its session. This is only a cache: the results are the same without it."""

    session: str
    ids: Ints  # the tokens whose KV this is
    kv: KV

    def num_shared(self, sequence: Sequence) -> int:
        """Return how many of the sequence's tokens can use this KV: the tokens up to the first difference, but never the last token (it
        is the next input)."""
        ids = sequence.all_ids()[:-1]
        length = min(len(ids), len(self.ids))
        different = np.flatnonzero(ids[:length] != self.ids[:length])
        return int(different[0]) if len(different) else length


class RowState:
    """Each row's state on the host. Every array has shape [max_running]."""

    def __init__(self, max_running: int, *, served: Served | None = None) -> None:
        self._served = served
        self.numbers = np.zeros((5, max_running), dtype=np.int64)
        # The token to feed, its position, where the row must end, how many tokens were drawn, the seed for the draws.
        self.next, self.position, self.limit, self.drawn, self.seed = self.numbers
        self.temperature = np.zeros(max_running, dtype=np.float32)
        self.top_p = np.ones(max_running, dtype=np.float32)
        self.top_k = np.zeros(max_running, dtype=np.int64)
        self.slot = np.full(max_running, -1, dtype=np.int64)  # the adapter's slot, or -1

    def set(self, row: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.next[row] = sequence.token_ids[-1] if sequence.token_ids else sequence.request.prompt_ids[-1]
        self.position[row] = sequence.length - 1
        self.limit[row] = sequence.limit
        self.drawn[row] = len(sequence.token_ids)
        self.seed[row] = sequence.request.seed
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        if self._served is not None:
            self.slot[row] = self._served.slot(sequence.request.adapter)

    def move(self, source: int, *, to: int) -> None:
        for state in (*self.numbers, self.temperature, self.top_p, self.top_k, self.slot):
            state[to] = state[source]

    def is_over(self, num_rows: int) -> Bools:
        """Return which of the first ``num_rows`` rows get no more tokens."""
        return self.position[:num_rows] >= self.limit[:num_rows]

    def gain(self, num_rows: int) -> Tensor | None:
        """Return the adapter gains of the first ``num_rows`` rows, or None if the engine has no adapters."""
        return None if self._served is None else self._served.gain(self.slot[:num_rows])

    def fill_gain(self, fills: Iterable[Fill]) -> Tensor | None:
        """Return the adapter gains of the fills' tokens, or None if the engine has no adapters."""
        if self._served is None:
            return None
        return self._served.gain(np.concatenate([self.slot[[fill.rows[0]] * len(fill.token_ids)] for fill in fills]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Tokens whose KV is computed once and stored in these rows, after the KV of ``past`` tokens that is already there."""

    token_ids: Ints
    rows: tuple[int, ...]
    past: int = 0


PromptKey = tuple[str | None, bytes]


def prompt_key(sequence: Sequence) -> PromptKey:
    """Return a key that is equal for sequences whose prompts have the same KV."""
    return sequence.request.adapter, sequence.request.prompt_ids.tobytes()


def plan_fills(sequences: list[Sequence], first_row: int, *, past: Mapping[int, int]) -> list[Fill]:
    """Plan one fill per prompt for all fresh completions of that prompt, and one fill per resumed completion. ``past`` maps each row that
    already has KV to its number of tokens."""
    shared: dict[PromptKey, tuple[Ints, list[int]]] = {}  # a prompt and its rows
    fills: list[Fill] = []
    for row, sequence in enumerate(sequences, start=first_row):
        if sequence.token_ids or row in past:
            start = past.get(row, 0)
            fills.append(Fill(token_ids=sequence.all_ids()[start:-1], rows=(row,), past=start))
        else:
            _, rows = shared.setdefault(prompt_key(sequence), (sequence.request.prompt_ids[:-1], []))
            rows.append(row)
    fills += [Fill(token_ids=ids, rows=tuple(rows)) for ids, rows in shared.values()]
    return [fill for fill in fills if len(fill.token_ids)]


def order_fills(fills: list[Fill]) -> list[Fill]:
    """Sort the fills: those without a past first, and fills of equal length next to each other."""
    return sorted(fills, key=lambda fill: (fill.past > 0, len(fill.token_ids)))


def in_parts(fills: list[Fill], *, cost: Callable[[Fill], int], most: Callable[[], int]) -> Iterator[list[Fill]]:
    """Split the fills into parts, in order. Each part costs at most ``most()`` tokens, or is a single fill."""
    part: list[Fill] = []
    size = 0
    for fill in fills:
        if part and size + cost(fill) > most():
            yield part
            part, size = [], 0
        part.append(fill)
        size += cost(fill)
    if part:
        yield part
