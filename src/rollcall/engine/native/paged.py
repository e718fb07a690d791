"""The CUDA runner: paged KV, full decode steps as CUDA graphs, sampling on the GPU.

A chunk of steps is replayed without the host: on the device, the sampled token is fed back, positions and draw counters
advance, and tokens and log-probs are collected in a buffer that is read once per chunk. The host mirrors that state exactly,
because it depends only on the number of steps. So the host can change rows between chunks and send the full state again.
If the rows do not change, the next chunk is queued behind the running one, and the GPU never waits.

When several completions share a prompt, its blocks are reference-counted, not copied; only the last, partly filled block is copied.
A session's blocks are kept between its requests, and are reference-counted too. When rows need the memory, the oldest sessions' blocks
are freed first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rollcall.base.wait import say
from rollcall.engine.native.adapters import Served
from rollcall.engine.native.fill import attend_packed, run_fills, run_halved
from rollcall.engine.native.runner import (
    Chunk,
    Fill,
    Kept,
    PromptKey,
    RowState,
    Sequence,
    in_parts,
    order_fills,
    plan_fills,
    prompt_key,
)
from rollcall.engine.native.sampler import truncate
from rollcall.model.attention import on_device
from rollcall.model.decoder import Decoder, UnsupportedModel
from rollcall.model.kernels import attention, sampling
from rollcall.model.kernels import decode as kernels
from rollcall.model.layer import Layer, Pass, product
from rollcall.plan.choose import FILL_TOKENS
from rollcall.plan.choose import KV_BLOCK as BLOCK

CHUNK = 16  # steps before the results are read


class PagedRunner:
    def __init__(
        self,
        decoder: Decoder,
        *,
        max_running: int,
        kv_tokens: int | None,
        kv_fraction: float,
        graphs: bool = True,
        served: Served | None = None,
    ):
        """With ``graphs``, decode steps are captured as CUDA graphs. Without it, a debugger can step through them."""
        if decoder.shape.head_dim % 16:
            raise UnsupportedModel(
                f"on CUDA, the native engine needs a head dimension that is a multiple of 16; this model has {decoder.shape.head_dim}"
            )
        self.decoder = decoder
        self._captures = graphs
        self.max_running = max_running
        device, layers = decoder.device, len(decoder.layers)
        num_blocks = _num_blocks(decoder, max_running, kv_tokens, kv_fraction)
        shape = (layers, 2, num_blocks, BLOCK, decoder.shape.kv_heads, decoder.shape.head_dim)
        self._cache = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self._pool = BlockPool(num_blocks)
        self.room = num_blocks * BLOCK
        self._blocks: list[list[int]] = []  # per row
        self._kept: dict[str | None, Kept[list[int]]] = {}  # by session, least recently used first
        self.num_rows = 0
        self._fill_tokens = FILL_TOKENS
        # With fewer rows, no chunk starts ahead, because a chunk that is not needed would delay the next request.
        self.ahead_from: float = 4
        # Tokens and log-probs of chunks that the GPU is computing and will copy to the host, each with the event of its copy.
        self._on_the_way: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()

        self._rows = RowState(max_running, served=served)
        self._served = served

        # A copy of ``RowState.numbers`` on the device. The position of a row that has reached its limit is -1.
        self._state = torch.zeros(5, max_running, dtype=torch.int64, device=device)
        self._sampling = torch.zeros(3, max_running, dtype=torch.float32, device=device)
        self._adapter_slots = torch.full((max_running,), -1, dtype=torch.int64, device=device)  # per row
        self._tables = torch.zeros(max_running, 16, dtype=torch.int32, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        # Results of the running chunk, copied to the host before the next chunk begins.
        self._out_tokens = torch.zeros(CHUNK, max_running, dtype=torch.int64, device=device)
        self._out_logprobs = torch.zeros(CHUNK, max_running, dtype=torch.float32, device=device)
        self._cos_sin = torch.empty(0)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._graph_pool = torch.cuda.graph_pool_handle()

    def steps(self, remaining: list[int]) -> int:
        """Continue until the last row ends: reading results costs a round trip, while decoding past a row's end costs almost nothing."""
        return min(CHUNK, max(remaining))

    def admit(self, sequences: list[Sequence]) -> int:
        first = self.num_rows
        prefixes: dict[PromptKey, list[int]] = {}  # prompt blocks of completions that were just admitted
        copies: list[tuple[int, int]] = []
        past: dict[int, int] = {}
        for row, sequence in enumerate(sequences[: self.max_running - self.num_rows], start=first):
            kept = self._kept.pop(sequence.request.session, None)
            if kept is not None and (served := self._num_served(kept, sequence)):
                blocks = self._blocks_after(kept, sequence, served)
                past[row] = served
            else:
                if kept is not None:
                    self._pool.give_back(kept.kv)
                blocks = self._blocks_for(sequence, prefixes, copies)
            if blocks is None:
                break
            self._blocks.append(blocks)
            self._rows.set(row, sequence)
            self._grow_tables(sequence.limit)
        self.num_rows = len(self._blocks)
        count = self.num_rows - first
        self._fill(plan_fills(sequences[:count], first, past=past))
        if copies:
            source, target = torch.tensor(copies, device=self.decoder.device).unbind(1)
            self._cache[:, :, target] = self._cache[:, :, source]
        return count

    def reserve(self, steps: int) -> bool:
        rows = self.num_rows
        needed = np.minimum(self._rows.position[:rows] + steps, self._rows.limit[:rows])
        missing = -(-needed // BLOCK) - np.array([len(blocks) for blocks in self._blocks])
        for row in np.flatnonzero(missing > 0):
            new = self._take(int(missing[row]))
            if new is None:
                return False
            self._blocks[row] += new
        return True

    def carry(self, ended: list[int]) -> bool:
        """Keep ended rows until a smaller graph fits the remaining rows, because they add little work to the matrix products."""
        if _bucket(self.num_rows - len(ended), self.max_running) < _bucket(self.num_rows, self.max_running):
            return False
        self._rows.limit[ended] = self._rows.position[ended]
        return True

    @torch.inference_mode()
    def start(self, steps: int) -> None:
        rows = self.num_rows
        truncates = bool((self._rows.top_p[:rows] < 1).any() or (self._rows.top_k[:rows] > 0).any())
        size = _bucket(rows, self.max_running)
        step = self._graph(size, truncates).replay if self._captures else partial(self._decode_step, size, truncates)
        if not self._on_the_way:
            self._upload_rows()
        elif (over := self._rows.is_over(rows)).any():
            # Limits may have been set since the running chunk began. Behind that chunk, queue an update that marks the rows at their limit.
            self._state[1, :rows].masked_fill_(on_device(over, self.decoder.device), -1)
        tables = np.zeros((rows, self._tables.shape[1]), dtype=np.int32)
        for row, blocks in enumerate(self._blocks):
            tables[row, : len(blocks)] = blocks
        # Copy from pinned memory, so that the host does not wait for the running chunk.
        self._tables[:rows].copy_(torch.from_numpy(tables).pin_memory(), non_blocking=True)
        self._step.zero_()
        for _ in range(steps):
            step()
        self._rows.position[:rows] = np.minimum(self._rows.position[:rows] + steps, self._rows.limit[:rows])
        self._rows.drawn[:rows] += steps
        made = [each[:steps, :rows] for each in (self._out_tokens, self._out_logprobs)]
        here = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True) for each in made
        ]
        copied = torch.cuda.Event()
        copied.record()
        self._on_the_way.append((here, copied))

    def read(self) -> Chunk:
        (tokens, logprobs), copied = self._on_the_way.popleft()
        copied.synchronize()
        chunk = Chunk(tokens=tokens.numpy(), logprobs=logprobs.numpy())
        self._rows.next[: self.num_rows] = chunk.tokens[-1]
        return chunk

    def remove(self, row: int) -> None:
        last = self.num_rows - 1
        self._pool.give_back(self._blocks[row])
        self._blocks[row] = self._blocks[last]
        self._blocks.pop()
        self._rows.move(last, to=row)
        self.num_rows = last

    def keep(self, rows: dict[int, Sequence]) -> None:
        for row, sequence in rows.items():
            session, ids = sequence.request.session, sequence.all_ids()[:-1]
            assert session is not None
            blocks = self._blocks[row][: -(-len(ids) // BLOCK)]
            self._pool.share(blocks)
            self.forget(session)
            self._kept[session] = Kept(session=session, ids=ids, kv=blocks)

    def forget(self, session: str | None) -> None:
        for name in list(self._kept) if session is None else [session]:
            if name in self._kept:
                self._pool.give_back(self._kept.pop(name).kv)

    def _take(self, count: int) -> list[int] | None:
        """Take free blocks. If there are too few, free those of sessions. Return None if there are still not enough."""
        while (blocks := self._pool.take(count)) is None and self._kept:
            self.forget(next(iter(self._kept)))
        return blocks

    def _num_served(self, kept: Kept[list[int]], sequence: Sequence) -> int:
        """Return how many tokens of kept KV to use. The sequence writes its next tokens after them, so they must not end in a block that
        is used by other sequences."""
        shared = kept.num_shared(sequence)
        is_read = shared % BLOCK and self._pool.is_shared(kept.kv[shared // BLOCK])
        return shared - shared % BLOCK if is_read else shared

    def _blocks_after(self, kept: Kept[list[int]], sequence: Sequence, served: int) -> list[int] | None:
        """Return the kept blocks of the first ``served`` tokens, followed by new blocks."""
        full = -(-served // BLOCK)
        total = -(-min(sequence.length + 1, sequence.limit) // BLOCK)
        self._pool.give_back(kept.kv[full:])  # free these first, because there may be no other free blocks
        new = self._take(total - full)
        if new is None:
            self._kept[kept.session] = replace(kept, ids=kept.ids[:served], kv=kept.kv[:full])
            return None
        return kept.kv[:full] + new

    def _blocks_for(
        self, sequence: Sequence, prefixes: dict[PromptKey, list[int]], copies: list[tuple[int, int]]
    ) -> list[int] | None:
        """Return blocks for the sequence and its next token. Full prompt blocks are shared with a sibling."""
        filled = sequence.length - 1
        total = -(-min(sequence.length + 1, sequence.limit) // BLOCK)
        key = prompt_key(sequence)
        siblings = prefixes.get(key) if not sequence.token_ids else None
        if siblings is None:
            blocks = self._take(total)
            if blocks is not None and not sequence.token_ids:
                prefixes[key] = blocks[: -(-filled // BLOCK)]
            return blocks
        full = filled // BLOCK
        own = self._take(total - full)
        if own is None:
            return None
        self._pool.share(siblings[:full])
        if filled % BLOCK:
            copies.append((siblings[full], own[0]))
        return siblings[:full] + own

    def _grow_tables(self, length: int) -> None:
        """Grow the block tables and rotary tables to this length. Graphs contain their addresses, so growing them drops the graphs."""
        width = -(-length // BLOCK)
        if width > self._tables.shape[1]:
            width = 1 << (width - 1).bit_length()
            self._tables = torch.zeros(self.max_running, width, dtype=torch.int32, device=self.decoder.device)
            self._drop_graphs()
        if length > len(self._cos_sin):
            rope, half = self.decoder.rope, self.decoder.shape.head_dim // 2
            rope.grow(length)
            self._cos_sin = torch.cat((rope.cos[:, :half], rope.sin[:, half:]), dim=-1).float()
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Drop all graphs and create a new memory pool, because a pool dies with its last graph and torch refuses to reuse it."""
        self._graphs.clear()
        self._graph_pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def _fill(self, fills: list[Fill]) -> None:
        """Compute each fill once, into the blocks of its first row. ``admit`` has already set up which rows share blocks."""

        def cost(fill: Fill) -> int:
            # Reading the keys of 16 past tokens takes less memory than computing one token.
            return len(fill.token_ids) + fill.past // 16

        def smaller(tokens: int) -> None:
            torch.cuda.empty_cache()
            if tokens // 2 < self._fill_tokens:
                self._fill_tokens = max(1, tokens // 2)
                say(
                    f"rollout: {tokens} prompt tokens do not fit in memory at once; from now on, they are processed "
                    f"{self._fill_tokens} at a time"
                )

        for part in in_parts(order_fills(fills), cost=cost, most=lambda: self._fill_tokens):
            run_halved(part, self._run_fill, smaller=smaller)

    def _run_fill(self, fills: list[Fill]) -> None:
        target = self._slots([(fill.rows[0], fill.past, fill.past + len(fill.token_ids)) for fill in fills])
        extending = [fill for fill in fills if fill.past]
        context = self._slots([(fill.rows[0], 0, fill.past + len(fill.token_ids)) for fill in extending])

        def store(index: int, k: Tensor, v: Tensor) -> None:
            keys, values = self._cache[index].view(2, -1, *k.shape[1:])
            keys[target] = k
            values[target] = v

        def attend_past(index: int, q: Tensor) -> Tensor:
            keys, values = self._cache[index].flatten(1, 2)
            window = self.decoder.layers[index].window
            scale = self.decoder.shape.scale
            return attend_packed(q, keys[context], values[context], extending, window=window, scale=scale)

        run_fills(self.decoder, fills, store, attend_past, gain=self._rows.fill_gain(fills))

    def _slots(self, parts: list[tuple[int, int, int]]) -> Tensor:
        """Return the cache slots of the tokens in these parts (row, from, to), concatenated."""
        slots: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        for row, start, end in parts:
            positions = np.arange(start, end)
            slots.append(np.array(self._blocks[row])[positions // BLOCK] * BLOCK + positions % BLOCK)
        return on_device(np.concatenate(slots), self.decoder.device)

    def _upload_rows(self) -> None:
        rows = self.num_rows
        state = self._rows.numbers.copy()
        state[1, rows:] = -1
        state[1, :rows][self._rows.is_over(rows)] = -1
        self._state.copy_(torch.from_numpy(state))
        sampling_state = np.stack((self._rows.temperature, self._rows.top_p, self._rows.top_k.astype(np.float32)))
        self._sampling.copy_(torch.from_numpy(sampling_state))
        if self._served is not None:
            self._adapter_slots.copy_(torch.from_numpy(self._rows.slot))

    def _graph(self, size: int, truncates: bool) -> torch.cuda.CUDAGraph:
        if (size, truncates) not in self._graphs:
            # A warm-up outside the capture compiles the kernels; negative positions keep it from touching the cache.
            self._state.fill_(0)
            self._state[1].fill_(-1)
            self._step.zero_()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._decode_step(size, truncates)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_pool):
                self._decode_step(size, truncates)
            self._graphs[size, truncates] = graph
        return self._graphs[size, truncates]

    def _decode_step(self, rows: int, truncates: bool) -> None:
        """Sample one token for every row, entirely on the device. Shapes and addresses are fixed, because this code is captured."""
        tokens, position, limit, drawn, seed = (state[:rows] for state in self._state)
        logits = self.decoder.logits(self._hidden(tokens, position, rows))
        temperature = self._sampling[0, :rows]
        if truncates:
            safe = torch.where(temperature == 0, 1.0, temperature)[:, None]
            kept = truncate(logits / safe, top_p=self._sampling[1, :rows], top_k=self._sampling[2, :rows].long())
            logits = torch.where(torch.isinf(kept), kept, logits)
        new, logprobs = sampling.sample(logits, sampling.uniforms(seed, drawn), temperature)
        self._out_tokens[:, :rows].index_copy_(0, self._step, new[None])
        self._out_logprobs[:, :rows].index_copy_(0, self._step, logprobs[None])
        tokens.copy_(new)
        position.copy_(torch.where((position >= 0) & (position + 1 < limit), position + 1, -1))
        drawn.add_(1)
        self._step.add_(1)

    def _hidden(self, tokens: Tensor, position: Tensor, rows: int) -> Tensor:
        decoder, tables, lengths = self.decoder, self._tables[:rows], (position + 1).int()
        num_splits = attention.pick_num_splits(rows, num_kv_heads=decoder.shape.kv_heads, max_blocks=tables.shape[1])

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer, (keys, values) = decoder.layers[index], self._cache[index]
            q = kernels.rope_cache(
                qkv, position, self._cos_sin, k_cache=keys, v_cache=values, block_tables=tables, q_norm=layer.q_norm,
                k_norm=layer.k_norm, eps=decoder.shape.eps,
            )  # fmt: skip
            return attention.paged_attention(
                q, keys, values, tables, lengths, scale=decoder.shape.scale, window=layer.window, num_splits=num_splits
            )

        gain = None if self._served is None else self._served.gain(self._adapter_slots[:rows])
        return decoder.run(tokens, Pass(ops=_DecodeOps(eps=decoder.shape.eps), attend=attend), gain=gain)


@dataclass(slots=True, kw_only=True)
class _DecodeOps:
    """A layer's operations as GPU kernels. A norm also adds the previous product to the residual stream. Queries and keys are rotated by
    the kernel that stores keys and values in the cache."""

    eps: float
    stream: Tensor | None = None

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed, self.stream = kernels.rms_norm(x, weight, self.eps, residual=self.stream)
        return normed

    def product(self, x: Tensor, layer: Layer, name: str) -> Tensor:
        return product(x, layer, name)

    def heads(self, qkv: Tensor, layer: Layer) -> tuple[Tensor]:
        return (qkv,)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return kernels.silu_mul(gate_up)

    def add_product(self, x: Tensor, h: Tensor, layer: Layer, name: str) -> Tensor:
        return product(h, layer, name)


class BlockPool:
    """Counts the users of each block. A block without users is free."""

    def __init__(self, num_blocks: int):
        self._free = list(range(num_blocks))
        self._users = np.zeros(num_blocks, dtype=np.int64)

    def take(self, count: int) -> list[int] | None:
        """Take this many blocks, each for one user, or return None if too few are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._users[taken] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        self._users[blocks] += 1

    def is_shared(self, block: int) -> bool:
        return bool(self._users[block] > 1)

    def give_back(self, blocks: list[int]) -> None:
        self._users[blocks] -= 1
        self._free += [block for block in blocks if self._users[block] == 0]


def _bucket(rows: int, most: int) -> int:
    """Return the graph size: a power of two up to 32, then a multiple of 32, so that a few graphs are enough for every batch size."""
    size = 1 << (rows - 1).bit_length() if rows <= 32 else -(-rows // 32) * 32
    return min(size, most) if rows <= most else rows


def _num_blocks(decoder: Decoder, max_running: int, kv_tokens: int | None, kv_fraction: float) -> int:
    if kv_tokens is not None:
        return -(-kv_tokens // BLOCK)
    per_token = 2 * len(decoder.layers) * decoder.shape.kv_width * decoder.embed.element_size()
    memory = torch.cuda.get_device_properties(decoder.device).total_memory * kv_fraction
    return max(1, min(int(memory // (per_token * BLOCK)), max_running * -(-decoder.max_positions // BLOCK)))
