"""The CPU runner: one dense row of KV per running sequence, decoded step by step.

Rows are kept compact (0..n-1) and as long as the longest, so attention is two batched products over plain slices: keys
lie transposed for the first, values as they are for the second. With one query per sequence that is three times as
fast as the fused attention of torch 2.13. Room is rows x length, which is what the memory really is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollcall.decoder import Decoder
from rollcall.engine.native.fill import run_fills
from rollcall.engine.native.runner import Chunk, Fill, Sequence, plan_fills
from rollcall.engine.native.sampler import sample
from rollcall.engine.uniform import uniforms

CHUNK = 8  # steps between two looks at the results
LENGTH_STEP = 32  # rows grow by this many tokens


class RowRunner:
    def __init__(self, decoder: Decoder, *, max_running: int, kv_tokens: int | None):
        self.decoder = decoder
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.num_rows = 0
        self.num_filled_tokens = 0  # tokens whose KV was computed outside decoding
        self._capacity = (0, 0)  # rows, tokens per row
        self._keys: list[Tensor] = [torch.empty(0)] * len(decoder.layers)  # each [rows * Hkv, D, tokens]
        self._values: list[Tensor] = [torch.empty(0)] * len(decoder.layers)  # each [rows * Hkv, tokens, D]
        self._next = np.zeros(max_running, dtype=np.int64)  # token to feed
        self._position = np.zeros(max_running, dtype=np.int64)  # where it goes
        self._limit = np.zeros(max_running, dtype=np.int64)
        self._drawn = np.zeros(max_running, dtype=np.int64)  # index into the row's uniforms
        self._uniform = np.zeros((max_running, 0), dtype=np.float32)
        self._temperature = np.zeros(max_running, dtype=np.float32)
        self._top_p = np.ones(max_running, dtype=np.float32)
        self._top_k = np.zeros(max_running, dtype=np.int64)

    @property
    def room(self) -> int:
        return self.kv_tokens if self.kv_tokens is not None else self.decoder.max_positions

    def steps(self, remaining: list[int]) -> int:
        """Compute is what a CPU is short of: look as soon as a row must end, so that none is decoded past it."""
        return min(CHUNK, *remaining)

    def admit(self, sequences: list[Sequence]) -> int:
        count, longest = 0, int(self._position[: self.num_rows].max(initial=0)) + 1
        for sequence in sequences[: self.max_running - self.num_rows]:
            longest = max(longest, sequence.length)
            # One more step must fit as well, or the next reserve would throw the newcomer out again.
            if not self._fits(self.num_rows + count + 1, min(longest + 1, max(longest, sequence.limit))):
                break
            count += 1
        if count == 0:
            return 0
        first, self.num_rows = self.num_rows, self.num_rows + count
        admitted = sequences[:count]
        for row, sequence in enumerate(admitted, start=first):
            self._set_row(row, sequence)
        self._draw_uniforms(admitted, first)
        self._grow(self.num_rows, int(self._position[: self.num_rows].max()) + 1)
        fills = plan_fills(admitted, first)
        if fills:
            self._fill(fills)
        return count

    def reserve(self, steps: int) -> bool:
        needed = int(np.minimum(self._position[: self.num_rows] + steps, self._limit[: self.num_rows]).max())
        if not self._fits(self.num_rows, needed):
            return False
        self._grow(self.num_rows, needed)
        return True

    @torch.inference_mode()
    def decode(self, steps: int) -> Chunk:
        rows = self.num_rows
        tokens = np.zeros((steps, rows), dtype=np.int64)
        logprobs = np.zeros((steps, rows), dtype=np.float32)
        for step in range(steps):
            tokens[step], logprobs[step] = self._decode_step(rows)
        return Chunk(tokens=tokens, logprobs=logprobs)

    def remove(self, row: int) -> None:
        last = self.num_rows - 1
        if row != last:
            length, heads = int(self._position[last]), self.decoder.num_kv_heads
            there, here = slice(row * heads, (row + 1) * heads), slice(last * heads, (last + 1) * heads)
            for keys, values in zip(self._keys, self._values, strict=True):
                keys[there, :, :length] = keys[here, :, :length]
                values[there, :length] = values[here, :length]
            for state in (
                self._next, self._position, self._limit, self._drawn, self._uniform, self._temperature, self._top_p, self._top_k
            ):  # fmt: skip
                state[row] = state[last]
        self.num_rows = last

    def _fits(self, rows: int, length: int) -> bool:
        return self.kv_tokens is None or rows * length <= self.kv_tokens

    def _grow(self, rows: int, length: int) -> None:
        old_rows, old_length = self._capacity
        if rows <= old_rows and length <= old_length:
            return
        rows = max(rows, old_rows)
        rounded = max(-(-length // LENGTH_STEP) * LENGTH_STEP, old_length)
        length = (
            rounded if self._fits(rows, rounded) else max(length, old_length if self._fits(rows, old_length) else 0)
        )
        heads, dim = self.decoder.num_kv_heads, self.decoder.head_dim
        live, live_length = min(rows, old_rows) * heads, min(length, old_length)
        for index in range(len(self._keys)):
            keys = torch.zeros(rows * heads, dim, length, dtype=self.decoder.dtype)
            values = torch.zeros(rows * heads, length, dim, dtype=self.decoder.dtype)
            if old_rows:
                keys[:live, :, :live_length] = self._keys[index][:live, :, :live_length]
                values[:live, :live_length] = self._values[index][:live, :live_length]
            self._keys[index], self._values[index] = keys, values
        self._capacity = (rows, length)

    def _set_row(self, row: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.decoder.grow_rope(sequence.limit)
        self._next[row] = sequence.token_ids[-1] if sequence.token_ids else sequence.request.prompt_ids[-1]
        self._position[row] = sequence.length - 1
        self._limit[row] = sequence.limit
        self._drawn[row] = len(sequence.token_ids)
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k

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
        kv_heads, dim, scale = decoder.num_kv_heads, decoder.head_dim, decoder.head_dim**-0.5
        position = torch.from_numpy(self._position[:rows])
        length = int(self._position[:rows].max()) + 1
        seats = torch.arange(rows * kv_heads)
        place = position.repeat_interleave(kv_heads)
        masks = {window: self._mask(place, length, window) for window in {layer.window for layer in decoder.layers}}

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[index][seats, :, place] = k.reshape(-1, dim)
            self._values[index][seats, place] = v.reshape(-1, dim)
            keys = self._keys[index][: rows * kv_heads, :, :length]
            values = self._values[index][: rows * kv_heads, :length]
            # The query heads of one KV head stand in the query axis: grouped attention without repeating keys.
            grouped = q.reshape(rows * kv_heads, -1, dim)
            mask = masks[decoder.layers[index].window]
            scores = torch.baddbmm(mask, grouped, keys, beta=1 if mask.numel() > 1 else 0, alpha=scale)
            return torch.bmm(torch.softmax(scores, dim=-1), values).view(rows, -1)

        hidden = decoder.forward(torch.from_numpy(self._next[:rows]), position, attend)
        sampled = self._sample(decoder.logits(hidden), rows)
        self._next[:rows] = sampled[0]
        self._position[:rows] = np.minimum(self._position[:rows] + 1, self._limit[:rows] - 1)
        self._drawn[:rows] = np.minimum(self._drawn[:rows] + 1, self._uniform.shape[1] - 1)
        return sampled

    def _sample(self, logits: Tensor, rows: int) -> tuple[np.ndarray, np.ndarray]:
        temperature, top_p, top_k = self._temperature[:rows], self._top_p[:rows], self._top_k[:rows]
        out = sample(
            logits,
            uniforms=torch.from_numpy(self._uniform[np.arange(rows), self._drawn[:rows]]),
            temperature=torch.from_numpy(temperature) if (temperature != 1).any() else None,
            top_p=torch.from_numpy(top_p) if (top_p < 1).any() else None,
            top_k=torch.from_numpy(top_k) if (top_k > 0).any() else None,
        )
        return out.tokens.numpy(), out.logprobs.numpy()

    @staticmethod
    def _mask(place: Tensor, length: int, window: int) -> Tensor:
        """Additive [rows * Hkv, 1, length]; a single zero when every row sees every key."""
        if not window and int(place.min()) == length - 1:
            return torch.zeros(1, 1, 1)
        keys = torch.arange(length)
        hidden = keys > place[:, None]
        if window:
            hidden |= keys <= place[:, None] - window
        return torch.zeros(len(place), 1, length).masked_fill_(hidden[:, None], -torch.inf)

    @torch.inference_mode()
    def _fill(self, fills: list[Fill]) -> None:
        fills = sorted(fills, key=lambda fill: len(fill.token_ids))
        source, row, place = self._copy_plan(fills)
        heads = self.decoder.num_kv_heads
        seats = row[:, None] * heads + torch.arange(heads)  # [copies, Hkv]

        def store(index: int, k: Tensor, v: Tensor) -> None:
            self._keys[index][seats, :, place[:, None]] = k[source]
            self._values[index][seats, place[:, None]] = v[source]

        self.num_filled_tokens += run_fills(self.decoder, fills, store)

    @staticmethod
    def _copy_plan(fills: list[Fill]) -> tuple[Tensor, Tensor, Tensor]:
        """For every (row, position) to fill: the packed token it comes from, its row, its position."""
        source: list[np.ndarray] = []
        row: list[np.ndarray] = []
        place: list[np.ndarray] = []
        start = 0
        for fill in fills:
            positions = np.arange(len(fill.token_ids))
            for filled_row in fill.rows:
                source.append(start + positions)
                row.append(np.full(len(positions), filled_row))
                place.append(positions)
            start += len(positions)
        return tuple(torch.from_numpy(np.concatenate(part)) for part in (source, row, place))  # type: ignore[return-value]
