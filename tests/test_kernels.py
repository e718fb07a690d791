"""The Triton kernels against plain torch.

The same checks run twice: compiled, on a CUDA device, and in Triton's interpreter on CPU tensors, which must be chosen
before Triton is imported and so runs in a process of its own. The interpreter has no bfloat16 arithmetic; float16
stands in for it there.
"""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rollcall.engine.native.sampler import uniforms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = [torch.float32, HALF]
BLOCK_SIZE = 64

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

if INTERPRETED:
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *rest):
        """Triton 3.6 makes loop bounds by int() of one-element arrays, which NumPy 2.4 refuses."""
        patch_tensor(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

from rollcall.model.kernels import attention, decode, gradients, logprobs, sampling


def on_device(test):
    """Marks a test that launches kernels: for a GPU, unless the interpreter is on."""
    if INTERPRETED:
        return test
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")(test))


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
def test_every_kernel_passes_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    result = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "2 skipped" in result.stdout, result.stdout[-400:]  # this test and the graph's


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors hold NaN, or a number that nothing gives: a kernel must write every element of its output."""
    new_empty = torch.Tensor.new_empty

    def poisoned(like, *shape, **options):
        made = new_empty(like, *shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).min)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def assert_near(actual, expected, *, steps=4):
    """Within a few roundings of ``actual``'s dtype, relative to the largest expected value; NaN never passes."""
    expected = expected.double()
    error = (actual.double() - expected).abs().max().item()
    bound = steps * torch.finfo(actual.dtype).eps * max(expected.abs().max().item(), 1e-30)
    assert error <= bound, f"off by {error:.3g}, allowed {bound:.3g}"


# --- uniform numbers


@on_device
def test_the_uniforms_kernel_gives_the_same_bits():
    seeds = torch.randint(-(2**63), 2**63 - 1, (700,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(700) * 977
    out = sampling.uniforms(seeds.to(DEVICE), positions.to(DEVICE))
    assert torch.equal(out.cpu(), uniforms(seeds, positions))
    assert torch.equal(uniforms(seeds.to(DEVICE), positions.to(DEVICE)).cpu(), uniforms(seeds, positions))


# --- norm and activation


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 896])
def test_rms_norm_adds_the_residual_in_the_models_dtype_and_norms_in_float32(dtype, columns):
    x, residual = randn(5, columns, dtype=dtype), randn(5, columns, dtype=dtype, seed=1, scale=3.0)
    weight = randn(columns, dtype=dtype, seed=2)
    normed, hidden = decode.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(hidden, residual + x)
    wide = hidden.double()
    expected = weight.double() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5))
    assert_near(normed, expected)


@on_device
def test_rms_norm_without_a_residual_returns_its_input_beside_the_normed_rows():
    x = randn(3, 2 * 96)[:, :96]  # rows that do not follow each other in memory
    weight = randn(96, seed=2)
    normed, hidden = decode.rms_norm(x, weight, 1e-6)
    assert hidden is x
    assert_near(normed, weight.double() * (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)))


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [48, 2100])
def test_silu_mul_gates_the_second_half_with_the_first(dtype, inner):
    gate_up = randn(3, 2 * inner, dtype=dtype, scale=4.0)
    out = decode.silu_mul(gate_up)
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    expected = torch.nn.functional.silu(gate.float()).to(dtype) * up
    torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [48, 2100])
