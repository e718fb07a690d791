"""Times each Triton kernel at the decode shape of a Qwen2.5-0.5B (256 sequences), after checking it against torch.

    PYTHONPATH=src python benchmarks/kernels.py

Times are medians of CUDA-graph replays. Data that a decode step streams from memory (cache, logits) rotates among
several copies, so that the L2 cache cannot hold it; small activations stay in L2, as they do in a real step. Bandwidth
is the bytes a kernel must move over its time, shown beside that of a plain device-to-device copy. Needs torch, Triton
and a CUDA device; under a minute.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from unittest import mock

import torch

from rollcall.engine.native.sampler import uniforms

if find_spec("triton") is None or not torch.cuda.is_available():
    sys.exit("this benchmark needs Triton and a CUDA device")

from rollcall.model.kernels import attention, decode, logprobs, sampling
from rollcall.model.kernels.attention import AttentionTiles

BATCH, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 896, 4864, 14, 2, 64, 151936
LEARNER_ROWS = 4096
BUDGET_S = 50.0
STARTED = time.monotonic()
results: list[dict[str, object]] = []
checks: list[str] = []


def median_s(calls: Sequence[Callable[[], object]], *, per_graph: int = 12, replays: int = 9) -> float:
    """Seconds per call: ``per_graph`` calls, taken in turn, in one graph; the median over its replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(per_graph):
            calls[index % len(calls)]()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / per_graph)
    return statistics.median(times)


def row(name: str, config: str, calls: Sequence[Callable[[], object]], num_bytes: float, **options: int) -> None:
    if time.monotonic() - STARTED > BUDGET_S:
        print(f"{name:<22}{config:<30} left out: {BUDGET_S:.0f} s are over", flush=True)
        return
    seconds = median_s(calls, **options)
    results.append(
        {"name": name, "config": config, "us": round(seconds * 1e6, 2), "gb_s": round(num_bytes / seconds / 1e9)}
    )
    print(f"{name:<22}{config:<30}{seconds * 1e6:>10.2f}{num_bytes / seconds / 1e9:>10.0f}", flush=True)


def check(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    if not error <= bound:  # NaN fails too
        sys.exit(f"{name} is wrong: relative error {error:.2e}, bound {bound:.0e}")
    checks.append(name)


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def copy() -> None:
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    row("copy", "1 GiB", [lambda: target.copy_(source)], 2 * source.nbytes, per_graph=4)


def norms_and_activation() -> None:
    x, residual, weight = bf16(BATCH, HIDDEN), bf16(BATCH, HIDDEN), bf16(HIDDEN)
    out, residual_out = decode.rms_norm(x, weight, 1e-6, residual=residual)
    hidden = (x + residual).double()
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    check("rms_norm", out, normed, 1e-2)
    check("rms_norm residual", residual_out, x + residual, 0.0)
    row(
        "rms_norm + residual",
        "",
        [lambda: decode.rms_norm(x, weight, 1e-6, residual=residual)],
        4 * x.nbytes,
    )
    gate_up = bf16(BATCH, 2 * INNER)
    activated = decode.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check("silu_mul", activated, torch.nn.functional.silu(gate) * up, 1e-2)
    row("silu_mul", "", [lambda: decode.silu_mul(gate_up)], 1.5 * gate_up.nbytes)


class Cache:
    """A paged cache of random keys and values for given lengths, blocks in random order."""

    def __init__(self, lengths: torch.Tensor, block_size: int) -> None:
        num_rows, max_blocks = len(lengths), math.ceil(int(lengths.max()) / block_size)
        num_blocks = num_rows * max_blocks
        self.lengths = lengths.to("cuda", torch.int32)
        self.tables = torch.randperm(num_blocks, device="cuda").reshape(num_rows, max_blocks).int()
        self.keys = bf16(num_blocks, block_size, KV_HEADS, HEAD_DIM)
        self.values = bf16(num_blocks, block_size, KV_HEADS, HEAD_DIM)
        self.q = bf16(num_rows, HEADS, HEAD_DIM, scale=2.0)
        self.num_bytes = int(lengths.sum()) * 2 * KV_HEADS * HEAD_DIM * 2 + 2 * self.q.nbytes

    def reference(self, index: int) -> torch.Tensor:
        length, table = int(self.lengths[index]), self.tables[index].long()
        k, v = (pool[table].flatten(0, 1)[:length].double() for pool in (self.keys, self.values))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        weights = torch.einsum("hd,nhd->hn", self.q[index].double(), k).mul(HEAD_DIM**-0.5).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, v).flatten()


