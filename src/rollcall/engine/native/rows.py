"""The CPU runner: one dense row of KV per running sequence, decoded step by step.

Rows are kept compact (0..n-1) and end together: the token of a step goes into one column for all rows, and a row that
came later starts further right. So a step writes one plain slice, and attention reads plain slices. Where products are
the fast way (``attention.cpu_way``), it is two batched products, and keys lie transposed in memory for the first; else it
is torch's fused kernel, and keys lie as values do. Both keep keys under the same shape. Room is rows x columns, which is
what the memory really is. It is float32 for bfloat16 models too: products of so few rows take longer in bfloat16.

The KV of sessions is kept outside the rows and counts as room. It goes, oldest first, when rows need the room. Where room has
no limit, it takes at most what ``max_running`` rows of its longest would take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollcall.engine.native.adapters import Served
from rollcall.engine.native.extend import plan_extensions
from rollcall.engine.native.fill import run_fills
from rollcall.engine.native.kept import Kept
from rollcall.engine.native.kept_rows import KeptRow, KeptRows, Leaving, Plane, Returning
from rollcall.engine.native.runner import Chunk, Fill, RowState, Sequence, order_fills, plan_fills
from rollcall.engine.native.sampler import sample
from rollcall.engine.uniform import uniforms
from rollcall.model.attention import Way, cpu_way
from rollcall.model.decoder import Decoder

KEPT_PER_ROW = 2  # conversations whose KV is kept for each row: one that waits to go on, one whose turn has just ended
CHUNK = 8  # steps between two looks at the results
COLUMN_STEP = 32  # rows grow by this many columns
TURN = 128  # columns before the first one, for the next turns of sessions


class RowRunner:
    def __init__(
        self,
        decoder: Decoder,
        *,
        max_running: int,
        kv_tokens: int | None,
        compile: bool = False,
        attention: Way | None = None,
        served: Served | None = None,
    ):
        """``attention`` is this machine's own way unless one is given."""
        self.decoder = decoder
        self._attend = attend_by_products if (attention or cpu_way()) == "products" else attend_fused
        self._logits = compiled_logits if compile else next_logits
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.num_rows = 0
        self.num_filled_tokens = 0  # tokens whose KV was computed outside decoding
        self._capacity = (0, 0)  # rows, columns
        self._keys: list[Tensor] = [torch.empty(0)] * len(decoder.layers)  # each [rows * Hkv, D, columns]
        self._values: list[Tensor] = [torch.empty(0)] * len(decoder.layers)  # each [rows * Hkv, columns, D]
        self._column = 0  # where the next token of every row goes
        self._chunks: deque[Chunk] = deque()  # sampled and not read
        self.ahead_from = math.inf  # the host computes: there is nothing to wait for
        self._rows = RowState(max_running, served=served)  # a row starts ``position`` columns back
        self._uniform = np.zeros((max_running, 0), dtype=np.float32)  # the row's draws
        self._kept = KeptRows()
        self._has_sessions = False
        self._broken = np.zeros(max_running, dtype=np.bool_)  # rows that had a log-prob which is not finite

    @property
    def room(self) -> int:
        return self.kv_tokens if self.kv_tokens is not None else self.decoder.max_positions

    def steps(self, remaining: list[int]) -> int:
        """Compute is what a CPU is short of: look as soon as a row must end, so that none is decoded past it."""
        return min(CHUNK, *remaining)

    def admit(self, sequences: list[Sequence]) -> int:
        count, longest = 0, int(self._rows.position[: self.num_rows].max(initial=0)) + 1
        taken: dict[int, tuple[Kept[KeptRow], int]] = {}  # by row
        for row, sequence in enumerate(sequences[: self.max_running - self.num_rows], start=self.num_rows):
            longest = max(longest, sequence.length)
            kept = self._kept.take(sequence)
            # One more step must fit as well, or the next reserve would throw the newcomer out again.
            if not self._make_fit(row + 1, min(longest + 1, max(longest, sequence.limit))):
                if kept is not None:
                    self._kept.put_back(kept[0])
                break
            if kept is not None:
                taken[row] = kept
            count += 1
        if count == 0:
            return 0
        first, self.num_rows = self.num_rows, self.num_rows + count
        admitted = sequences[:count]
        lead = int(self._rows.position[:first].max(initial=0))
        for row, sequence in enumerate(admitted, start=first):
            self._rows.set(row, sequence)
            self.decoder.grow_rope(sequence.limit)
        self._draw_uniforms(admitted, first)
        self._make_room(steps=1, live=(first, lead))
        if taken:
            self._restore(taken)
        fills = plan_fills(admitted, first, past={row: num_tokens for row, (_, num_tokens) in taken.items()})
        if fills:
            self._fill(fills)
        return count

    def reserve(self, steps: int) -> bool:
        rows = self.num_rows
        needed = int(np.minimum(self._rows.position[:rows] + steps, self._rows.limit[:rows]).max())
        lead = int(self._rows.position[:rows].max())
        if not self._make_fit(rows, needed):
            return False
        self._make_room(steps=needed - lead, live=(rows, lead))
        return True

    def carry(self, ended: list[int]) -> bool:
        return not ended  # decoding a row takes time here

    @torch.inference_mode()
    def start(self, steps: int) -> None:
        rows = self.num_rows
        tokens = np.zeros((steps, rows), dtype=np.int64)
        logprobs = np.zeros((steps, rows), dtype=np.float32)
        for step in range(steps):
            tokens[step], logprobs[step] = self._decode_step(rows)
        self._broken[:rows] |= ~np.isfinite(logprobs).all(axis=0)
        self._chunks.append(Chunk(tokens=tokens, logprobs=logprobs))

    def read(self) -> Chunk:
        return self._chunks.popleft()

    def remove(self, row: int) -> None:
        last = self.num_rows - 1
        self._clear_if_broken(row)
        if row != last:
            there, here = self._seats(row), self._seats(last)
            columns = slice(self._column - int(self._rows.position[last]), self._column)
            for keys, values in zip(self._keys, self._values, strict=True):
                keys[there, :, columns] = keys[here, :, columns]
                values[there, columns] = values[here, columns]
            self._rows.move(last, to=row)
            self._uniform[row] = self._uniform[last]
            is_broken = self._broken[last]
            self._clear_if_broken(last)
            self._broken[row] = is_broken
        self.num_rows = last

    def _clear_if_broken(self, row: int) -> None:
        """What a mask hides still takes part in products, and zero times NaN is NaN: nothing of such a row may stay for the next."""
        if self._broken[row]:
            for tensor in (*self._keys, *self._values):
                tensor[self._seats(row)] = 0
        self._broken[row] = False

    def _seats(self, row: int) -> slice:
        heads = self.decoder.num_kv_heads
        return slice(row * heads, (row + 1) * heads)

    @torch.inference_mode()
    def keep(self, rows: dict[int, Sequence]) -> None:
        self._has_sessions = True
        leaving: list[Leaving] = []
        for row, sequence in rows.items():
            session, ids = sequence.request.session, sequence.all_ids()[:-1]
            assert session is not None
            self._kept.forget(session)
            past = int(self._rows.position[row])
            if not self._broken[row]:
                leaving.append(Leaving(session=session, order=sequence.order, ids=ids, row=row, past=past))
        if not leaving:
            return
        longest = max(row.past for row in leaving)
        if self.kv_tokens is None:
            room = KEPT_PER_ROW * self.max_running * max(longest, self._kept.longest)
        else:
            room = self.kv_tokens - (self.num_rows - len(rows)) * int(self._rows.position[: self.num_rows].max())
        while self._kept.num_tokens + len(leaving) * longest > room and self._kept.give_way():
            pass
        self._kept.put(leaving, self._planes(), end=self._column)

    def began(self, session: str | None) -> int | None:
        return self._kept.began(session)

    def forget(self, session: str | None) -> None:
        if session is None:
            self._kept.forget_all()
        else:
            self._kept.forget(session)

    @torch.inference_mode()
    def _restore(self, taken: dict[int, tuple[Kept[KeptRow], int]]) -> None:
        returning = [
            Returning(kept=kept, num_tokens=count, row=row, column=self._column - int(self._rows.position[row]))
            for row, (kept, count) in taken.items()
        ]
        self._kept.restore(returning, self._planes())

    def _planes(self) -> list[Plane]:
        shape = (self._capacity[0], self.decoder.num_kv_heads)
        transposed = self._attend is attend_by_products  # keys, in memory
        keys = [
            Plane(layer.unflatten(0, shape), 3) if transposed else Plane(layer.transpose(1, 2).unflatten(0, shape), 2)
            for layer in self._keys
        ]
        return keys + [Plane(layer.unflatten(0, shape), 2) for layer in self._values]

    def _fits(self, rows: int, length: int) -> bool:
        return self.kv_tokens is None or rows * length + self._kept.num_tokens <= self.kv_tokens

    def _make_fit(self, rows: int, length: int) -> bool:
        """Whether it fits when sessions give way. They do not for what would not fit even then."""
        if self.kv_tokens is not None and rows * length > self.kv_tokens:
            return False
        while not self._fits(rows, length):
            if not self._kept.give_way():
                return False
        return True

    def _make_room(self, *, steps: int, live: tuple[int, int]) -> None:
        """Room for every row's past and ``steps`` more columns. ``live``: the rows and columns whose KV is kept; they end at
        the column of the next token."""
        lead = int(self._rows.position[: self.num_rows].max())
        is_there = self.num_rows <= self._capacity[0] and lead <= self._column
        if is_there and self._column + steps <= self._capacity[1] and self._fits(*self._capacity):
            return
        # A turn comes back longer by more than its rows' steps: room before the first column spares it a copy of all rows.
        before = TURN if self._has_sessions else 0
        rows, num_columns = self._new_capacity(lead + steps, before=before)
        column = lead + min(before, max(0, num_columns - _rounded(lead + steps)))
        heads, dim = self.decoder.num_kv_heads, self.decoder.head_dim
        seats, kept = live[0] * heads, live[1]
        new, old = slice(column - kept, column), slice(self._column - kept, self._column)
        for index, (old_keys, old_values) in enumerate(zip(self._keys, self._values, strict=True)):
            # Zeros, not leftovers: what a mask hides still takes part in products, and zero times NaN is NaN.
            values = torch.zeros(rows * heads, num_columns, dim)
            keys = torch.zeros_like(values).transpose(1, 2)
            if self._attend is attend_by_products:
                keys = torch.zeros(rows * heads, dim, num_columns)
            if seats and kept:
                keys[:seats, :, new] = old_keys[:seats, :, old]
                values[:seats, new] = old_values[:seats, old]
            self._keys[index], self._values[index] = keys, values
        self._capacity, self._column = (rows, num_columns), column

    def _new_capacity(self, needed: int, *, before: int) -> tuple[int, int]:
        """Rows and columns with room for ``needed`` columns of every row; where memory allows, rounded up, with ``before`` more, and no fewer
        than there are now."""
        num_rows, num_columns = self._capacity
        rounded, roomy = _rounded(needed), _rounded(needed + before)
        # Without a limit: one long row must not be as long in all rows that there once were.
        most = 2 * max(num_rows * num_columns, self.num_rows * roomy) if self.kv_tokens is None else math.inf
        for rows in (max(self.num_rows, num_rows), self.num_rows):
            for columns in (max(roomy, num_columns), roomy, max(rounded, num_columns), rounded, needed):
                if rows * columns <= most and self._fits(rows, columns):
                    return rows, columns
        return self.num_rows, needed

    def _draw_uniforms(self, sequences: list[Sequence], first: int) -> None:
        """All numbers that these sequences will ever draw; numbers past a sequence's limit are never used."""
        width = max(sequence.request.sampling.max_tokens for sequence in sequences)
        if width > self._uniform.shape[1]:
            self._uniform = np.pad(self._uniform, ((0, 0), (0, width - self._uniform.shape[1])))
        seeds = torch.tensor([sequence.seed for sequence in sequences])
        numbers = uniforms(seeds[:, None], torch.arange(width))
        self._uniform[first : first + len(sequences), :width] = numbers.numpy()

    def _decode_step(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        decoder = self.decoder
        column, lead = self._column, int(self._rows.position[:rows].max())
        seats, live = slice(rows * decoder.num_kv_heads), slice(column - lead, column + 1)
        masks = {window: self._mask(rows, lead, window) for window in {layer.window for layer in decoder.layers}}
        step = Step(
            token_ids=torch.from_numpy(self._rows.next[:rows]),
            positions=torch.from_numpy(self._rows.position[:rows]),
            keys=[keys[seats, :, live] for keys in self._keys],
            values=[values[seats, live] for values in self._values],
            masks=[masks[layer.window] for layer in decoder.layers],
            attend=self._attend,
            gain=self._rows.gain(rows),
        )
        sampled = self._sample(self._logits(decoder, step), rows)
        self._rows.next[:rows] = sampled[0]
        self._rows.position[:rows] += 1
        self._column += 1
        self._rows.drawn[:rows] = np.minimum(self._rows.drawn[:rows] + 1, self._uniform.shape[1] - 1)
        return sampled

    def _sample(self, logits: Tensor, rows: int) -> tuple[np.ndarray, np.ndarray]:
        temperature, top_p, top_k = self._rows.temperature[:rows], self._rows.top_p[:rows], self._rows.top_k[:rows]
        tokens, logprobs = sample(
            logits,
            uniforms=torch.from_numpy(self._uniform[np.arange(rows), self._rows.drawn[:rows]]),
            temperature=torch.from_numpy(temperature) if (temperature != 1).any() else None,
            top_p=torch.from_numpy(top_p) if (top_p < 1).any() else None,
            top_k=torch.from_numpy(top_k) if (top_k > 0).any() else None,
        )
        return tokens.numpy(), logprobs.numpy()

    def _mask(self, rows: int, lead: int, window: int) -> Tensor | None:
        """One of ``Step.masks``."""
        past = self._rows.position[:rows]
        if window:
            past = past.clip(max=window - 1)
        if int(past.min()) == lead:
            return None
        hidden = torch.arange(lead, -1, -1) > torch.from_numpy(past.repeat(self.decoder.num_kv_heads))[:, None]
        return torch.zeros(len(hidden), 1, lead + 1).masked_fill_(hidden[:, None], -torch.inf)

    @torch.inference_mode()
    def _fill(self, fills: list[Fill]) -> None:
        fills = order_fills(fills)
        source, row, column = self._copy_plan(fills)
        heads = self.decoder.num_kv_heads
        seats = row[:, None] * heads + torch.arange(heads)  # [copies, Hkv]

        def store(index: int, k: Tensor, v: Tensor) -> None:
            self._keys[index][seats, :, column[:, None]] = k[source].float()
            self._values[index][seats, column[:, None]] = v[source].float()

        extensions = plan_extensions(fills, kv_heads=heads)

        def attend_past(index: int, q: Tensor) -> Tensor:
            outs: list[Tensor] = []
            for extension in extensions:
                keys, values = self._of_seats(index, extension.seats, num_columns=extension.longest)
                window = self.decoder.layers[index].window
                outs.append(extension.attend(q, keys, values, window=window, attend=self._attend))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        gain = self._rows.fill_gain(fills)
        self.num_filled_tokens += run_fills(self.decoder, fills, store, attend_past, gain=gain)

    def _of_seats(self, index: int, seats: slice | Tensor, *, num_columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer for these of [rows * Hkv], in the last columns before the next token's."""
        columns = slice(self._column - num_columns, self._column)
        keys, values = self._keys[index][:, :, columns], self._values[index][:, columns]
        if isinstance(seats, slice):
            return keys[seats], values[seats]
        # Twice as fast as keys[seats], if it goes over memory in its order.
        if self._attend is attend_by_products:
            return keys.index_select(0, seats), values.index_select(0, seats)
        return keys.transpose(1, 2).index_select(0, seats).transpose(1, 2), values.index_select(0, seats)

    def _copy_plan(self, fills: list[Fill]) -> tuple[Tensor, Tensor, Tensor]:
        """For every row and token to fill: the packed token it comes from, its row, its column."""
        source: list[np.ndarray] = []
        row: list[np.ndarray] = []
        column: list[np.ndarray] = []
        start = 0
        for fill in fills:
            tokens = np.arange(len(fill.token_ids))
            for filled_row in fill.rows:
                source.append(start + tokens)
                row.append(np.full(len(tokens), filled_row))
                column.append(self._column - self._rows.position[filled_row] + fill.past + tokens)
            start += len(tokens)
        return tuple(torch.from_numpy(np.concatenate(part)) for part in (source, row, column))  # type: ignore[return-value]


def _rounded(num_columns: int) -> int:
    return -(-num_columns // COLUMN_STEP) * COLUMN_STEP


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [rows * Hkv, heads of one KV head, D], keys and values and mask of a layer of ``Step``) -> as q"""


class Step(NamedTuple):
    """What one more token of every row needs; keys and values of each layer end with its column, still to be written."""

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    keys: list[Tensor]  # of each layer [rows * Hkv, D, columns]
    values: list[Tensor]  # of each layer [rows * Hkv, columns, D]
    masks: list[Tensor | None]  # of each layer, additive [rows * Hkv, 1, columns]; None: every row sees every column
    attend: Attend
    gain: Tensor | None = None  # which adapter each row has


def next_logits(decoder: Decoder, step: Step) -> Tensor:
    """float32 logits [rows, V] behind the step's tokens, whose keys and values are written on the way."""

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = step.keys[index], step.values[index]
        keys[:, :, -1].view(k.shape).copy_(k)
        values[:, -1].view(v.shape).copy_(v)
        # The query heads of one KV head stand in the query axis: grouped attention without repeating keys.
        grouped = q.reshape(keys.shape[0], -1, decoder.head_dim).float()
        return step.attend(grouped, keys, values, step.masks[index]).reshape(q.shape[0], -1).to(q.dtype)

    return decoder.logits(decoder.forward(step.token_ids, step.positions, attend, gain=step.gain))


def attend_by_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.bmm(q * q.shape[-1] ** -0.5, keys)
    if mask is not None:
        scores.add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def attend_fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    mask = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q[:, None], keys.transpose(1, 2)[:, None], values[:, None], attn_mask=mask)[
        :, 0
    ]


def compiled_logits(decoder: Decoder, step: Step) -> Tensor:
    """``next_logits`` as one graph, in which the numbers of rows and of columns are left open."""
    columns = [(tensor, 2) for tensor in (*step.keys, *step.masks) if tensor is not None]
    columns += [(tensor, 1) for tensor in step.values]
    for tensor, dim in columns:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    rows = [tensor for tensor in (step.token_ids, step.positions, step.gain) if tensor is not None]
    for tensor in (*rows, *(tensor for tensor, _ in columns)):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(decoder, step)


@cache
def _compiled() -> Callable[[Decoder, Step], Tensor]:
    """Made on first use: torch takes long to load its compiler."""
    return torch.compile(next_logits)
