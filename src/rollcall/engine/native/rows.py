"""The CPU runner: one dense row of KV per running sequence, decoded step by step.

Rows are kept compact (0..n-1) and end in the same column. The tokens of a step go into one column for all rows, and a row with fewer
tokens starts further right. So a step writes one plain slice, and attention reads plain slices. Where matrix products are faster
(``attention.cpu_way``), attention is two batched products, and keys are stored transposed for the first product. Otherwise, it is torch's
fused kernel, and keys are stored like values. Keys have the same shape either way. Room is counted as rows x columns, the memory that is
actually used. KV is float32 even for bfloat16 models, because products of so few rows are slower in bfloat16.

Session KV is kept outside the rows and counts towards the room. When rows need the room, the oldest sessions' KV is dropped first.
Without a limit on room, session KV takes at most ``KEPT_PER_ROW`` times the memory of ``max_running`` rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollcall.engine.native.adapters import Served
from rollcall.engine.native.fill import run_fills
from rollcall.engine.native.kept_rows import Bundle, KeptRow, KeptRows, Leaving, Plane, Returning, bundle_of_all, places
from rollcall.engine.native.row_attention import ATTEND, AttendRows, hide_starts, plan_extensions
from rollcall.engine.native.runner import Chunk, Fill, Kept, RowState, Sequence, in_parts, order_fills, plan_fills
from rollcall.engine.native.sampler import sample, uniforms
from rollcall.model.attention import Way, cpu_way
from rollcall.model.decoder import Decoder

KEPT_PER_ROW = 2  # kept conversations per row: one waiting for its next turn, and one that has just finished a turn
CHUNK = 8  # steps before the results are read
COLUMN_STEP = 32  # rows grow by this many columns
FILL_TOKENS = 1024  # tokens filled at once: for so few tokens, a layer's results stay in the CPU cache
TURN = 128  # spare columns before the first and after the last, for the next turns of sessions


class RowRunner:
    def __init__(
        self,
        decoder: Decoder,
        *,
        max_running: int,
        kv_tokens: int | None,
        compile: bool = False,
        served: Served | None = None,
    ):
        self.decoder = decoder
        self._way: Way = cpu_way()
        self._logits = compiled_logits if compile else next_logits
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.room = kv_tokens if kv_tokens is not None else decoder.max_positions
        self.num_rows = 0
        self._capacity = (0, 0)  # rows, columns
        self._keys = _nothing(decoder)  # per layer [rows * Hkv, D, columns]
        self._values = _nothing(decoder)  # per layer [rows * Hkv, columns, D]
        self._column = 0  # where the next token of every row goes
        self._chunks: deque[Chunk] = deque()  # sampled but not read
        self.ahead_from = math.inf  # never: the host computes the steps itself, so there is nothing to wait for
        self._rows = RowState(max_running, served=served)  # a row starts ``position`` columns before ``_column``
        self._uniform = np.zeros((max_running, 0), dtype=np.float32)  # random numbers for each row's draws
        self._kept = KeptRows()
        self._has_sessions = False
        self._broken = np.zeros(max_running, dtype=np.bool_)  # rows that had a non-finite log-prob

    def steps(self, remaining: list[int]) -> int:
        """Stop as soon as a row must end: compute is scarce on a CPU, so no row should be decoded past its end."""
        return min(CHUNK, *remaining)

    def admit(self, sequences: list[Sequence]) -> int:
        count, longest = 0, int(self._rows.position[: self.num_rows].max(initial=0)) + 1
        taken: dict[int, tuple[Kept[KeptRow], int]] = {}  # by row
        for row, sequence in enumerate(sequences[: self.max_running - self.num_rows], start=self.num_rows):
            longest = max(longest, sequence.length)
            kept = self._kept.take(sequence)
            # One more step must fit as well, or the next ``reserve`` would preempt the new row at once.
            if not self._make_fit(row + 1, min(longest + 1, max(longest, sequence.limit))):
                if kept is not None:
                    self._kept.put_back(kept[0])
                break
            if kept is not None:
                taken[row] = kept
            self._rows.set(row, sequence)
            self.decoder.rope.grow(sequence.limit)
            count += 1
        if count == 0:
            return 0
        first, self.num_rows = self.num_rows, self.num_rows + count
        admitted = sequences[:count]
        lead = int(self._rows.position[:first].max(initial=0))
        self._draw_uniforms(admitted, first)
        home = None if first else self._go_home(taken)
        if home is None:
            self._make_room(steps=1, live=(first, lead))
        if taken:
            returning = [
                Returning(kept=kept, num_tokens=num, row=row, column=self._column - int(self._rows.position[row]))
                for row, (kept, num) in taken.items()
            ]
            self._kept.restore(returning, self._planes(), home=home)
        fills = plan_fills(admitted, first, past={row: num_tokens for row, (_, num_tokens) in taken.items()})
        for part in in_parts(order_fills(fills), cost=lambda fill: len(fill.token_ids), most=lambda: FILL_TOKENS):
            self._fill(part)
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
        return not ended  # on a CPU, decoding an ended row is not free

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
        """If a row contained a NaN, set the row to zero before another row reuses its memory, because masked values take part in
        products, and 0 times NaN is NaN."""
        if self._broken[row]:
            for tensor in (*self._keys, *self._values):
                tensor[self._seats(row)] = 0
        self._broken[row] = False

    def _seats(self, row: int) -> slice:
        heads = self.decoder.shape.kv_heads
        return slice(row * heads, (row + 1) * heads)

    @torch.inference_mode()
    def keep(self, rows: dict[int, Sequence]) -> None:
        self._has_sessions = True
        leaving: list[Leaving] = []
        for row, sequence in rows.items():
            session, ids = sequence.request.session, sequence.all_ids()[:-1]
            assert session is not None
            self._kept.forget(session)
            if not self._broken[row]:
                leaving.append(Leaving(session=session, ids=ids, row=row, past=int(self._rows.position[row])))
        if not leaving:
            return
        longest = max(row.past for row in leaving)
        if self.kv_tokens is None:
            num_columns = max(_rounded(max(longest, self._kept.longest) + 2 * TURN), self._capacity[1])
            room = KEPT_PER_ROW * self.max_running * num_columns
        else:
            room = self.kv_tokens - (self.num_rows - len(rows)) * int(self._rows.position[: self.num_rows].max())
        while self._kept.num_tokens + len(leaving) * longest > room and self._kept.give_way():
            pass
        all_leave = len(leaving) == self.num_rows and 2 * self.num_rows >= self._capacity[0]
        if all_leave and self._kept.num_tokens + math.prod(self._capacity) <= room:
            self._kept.put_all(leaving, self._planes(), end=self._column)
            # This memory now belongs to the bundle of the rows that ended together.
            self._keys, self._values = _nothing(self.decoder), _nothing(self.decoder)
            self._capacity, self._column = (0, 0), 0
        else:
            self._kept.put(leaving, self._planes(), end=self._column)

    def forget(self, session: str | None) -> None:
        self._kept.forget(session)

    def _go_home(self, taken: dict[int, tuple[Kept[KeptRow], int]]) -> Bundle | None:
        """If exactly the rows that ended together are now resumed together, and they still fit into the memory that they had, use it
        again. No other rows may be running."""
        bundle = bundle_of_all({row: kept.kv for row, (kept, _) in taken.items()})
        if bundle is None:
            return None
        rows, num_columns = bundle.num_rows, bundle.num_columns
        column = max(kept.kv.start + int(self._rows.position[row]) for row, (kept, _) in taken.items())
        lead = int(self._rows.position[: self.num_rows].max())
        if self.num_rows > rows or not lead <= column < num_columns or not self._fits(rows, num_columns):
            return None
        layers = [plane.tensor.flatten(0, 1) for plane in bundle.planes]
        keys, self._values = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        self._keys = keys if self._way == "products" else [layer.transpose(1, 2) for layer in keys]
        self._capacity, self._column = (rows, num_columns), column
        return bundle

    def _planes(self) -> list[Plane]:
        shape = (self._capacity[0], self.decoder.shape.kv_heads)
        transposed = self._way == "products"  # how keys are stored in memory
        keys = [
            Plane(layer.unflatten(0, shape), 3) if transposed else Plane(layer.transpose(1, 2).unflatten(0, shape), 2)
            for layer in self._keys
        ]
        return keys + [Plane(layer.unflatten(0, shape), 2) for layer in self._values]

    def _fits(self, rows: int, length: int) -> bool:
        return self.kv_tokens is None or rows * length + self._kept.num_tokens <= self.kv_tokens

    def _make_fit(self, rows: int, length: int) -> bool:
        """Drop session KV until this many rows and columns fit. Return whether they fit. If they could never fit, drop nothing."""
        if self.kv_tokens is not None and rows * length > self.kv_tokens:
            return False
        while not self._fits(rows, length):
            if not self._kept.give_way():
                return False
        return True

    def _make_room(self, *, steps: int, live: tuple[int, int]) -> None:
        """Make room for every row's past and ``steps`` more columns. ``live`` is the number of rows and columns whose KV is kept. These
        columns end just before the column of the next token."""
        lead = int(self._rows.position[: self.num_rows].max())
        # A session's next turn adds more than the sampled tokens. Spare columns before the first column avoid a copy of all rows. If all
        # rows are resumed together, they need spare columns after the last column.
        spare = TURN if self._has_sessions else 0
        if not live[0]:
            self._column = max(lead, min(lead + spare, self._capacity[1] - steps - spare))
        is_there = self.num_rows <= self._capacity[0] and lead <= self._column
        if is_there and self._column + steps <= self._capacity[1] and self._fits(*self._capacity):
            return
        rows, num_columns = self._new_capacity(lead + steps, spare=2 * spare)
        column = lead + min(spare, max(0, num_columns - _rounded(lead + steps)) // 2)
        heads, dim = self.decoder.shape.kv_heads, self.decoder.shape.head_dim
        seats, kept = live[0] * heads, live[1]
        new, old = slice(column - kept, column), slice(self._column - kept, self._column)
        for index, (old_keys, old_values) in enumerate(zip(self._keys, self._values, strict=True)):
            # Start from zeros, not uninitialised memory: masked values still take part in products, and zero times NaN is NaN.
            values = torch.zeros(rows * heads, num_columns, dim)
            keys = torch.zeros_like(values).transpose(1, 2)
            if self._way == "products":
                keys = torch.zeros(rows * heads, dim, num_columns)
            if seats and kept:
                keys[:seats, :, new] = old_keys[:seats, :, old]
                values[:seats, new] = old_values[:seats, old]
            self._keys[index], self._values[index] = keys, values
        self._capacity, self._column = (rows, num_columns), column

    def _new_capacity(self, needed: int, *, spare: int) -> tuple[int, int]:
        """Return rows and columns with room for ``needed`` columns in every row. If memory allows, round up, add ``spare`` columns, and
        keep at least the current capacity."""
        num_rows, num_columns = self._capacity
        rounded, roomy = _rounded(needed), _rounded(needed + spare)
        # Without a limit, one long row must not lengthen rows that are no longer in use.
        most = 2 * max(num_rows * num_columns, self.num_rows * roomy) if self.kv_tokens is None else math.inf
        for rows in (max(self.num_rows, num_rows), self.num_rows):
            for columns in (max(roomy, num_columns), roomy, max(rounded, num_columns), rounded, needed):
                if rows * columns <= most and self._fits(rows, columns):
                    return rows, columns
        return self.num_rows, needed

    def _draw_uniforms(self, sequences: list[Sequence], first: int) -> None:
        """Compute all random numbers that these sequences can draw. Numbers past a sequence's limit are never used."""
        width = max(sequence.request.sampling.max_tokens for sequence in sequences)
        if width > self._uniform.shape[1]:
            self._uniform = np.pad(self._uniform, ((0, 0), (0, width - self._uniform.shape[1])))
        seeds = torch.tensor([sequence.request.seed for sequence in sequences])
        self._uniform[first : first + len(sequences), :width] = uniforms(seeds[:, None], torch.arange(width)).numpy()

    def _decode_step(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        decoder, heads, positions = self.decoder, self.decoder.shape.kv_heads, self._rows.position[:rows]
        column, lead = self._column, int(positions.max())
        seats, live = slice(rows * heads), slice(column - lead, column + 1)
        masks: dict[int, Tensor | None] = {}
        for window in {layer.window for layer in decoder.layers}:
            past = positions.clip(max=window - 1) if window else positions
            masks[window] = hide_starts((lead - past).repeat(heads), num_columns=lead + 1, way=self._way)
        step = Step(
            token_ids=torch.from_numpy(self._rows.next[:rows]),
            positions=torch.from_numpy(positions),
            keys=[keys[seats, :, live] for keys in self._keys],
            values=[values[seats, live] for values in self._values],
            masks=[masks[layer.window] for layer in decoder.layers],
            attend=ATTEND[self._way],
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

    @torch.inference_mode()
    def _fill(self, fills: list[Fill]) -> None:
        heads = self.decoder.shape.kv_heads
        copies = _plan_copies(fills)

        def store(index: int, k: Tensor, v: Tensor) -> None:
            shape = (self._capacity[0], heads)
            keys, values = self._keys[index].unflatten(0, shape), self._values[index].unflatten(0, shape)
            for copy in copies:
                # A row's filled tokens are the last ones of its past.
                columns = slice(self._column - copy.num_tokens, self._column)
                keys[copy.rows, :, :, columns] = copy.of_rows(k).permute(0, 2, 3, 1)
                values[copy.rows, :, columns] = copy.of_rows(v).transpose(1, 2)

        extensions = plan_extensions(fills)

        def attend_past(index: int, q: Tensor) -> Tensor:
            window = self.decoder.layers[index].window
            outs: list[Tensor] = []
            for extension in extensions:
                end = extension.first_row + len(extension.lengths)
                seats = slice(extension.first_row * heads, end * heads)
                columns = slice(self._column - extension.longest, self._column)
                keys, values = self._keys[index][seats, :, columns], self._values[index][seats, columns]
                outs.append(
                    extension.attend(q, keys, values, window=window, scale=self.decoder.shape.scale, way=self._way)
                )
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        run_fills(self.decoder, fills, store, attend_past, gain=self._rows.fill_gain(fills))


class _Copy(NamedTuple):
    """A copy of keys or values from packed fills of equal length into rows."""

    start: int  # where these fills begin among the tokens of all fills
    num_fills: int
    num_tokens: int  # per fill
    rows: slice | Tensor
    fills: Tensor | None  # the fill for each row, or None if each row gets its own fill, in order

    def of_rows(self, packed: Tensor) -> Tensor:
        """Convert [N, Hkv, D] for all fills to float32 [rows, tokens, Hkv, D]."""
        own = packed[self.start : self.start + self.num_fills * self.num_tokens].float()
        own = own.unflatten(0, (self.num_fills, self.num_tokens))
        return own if self.fills is None else own.index_select(0, self.fills)


def _plan_copies(fills: list[Fill]) -> list[_Copy]:
    copies: list[_Copy] = []
    start = 0
    for num_tokens, group in groupby(fills, key=lambda fill: len(fill.token_ids)):
        members = list(group)
        rows, sources = zip(
            *sorted((row, place) for place, fill in enumerate(members) for row in fill.rows), strict=True
        )
        is_plain = sources == tuple(range(len(members)))
        copies.append(
            _Copy(
                start=start,
                num_fills=len(members),
                num_tokens=num_tokens,
                rows=places(list(rows)),
                fills=None if is_plain else torch.tensor(sources),
            )
        )
        start += num_tokens * len(members)
    return copies


def _nothing(decoder: Decoder) -> list[Tensor]:
    return [torch.empty(0)] * len(decoder.layers)


def _rounded(num_columns: int) -> int:
    return -(-num_columns // COLUMN_STEP) * COLUMN_STEP


class Step(NamedTuple):
    """The inputs for one more token in every row. The last column of each layer's keys and values is for the new token, and is empty."""

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    keys: list[Tensor]  # per layer [rows * Hkv, D, columns]
    values: list[Tensor]  # per layer [rows * Hkv, columns, D]
    masks: list[Tensor | None]  # per layer, from the first column on; None if every row sees every column
    attend: AttendRows
    gain: Tensor | None = None  # each row's adapter gains


def next_logits(decoder: Decoder, step: Step) -> Tensor:
    """Return float32 logits [rows, V] after the step's tokens, and write the tokens' keys and values."""

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = step.keys[index], step.values[index]
        keys[:, :, -1].view(k.shape).copy_(k)
        values[:, -1].view(v.shape).copy_(v)
        # Put the query heads of a KV head on the query axis: grouped attention without repeating keys.
        grouped = q.reshape(keys.shape[0], -1, decoder.shape.head_dim).float()
        mask = step.masks[index]
        out = step.attend(grouped, keys, values, () if mask is None else ((0, mask),), decoder.shape.scale)
        return out.reshape(q.shape[0], -1).to(q.dtype)

    return decoder.logits(decoder.forward(step.token_ids, step.positions, attend, gain=step.gain))


def compiled_logits(decoder: Decoder, step: Step) -> Tensor:
    """Run ``next_logits`` as one compiled graph in which the numbers of rows and columns are dynamic."""
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
    """Compile on first use, because torch takes a long time to load its compiler."""
    return torch.compile(next_logits)