def attend(cache: Cache, tiles: AttentionTiles, splits: int) -> torch.Tensor:
    with mock.patch.object(attention, "pick_tiles", return_value=tiles):
        return attention.paged_attention(
            cache.q,
            cache.keys,
            cache.values,
            cache.tables,
            cache.lengths,
            scale=HEAD_DIM**-0.5,
            num_splits=splits,
        )


def attention_rows(
    name: str, lengths: torch.Tensor, variants: list[tuple[int, int, int, int, int]], copies: int
) -> None:
    """Variants are (block size, tile, warps, stages, splits)."""
    some = list(range(0, len(lengths), max(1, len(lengths) // 8)))
    for block_size in sorted({variant[0] for variant in variants}):
        caches = [Cache(lengths, block_size) for _ in range(copies)]
        expected = torch.stack([caches[0].reference(index) for index in some])
        for _, tile, warps, stages, splits in (variant for variant in variants if variant[0] == block_size):
            tiles = AttentionTiles(tile=tile, num_warps=warps, num_stages=stages)
            label = f"block {block_size} tile {tile} w{warps} s{stages} x{splits}"
            check(f"{name} {label}", attend(caches[0], tiles, splits)[some], expected, 1e-2)
            row(name, label, [partial(attend, cache, tiles, splits) for cache in caches], caches[0].num_bytes)


def rope() -> None:
    cache = Cache(torch.full((BATCH,), 640), 64)
    qkv = bf16(BATCH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    positions = torch.randint(0, 640, (BATCH,), device="cuda")
    angles = torch.arange(640)[:, None] / 1e6 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).cuda()
    pools = {"k_cache": cache.keys, "v_cache": cache.values, "block_tables": cache.tables}
    q = decode.rope_cache(qkv, positions, cos_sin, **pools, eps=1e-6)
    heads = qkv.double().reshape(BATCH, -1, HEAD_DIM)
    cos, sin = (part.double()[:, None].repeat(1, 1, 2) for part in cos_sin[positions].chunk(2, dim=-1))
    low, high = heads.chunk(2, dim=-1)
    turned = heads * cos + torch.cat([-high, low], -1) * sin
    blocks = cache.tables[torch.arange(BATCH, device="cuda"), positions // 64].long()
    check("rope_cache q", q, turned[:, :HEADS], 1e-2)
    check("rope_cache k", cache.keys[blocks, positions % 64], turned[:, HEADS : HEADS + KV_HEADS], 1e-2)
    check("rope_cache v", cache.values[blocks, positions % 64], heads[:, HEADS + KV_HEADS :], 0.0)
    row("rope_cache", "", [lambda: decode.rope_cache(qkv, positions, cos_sin, **pools, eps=1e-6)], 2 * qkv.nbytes)


def sampling_rows() -> None:
    seeds, positions = torch.arange(BATCH, device="cuda"), torch.arange(BATCH, device="cuda") * 7
    draws = sampling.uniforms(seeds, positions)
    if not torch.equal(draws, uniforms(seeds, positions)) or not torch.equal(
        draws.cpu(), uniforms(seeds.cpu(), positions.cpu())
    ):
        sys.exit("uniforms differ between kernel, torch on CUDA and torch on CPU")
    row("uniforms", "torch ops", [lambda: uniforms(seeds, positions)], 20 * BATCH)
    row("uniforms", "kernel", [lambda: sampling.uniforms(seeds, positions)], 20 * BATCH)
    temperatures = torch.ones(BATCH, device="cuda")
    default = sampling.SAMPLE_BLOCK, sampling.SAMPLE_WARPS
    for dtype in (torch.bfloat16, torch.float32):
        copies = [torch.randn(BATCH, VOCAB, device="cuda", dtype=dtype) * 3 for _ in range(3)]
        expected = copies[0][:16].double().log_softmax(-1)
        for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
            sampling.SAMPLE_BLOCK, sampling.SAMPLE_WARPS = block, warps
            tokens, logprobs = sampling.sample(copies[0], draws, temperatures)
            upper = expected.exp().cumsum(-1).gather(1, tokens[:16, None])[:, 0]
            chosen = expected.gather(1, tokens[:16, None])[:, 0]
            wanted = draws[:16].double()
            if not ((upper - chosen.exp() - 1e-5 <= wanted) & (wanted <= upper + 1e-5)).all():
                sys.exit(f"sample block {block} draws a token outside its interval")
            label = f"{str(dtype)[6:]} block {block} w{warps}"
            check(f"sample log-probs {label}", logprobs[:16], chosen, 1e-5)
            row(
                "sample",
                label,
                [partial(sampling.sample, x, draws, temperatures) for x in copies],
                copies[0].nbytes,
            )
    sampling.SAMPLE_BLOCK, sampling.SAMPLE_WARPS = default


def learner_rows() -> None:
    logits, targets = bf16(LEARNER_ROWS, VOCAB, scale=3.0), torch.randint(VOCAB, (LEARNER_ROWS,), device="cuda")
    stats = logprobs.row_stats(logits, targets, scale=1.25)
    z = logits[:8].double() * 1.25
    logp = z.log_softmax(-1)
    check("row_stats log-prob", stats.target_logprob[:8], logp.gather(1, targets[:8, None])[:, 0], 1e-5)
    check("row_stats entropy", stats.entropy[:8], -(logp.exp() * logp).sum(-1), 1e-5)
    check("row_stats mean", stats.mean_logit[:8], z.mean(-1), 1e-3)  # a sum near 0, so its relative error is large
    default = logprobs.STATS_BLOCK, logprobs.STATS_WARPS
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):
        logprobs.STATS_BLOCK, logprobs.STATS_WARPS = block, warps
        call = [lambda: logprobs.row_stats(logits, targets, scale=1.25)]
        row("row_stats", f"block {block} w{warps}", call, logits.nbytes, per_graph=2, replays=5)
    logprobs.STATS_BLOCK, logprobs.STATS_WARPS = default
    grads = torch.randn(LEARNER_ROWS, device="cuda")
    given = {"lse": stats.logsumexp, "grad_logprobs": grads, "grad_entropy": grads, "entropy": stats.entropy}
    found = logprobs.grad_logits(logits, targets, **given, dtype=torch.bfloat16, scale=1.25)
    probs, entropy = logp.exp(), stats.entropy[:8, None].double()
    onehot = torch.nn.functional.one_hot(targets[:8], VOCAB).double()
    expected = 1.25 * grads[:8, None].double() * (onehot - probs - probs * (logp + entropy))
    check("grad_logits", found[:8], expected, 1e-2)
    default = logprobs.GRAD_BLOCK, logprobs.GRAD_WARPS
    for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8)):
        logprobs.GRAD_BLOCK, logprobs.GRAD_WARPS = block, warps
        call = [lambda: logprobs.grad_logits(logits, targets, **given, dtype=torch.bfloat16, scale=1.25)]
        row("grad_logits", f"block {block} w{warps}", call, 2 * logits.nbytes, per_graph=2, replays=5)
    logprobs.GRAD_BLOCK, logprobs.GRAD_WARPS = default


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'kernel':<22}{'configuration':<30}{'us':>10}{'GB/s':>10}")
    copy()
    norms_and_activation()
    rope()
    short = torch.linspace(128, 640, BATCH).long()
    tiles = [
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 2, 3),
        (64, 64, 1, 3),
        (64, 32, 2, 4),
        (128, 128, 4, 3),
        (128, 64, 4, 3),
    ]
    attention_rows("attention 256 short", short, [(*tile, splits) for tile in tiles for splits in (1, 2)], copies=4)
    long = torch.full((16,), 8192)
    attention_rows(
        "attention 16 x 8192", long, [(*tile, splits) for tile in tiles[:3] for splits in (8, 16, 32)], copies=3
    )
    sampling_rows()
    torch.cuda.empty_cache()
    learner_rows()
    print(f"{len(checks)} checks passed, {time.monotonic() - STARTED:.0f} s")
    print(json.dumps({"benchmark": "kernels", "device": torch.cuda.get_device_name(), "rows": results}))


if __name__ == "__main__":
    main()