def test_the_derivative_of_the_gate_is_what_autograd_gives(dtype, inner):
    gate_up, grad = randn(3, 2 * inner, dtype=dtype, scale=4.0), randn(3, inner, dtype=dtype, seed=1)
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    (torch.nn.functional.silu(gate) * up).backward(grad.double())
    ours = gate_up.clone().requires_grad_()
    gradients.SiluMul.apply(ours).backward(grad)
    assert ours.grad is not None and leaf.grad is not None
    torch.testing.assert_close(ours.grad.double(), leaf.grad, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_are_added_to_float32_sums(dtype, strided):
    total, part = randn(33, 1000), randn(33, 1000, dtype=dtype, seed=1, scale=1e-3)
    part = randn(1000, 33, dtype=dtype, seed=1, scale=1e-3).t() if strided else part
    expected = total + part.float()
    gradients.add(total, part)
    assert torch.equal(total, expected)


# --- tokens that several segments read


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_shared_tokens_are_added_up_in_float32_and_in_one_order(dtype):
    """Some are read nine times, some once, one never; a sum in half precision would lose the small parts."""
    index = torch.tensor([0, 1, 2] * 8 + [3, 4, 6, 2, 5], device=DEVICE)
    tokens, grad = randn(8, 2, 24, dtype=dtype).requires_grad_(), randn(len(index), 2, 24, dtype=dtype, seed=1)
    for _ in range(2):
        tokens.grad = None
        taken = gradients.Shared.of(index, num_tokens=8).take(tokens)
        assert torch.equal(taken, tokens[index])
        taken.backward(grad)
        expected = torch.zeros(8, 2, 24, device=DEVICE).index_add_(0, index, grad.float()).to(dtype)
        torch.testing.assert_close(tokens.grad, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


# --- rotary embedding into the cache


def rotary_table(max_positions, head_dim):
    angles = torch.arange(max_positions)[:, None] / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)


def rotate(x, cos_sin):
    """transformers' apply_rotary_pos_emb, every op in x's dtype; x [B, heads, D], cos_sin [B, D]."""
    cos, sin = cos_sin.to(x.dtype).repeat(1, 2).chunk(4, dim=-1)[0:2]
    cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def head_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope_case(dtype, head_dim, *, num_heads=6, num_kv_heads=2):
    positions = torch.tensor([0, 63, -1, 64, 150], device=DEVICE)
    cache_shape = (12, BLOCK_SIZE, num_kv_heads, head_dim)
    return SimpleNamespace(
        positions=positions,
        qkv=randn(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=3),
        cos_sin=rotary_table(200, head_dim),
        k_cache=randn(*cache_shape, dtype=dtype, seed=4),
        v_cache=randn(*cache_shape, dtype=dtype, seed=5),
        block_tables=torch.randperm(12, generator=torch.Generator().manual_seed(6))[:10]
        .reshape(5, 2)
        .repeat(1, 2)[:, :3]
        .to(DEVICE, torch.int32),
    )


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_cache_rotates_queries_and_stores_keys_and_values_at_their_positions(dtype, head_dim, with_norm):
    case = rope_case(dtype, head_dim)
    norms = [1 + randn(head_dim, dtype=dtype, seed=seed) / 4 for seed in (7, 8)] if with_norm else [None, None]
    q, k, v = case.qkv.reshape(5, 10, head_dim).split([6, 2, 2], dim=1)
    if with_norm:
        q, k = head_norm(q, norms[0], 1e-6), head_norm(k, norms[1], 1e-6)
    angles = case.cos_sin[case.positions.clamp(min=0)]
    q, k = rotate(q, angles), rotate(k, angles)
    k_expected, v_expected = case.k_cache.clone(), case.v_cache.clone()
    for row, position in enumerate(case.positions.tolist()):
        if position >= 0:
            block = case.block_tables[row, position // BLOCK_SIZE]
            k_expected[block, position % BLOCK_SIZE], v_expected[block, position % BLOCK_SIZE] = k[row], v[row]
    caches = {"k_cache": case.k_cache, "v_cache": case.v_cache, "block_tables": case.block_tables}
    out = decode.rope_cache(
        case.qkv, case.positions, case.cos_sin, **caches, q_norm=norms[0], k_norm=norms[1], eps=1e-6
    )
    assert torch.equal(case.v_cache, v_expected)
    # The compiler may contract a product and a sum into one rounding, so bits may differ by that rounding.
    assert_near(out, q)
    assert_near(case.k_cache, k_expected)


# --- attention over the paged cache


def attention_case(dtype, *, lengths, num_heads, num_kv_heads, head_dim):
    """A cache where only live tokens are numbers: all other slots are NaN, all unused table entries out of bounds."""
    num_blocks = [math.ceil(length / BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(9)).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    keys = torch.full((len(order), BLOCK_SIZE, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    values = keys.clone()
    rows = []
    for row, length in enumerate(lengths):
        k = randn(length, num_kv_heads, head_dim, dtype=dtype, seed=100 + row)
        v = randn(length, num_kv_heads, head_dim, dtype=dtype, seed=200 + row)
        rows.append((k, v))
        for index in range(num_blocks[row]):
            tables[row, index] = block = order.pop()
            part = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            keys[block, : len(k[part])], values[block, : len(v[part])] = k[part], v[part]
    return SimpleNamespace(
        q=randn(len(lengths), num_heads, head_dim, dtype=dtype, seed=10, scale=2.0),
        keys=keys,
        values=values,
        tables=tables.to(DEVICE),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        rows=rows,
    )


def attention_reference(case, *, scale, window):
    outs = []
    for q, (k, v) in zip(case.q.double(), case.rows, strict=True):
        first = max(len(k) - window, 0) if window else 0
        group = q.shape[0] // case.keys.shape[2]
        k, v = (part[first:].double().repeat_interleave(group, dim=1) for part in (k, v))
        weights = torch.einsum("hd,nhd->hn", q, k).mul(scale).softmax(-1)
        outs.append(torch.einsum("hn,nhd->hd", weights, v).flatten())
    return torch.stack(outs)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(14, 2, 64), (4, 4, 80), (6, 1, 128)])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [0, 70])
def test_paged_attention_sees_exactly_the_live_keys_of_each_sequence(dtype, shape, num_splits, window):
    num_heads, num_kv_heads, head_dim = shape
    case = attention_case(
        dtype, lengths=[1, 64, 0, 65, 200], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    out = attention.paged_attention(
        case.q,
        case.keys,
        case.values,
        case.tables,
        case.lengths,
        scale=head_dim**-0.5,
        window=window,
        num_splits=num_splits,
    )
    expected = attention_reference(case, scale=head_dim**-0.5, window=window)
    assert (out[2] == 0).all()  # a padding row
    assert_near(out, expected, steps=32 if dtype == torch.float32 else 2)


@on_device
@pytest.mark.parametrize("tile", [16, 32])
def test_paged_attention_gives_the_same_with_tiles_smaller_than_a_block(tile):
    case = attention_case(torch.float32, lengths=[130, 17], num_heads=4, num_kv_heads=2, head_dim=32)
    tiles = attention.AttentionTiles(tile=tile, num_warps=4, num_stages=2)
    with mock.patch.object(attention, "pick_tiles", return_value=tiles):
        out = attention.paged_attention(
            case.q, case.keys, case.values, case.tables, case.lengths, scale=0.2, window=40, num_splits=2
        )
    assert_near(out, attention_reference(case, scale=0.2, window=40), steps=32)


@on_device
def test_few_rows_are_split_and_many_are_not():
    assert attention.pick_num_splits(256, num_kv_heads=2, max_blocks=10) == 1
    assert attention.pick_num_splits(16, num_kv_heads=2, max_blocks=128) == 16
    assert attention.pick_num_splits(1, num_kv_heads=1, max_blocks=4) == 4


# --- sampling


def chi_square(counts, expected):
    return float(((counts.double() - expected) ** 2 / expected).sum())


def sample(logits, draws, temperatures, *, block=256):
    rows = len(logits)
    with mock.patch.multiple(sampling, SAMPLE_BLOCK=block, SAMPLE_WARPS=4):
        return sampling.sample(
            logits,
            draws.to(DEVICE),
            torch.as_tensor(temperatures, dtype=torch.float32, device=DEVICE).expand(rows).contiguous(),
        )


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "block"), [(100, 256), (3001, 256), (20000, 4096)])
def test_sample_inverts_the_cumulative_distribution(dtype, vocab, block):
    logits = randn(32, vocab, dtype=dtype, scale=3.0)
    draws = uniforms(torch.arange(32), torch.arange(32))
    temperatures = torch.linspace(0.5, 2.0, 32, device=DEVICE)
    tokens, logprobs_ = sample(logits, draws, temperatures, block=block)
    expected = (logits.double() / temperatures.double()[:, None]).log_softmax(-1)
    upper = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    lower = upper - expected.exp().gather(1, tokens[:, None])[:, 0]
    wanted = draws.double().to(DEVICE)
    assert ((lower - 1e-5 <= wanted) & (wanted <= upper + 1e-5)).all()
    assert (logprobs_.double() - expected.gather(1, tokens[:, None])[:, 0]).abs().max() < 2e-5


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_zero_takes_the_first_of_the_likeliest_tokens(dtype):
    logits = randn(6, 3001, dtype=dtype)
    best = [5, 700, 256, 2999, 0, 3000]
    for row, token in enumerate(best):
        logits[row, token] = 9.0
        logits[row, min(token + 300, 3000)] = 9.0
    tokens, logprobs_ = sample(logits, torch.full((6,), 0.5), 0.0)
    assert tokens.tolist() == best
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs_.double() - expected).abs().max() < 2e-5


@on_device
def test_a_masked_token_is_never_drawn_whatever_the_uniform():
    vocab, allowed = 3001, [3, 700, 2990]
    logits = torch.full((16, vocab), float("-inf"), device=DEVICE)
    logits[:, allowed] = randn(16, 3)
    draws = uniforms(torch.arange(16), torch.arange(16))
    draws[0], draws[1] = 0.0, 1 - 2.0**-24
    tokens, logprobs_ = sample(logits, draws, 1.0)
    assert set(tokens.tolist()) == set(allowed)
    assert tokens[0] == 3 and tokens[1] == 2990
    assert logprobs_.isfinite().all()


@on_device
def test_a_uniform_that_rounds_past_the_total_takes_the_last_token_with_mass():
    logits = torch.zeros(2, 3001, device=DEVICE)
    logits[:, 2800:] = float("-inf")
    tokens, _ = sample(logits, torch.tensor([1.0, 1 - 2.0**-24]), 1.0)
    assert tokens.tolist() == [2799, 2799]


@on_device
def test_a_row_of_nan_gets_a_valid_token_and_a_nan_logprob():
    logits = randn(3, 1000)
    logits[0] = float("nan")
    logits[1, 500] = float("nan")
    tokens, logprobs_ = sample(logits, torch.full((3,), 0.7), 1.0)
    assert ((tokens >= 0) & (tokens < 1000)).all()
    assert logprobs_.isnan().tolist() == [True, True, False]


@on_device
def test_sampled_frequencies_follow_the_distribution():
    rows = 300 if INTERPRETED else 5000
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf"), 0.5]], device=DEVICE).repeat(rows, 1)
    tokens, _ = sample(logits, uniforms(torch.arange(rows), torch.zeros(rows, dtype=torch.int64)), 1.0, block=16)
    counts, expected = torch.bincount(tokens.cpu(), minlength=5), logits[0].double().softmax(-1).cpu() * rows
    kept = [0, 1, 2, 4]
    assert counts[3] == 0 and chi_square(counts[kept], expected[kept]) < 3 + 5 * math.sqrt(6)


# --- the learner's log-probs


def stats_reference(logits, targets, scale):
    z = logits.double() * scale
    logp = z.log_softmax(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], z.logsumexp(-1), entropy, z.mean(-1)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "scale"), [(100, 1.0), (9001, 1.25)])
@pytest.mark.parametrize("spread", [0.1, 8.0])
def test_row_stats_agree_with_a_float64_softmax(dtype, vocab, scale, spread):
    logits = randn(7, vocab, dtype=dtype, scale=spread) + 20  # far from 0, as real logits are
    targets = torch.arange(7, device=DEVICE) * 13
    stats = logprobs.row_stats(logits, targets, scale=scale)
    for actual, expected in zip(stats, stats_reference(logits, targets, scale), strict=True):
        assert actual.dtype == torch.float32
        assert (actual.double() - expected).abs().max() < 3e-5


@on_device
def test_row_stats_accept_masked_logits_and_flag_targets_outside_the_vocabulary():
    logits = randn(3, 9000)
    logits[0, :8500] = float("-inf")
    logits[1, 4000:] = float("-inf")
    stats = logprobs.row_stats(logits, torch.tensor([8600, 17, -100], device=DEVICE))
    expected = stats_reference(logits, torch.tensor([8600, 17, 0], device=DEVICE), 1.0)
    assert (stats.target_logprob[:2].double() - expected[0][:2]).abs().max() < 3e-5
    assert stats.target_logprob[2].isnan()
    for actual, wanted in zip(stats[1:3], expected[1:3], strict=True):
        assert (actual.double() - wanted).abs().max() < 3e-5


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_grad_logits_is_what_autograd_gives(dtype, with_entropy):
    scale, logits = 1.25, randn(6, 5003, dtype=dtype, scale=3.0)
    targets = torch.tensor([0, 1, 5002, 4096, 4095, 77], device=DEVICE)
    grad_logprob = randn(6, seed=1)
    grad_entropy = randn(6, seed=2) if with_entropy else None
    leaf = logits.double().requires_grad_()
    logprob, _, entropy, _ = stats_reference(leaf, targets, scale)
    loss = (grad_logprob.double() * logprob).sum()
    if grad_entropy is not None:
        loss = loss + (grad_entropy.double() * entropy).sum()
    loss.backward()
    stats = logprobs.row_stats(logits, targets, scale=scale)
    before = logits.clone()
    grads = logprobs.grad_logits(
        logits,
        targets,
        dtype=dtype,
        lse=stats.logsumexp,
        grad_logprobs=grad_logprob,
        grad_entropy=grad_entropy,
        entropy=stats.entropy,
        scale=scale,
    )
    assert torch.equal(logits, before) and leaf.grad is not None
    assert_near(grads, leaf.grad, steps=32 if dtype == torch.float32 else 1)


@on_device
def test_no_rows_are_no_work():
    logits, targets = randn(0, 50), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    stats = logprobs.row_stats(logits, targets)
    assert [len(part) for part in stats] == [0, 0, 0, 0]
    given = {"lse": stats.logsumexp, "grad_logprobs": stats.logsumexp, "dtype": torch.float32}
    assert logprobs.grad_logits(logits, targets, **given).shape == (0, 50)


# --- graphs


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not HAS_CUDA, reason="needs a CUDA device")
def test_a_captured_graph_follows_the_lengths_and_draws_of_each_replay():
    case = attention_case(torch.bfloat16, lengths=[200, 200, 200], num_heads=14, num_kv_heads=2, head_dim=64)
    lengths, seeds = case.lengths.clone(), torch.arange(3, device=DEVICE)
    logits, temperatures = randn(3, 3001), torch.ones(3, device=DEVICE)

    def step():
        mixed = attention.paged_attention(
            case.q, case.keys, case.values, case.tables, lengths, scale=0.125, num_splits=2
        )
        tokens, _ = sampling.sample(logits, sampling.uniforms(seeds, lengths.long()), temperatures)
        return mixed, tokens

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed, tokens = step()
    for new in ([1, 64, 0], [65, 0, 200]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        mixed.fill_(float("nan"))
        tokens.fill_(-1)
        graph.replay()
        eager_mixed, eager_tokens = step()
        assert torch.equal(mixed, eager_mixed) and torch.equal(tokens, eager_tokens)
