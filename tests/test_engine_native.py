"""The native engine: the contract on CPU and CUDA, and what is its own (shared fills, fused parameters, refusals)."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from learners import count_fills, make_engine

pytest.register_assert_rewrite("engine_contract")

from engine_contract import *  # noqa: F403
from engine_contract import (
    TOLERANCE,
    Ask,
    EngineKind,
    Results,
    Tight,
    abort,
    finish,
    ids_of,
    off_by,
    request,
    requests_for,
    run,
    run_one,
    submit,
    talk,
)
from tiny import (
    ARCHITECTURES,
    compiles,
    make_model,
    make_tokenizer,
    needs_bfloat16,
    needs_compiler,
    random_prompts,
    reference_logprobs,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.native.kept_rows import KeptRows, Leaving, Plane, Returning
from rollcall.engine.native.rows import KEPT_PER_ROW, TURN
from rollcall.engine.sequence import Sequence
from rollcall.model.attention import Way, cpu_way
from rollcall.model.decoder import Decoder, UnsupportedModel, fuse_parameters

SMOLLM2 = os.environ.get("ROLLCALL_SMOLLM2")


def native(device: str, tight: Tight, **settings: Any) -> EngineKind:
    return EngineKind(
        device=device,
        make=partial(make_engine, **settings),
        push_weights=lambda engine, model, version: engine.update_weights(version),
        num_preemptions=lambda engine: engine.num_preemptions,
        tight=tight,
    )


CPU = native("cpu", Tight(kv_tokens=120, prompt_lengths=(3, 12), max_tokens=24), way="products")
FUSED = native("cpu", CPU.tight, way="fused")
COMPILED = native("cpu", CPU.tight, compile=True)
AHEAD = native("cpu", CPU.tight, ahead_from=1)
# KV blocks hold 64 tokens there: eight completions start in one block each and all need a second one.
CUDA = native("cuda", Tight(kv_tokens=64 * 9, prompt_lengths=(40, 55), max_tokens=60))
STEPPED = native("cuda", CUDA.tight, graphs=False)
CUDA_AHEAD = native("cuda", CUDA.tight, ahead_from=1)


# Each takes the compiler a minute or more. Other architectures differ in tensors, not in compiled code.
COMPILED_TESTS = (
    *(f"test_greedy_equals_generate[compiled-{name}]" for name in ("qwen2-tied", "qwen3-untied", "mistral-sliding")),
    "test_any_schedule_of_requests_aborts_and_swaps_is_exact[compiled-0]",
)


def other_than(way: Way) -> list[pytest.MarkDecorator]:
    """Both ways of a CPU are tested on every machine, the one that it does not choose itself by `make slow`."""
    return [] if cpu_way() == way else [pytest.mark.slow]


@pytest.fixture(
    params=[
        pytest.param(CPU, id="products", marks=other_than("products")),
        pytest.param(FUSED, id="fused", marks=other_than("fused")),
        pytest.param(COMPILED, id="compiled", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param(AHEAD, id="ahead", marks=pytest.mark.slow),
        pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
        pytest.param(CUDA_AHEAD, id="cuda-ahead", marks=pytest.mark.gpu),
        pytest.param(STEPPED, id="cuda-without-graphs", marks=pytest.mark.gpu),
    ]
)
def kind(request: pytest.FixtureRequest) -> Iterator[EngineKind]:
    if request.param is COMPILED and not request.node.name.startswith(COMPILED_TESTS):
        pytest.skip("only the forward is compiled: three architectures are run greedily, schedules with one seed")
    # Past its limit the compiler gives up, and nothing compiled would be tested; the models here are many.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield request.param


@pytest.mark.slow  # the compiler takes a minute
@needs_compiler
def test_compiled_steps_draw_what_plain_ones_draw(tokenizer: Any) -> None:
    """From prompts of several lengths, so that rows are masked and end at different steps, the last of them alone."""
    model, requests = make_model("qwen2-tied"), requests_for(random_prompts(5, lengths=(3, 20)))
    plain = run(make_engine(model, tokenizer, max_running=4), requests)
    with compiles():
        compiled = run(make_engine(model, tokenizer, max_running=4, compile=True), requests)
    assert ids_of(compiled) == ids_of(plain)
    assert off_by(model, requests, compiled) < TOLERANCE


def test_a_chunk_started_before_the_last_was_looked_at_changes_nothing(tokenizer: Any) -> None:
    """Rows end at stop tokens and at their limits, one is aborted on the way, and more wait than fit at first."""
    model, requests = make_model("qwen2-tied"), requests_for(random_prompts(5, lengths=(3, 20)))
    found = []
    for ahead_from in (math.inf, 1):
        engine = make_engine(model, tokenizer, max_running=6, ahead_from=ahead_from)
        started: list[int] = []
        unread = [0]  # chunks that were started and not read, after each start or read
        start, read = engine.runner.start, engine.runner.read

        def noted_start(steps: int, start: Any = start, started: Any = started, unread: Any = unread) -> None:
            started.append(steps)
            unread.append(unread[-1] + 1)
            start(steps)

        def noted_read(read: Any = read, unread: Any = unread) -> Any:
            unread.append(unread[-1] - 1)
            return read()

        engine.runner.start, engine.runner.read = noted_start, noted_read  # type: ignore[method-assign]
        aborted = request(requests[0].prompt_ids, name="aborted", max_tokens=200, stop_token_ids=())
        submit(engine, aborted)
        engine.step()
        abort(engine, aborted)
        results = run(engine, requests)
        found.append((ids_of(results), off_by(model, requests, results), sum(started), max(unread)))
    (plain, _, few, one), (ahead, off, more, two) = found
    assert ahead == plain and off < TOLERANCE
    assert more > few, "no chunk was started ahead"
    assert (one, two) == (1, 2), "a chunk is queued behind one that is not read yet, and no more than one"


def test_a_prompt_is_filled_once_for_all_its_completions(
    kind: EngineKind, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, filled = make_engine(model, tokenizer), count_fills(monkeypatch)
    prompts = random_prompts(2, lengths=(70, 80))
    run(engine, requests_for(prompts, num_seeds=6))
    assert sum(filled) == sum(len(prompt) - 1 for prompt in prompts)


def test_equal_prompts_of_several_requests_are_filled_once(
    kind: EngineKind, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, filled = make_engine(model, tokenizer), count_fills(monkeypatch)
    (prompt,) = random_prompts(1, lengths=(70, 80))
    requests = [request(prompt, name=f"r{index}", seeds=(index,), max_tokens=3 + 5 * index) for index in range(4)]
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE
    assert sum(filled) == len(prompt) - 1


@pytest.mark.gpu
def test_rows_that_have_ended_stay_until_a_step_becomes_smaller(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At stop tokens and at limits: the card gets its rows again as often as the graph changes, not as often as a row ends."""
    from rollcall.engine.native.paged import PagedRunner

    model = make_model("qwen2-tied").to("cuda")
    prompts = random_prompts(16, lengths=(3, 60))
    requests = [
        request(
            prompt, name=f"r{index}", seeds=(index,), max_tokens=8 + 12 * index, stop_token_ids=tuple(range(index % 2))
        )
        for index, prompt in enumerate(prompts)
    ]
    plain = run(make_engine(model, tokenizer), requests)
    uploads = []
    upload = PagedRunner._upload_rows
    monkeypatch.setattr(PagedRunner, "_upload_rows", lambda runner: (uploads.append(runner.num_rows), upload(runner)))
    ahead = run(make_engine(model, tokenizer, ahead_from=1), requests)
    assert ids_of(ahead) == ids_of(plain)
    assert off_by(model, requests, ahead) < TOLERANCE
    assert uploads[0] == 16 and len(uploads) <= 6, uploads  # graphs of 16, 8, 4, 2, 1 rows


def test_completions_of_a_shared_prompt_are_exact(kind: EngineKind, model: Any, tokenizer: Any) -> None:
    """Prompts around the borders of a KV block, which is shared when full and copied when not."""
    requests = requests_for([prompt[:length] for prompt, length in zip(
        random_prompts(5, lengths=(130, 130)), (63, 64, 65, 128, 129), strict=True
    )], num_seeds=3)  # fmt: skip
    assert off_by(model, requests, run(make_engine(model, tokenizer), requests)) < TOLERANCE


def test_a_group_larger_than_max_running_is_exact(kind: EngineKind, model: Any, tokenizer: Any) -> None:
    requests = requests_for(random_prompts(2), num_seeds=7)
    assert off_by(model, requests, run(make_engine(model, tokenizer, max_running=3), requests)) < TOLERANCE


def test_sequences_past_the_first_rotary_table_are_exact(kind: EngineKind, tokenizer: Any) -> None:
    model = make_model(max_position_embeddings=1024).to(kind.device)
    requests = requests_for(random_prompts(2, lengths=(280, 300)), max_tokens=12)
    assert off_by(model, requests, run(make_engine(model, tokenizer), requests)) < TOLERANCE


def test_a_turn_of_a_session_fills_only_what_is_new(
    kind: EngineKind, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, filled = make_engine(model, tokenizer), count_fills(monkeypatch)
    talked = talk(engine, random_prompts(3, lengths=(20, 90)), turns=3)
    ends = [len(talked.requests[f"e{episode}-2"].prompt_ids) - 1 for episode in range(3)]
    sampled = [len(completion.token_ids) for name, (completion,) in talked.results.items() if name[-1] != "2"]
    assert sum(filled) == sum(ends) - sum(sampled)
    for episode in range(3):
        engine.end_session(f"s{episode}")
    filled.clear()
    run(engine, [talked.requests["e0-2"]])
    assert sum(filled) == ends[0]


def test_conversations_that_have_begun_go_on_before_others_begin(
    kind: EngineKind, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, filled = make_engine(model, tokenizer, max_running=3), count_fills(monkeypatch)
    talked = talk(engine, random_prompts(12, lengths=(20, 40)), turns=3)
    ends = [len(talked.requests[f"e{episode}-2"].prompt_ids) - 1 for episode in range(12)]
    sampled = [len(completion.token_ids) for name, (completion,) in talked.results.items() if name[-1] != "2"]
    assert sum(filled) == sum(ends) - sum(sampled), "no KV was lost"
    assert talked.off_by(model) < TOLERANCE


def test_kept_kv_takes_no_more_than_its_bound() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    for kv_tokens in (None, 150):
        engine = make_engine(model, tokenizer, max_running=3, kv_tokens=kv_tokens)
        for number, prompt in enumerate(random_prompts(12, lengths=(20, 40))):
            run(engine, [request(prompt, session=f"s{number}", max_tokens=8, stop_token_ids=())])
            kept = engine.runner._kept  # type: ignore[attr-defined]
            assert 0 < kept.num_tokens <= (kv_tokens or KEPT_PER_ROW * 3 * (kept.longest + 2 * TURN + 31))
        engine.update_weights(1)
        assert kept.num_tokens == 0 and not len(kept._sessions)


def test_kept_rows_come_back_as_they_left_and_holes_are_closed_before_a_session_is_forgotten() -> None:
    kept, rows, columns = KeptRows(), 8, 12
    planes = [Plane(torch.randn(rows, 2, 3, columns), 3), Plane(torch.randn(rows, 2, columns, 3), 2)]
    before = [plane.tensor.clone() for plane in planes]
    ids = np.arange(6, dtype=np.int32)
    leaving = [Leaving(session=f"s{row}", ids=ids, row=row, past=6) for row in (0, 2, 3, 5, 7)]
    kept.put(leaving, planes, end=10)
    assert kept.num_tokens == 5 * 6

    def back(session: str, row: int) -> None:
        sequence = Sequence(request=request(np.arange(9, dtype=np.int32), session=session).requests[0], number=0)
        taken = kept.take(sequence)
        assert taken is not None and taken[1] == 6
        kept.restore([Returning(kept=taken[0], num_tokens=6, row=row, column=1)], planes)

    for plane in planes:
        plane.tensor.zero_()
    back("s2", 4)
    assert kept.num_tokens == 5 * 6, "a hole takes memory"
    back("s0", 1)
    assert kept.give_way() and kept.num_tokens == 3 * 6 and len(kept._sessions) == 3
    for session, row in (("s7", 6), ("s3", 3), ("s5", 0)):
        back(session, row)
    assert kept.num_tokens == 0 and not kept.give_way()
    for plane, old in zip(planes, before, strict=True):
        for source, row in ((2, 4), (0, 1), (7, 6), (3, 3), (5, 0)):
            shown = plane.columns(1, 7)[row]
            assert torch.equal(shown, Plane(old, plane.dim).columns(4, 10)[source])


@pytest.mark.parametrize("way", ["products", "fused"])
@pytest.mark.parametrize("observed", [(3, 3, 3, 3), (3, 5, 1, 3)])
def test_rows_that_leave_and_come_back_together_keep_their_memory(
    way: Any, observed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[bool] = []
    restore = KeptRows.restore

    def noting(self: KeptRows, returning: Any, planes: Any, *, home: Any = None) -> None:
        homes.append(home is not None)
        restore(self, returning, planes, home=home)

    monkeypatch.setattr(KeptRows, "restore", noting)
    model, tokenizer = make_model(), make_tokenizer()
    ends: list[Any] = []
    for sessions in (True, False):
        engine = make_engine(model, tokenizer, max_running=4, way=way)
        talks = random_prompts(4, lengths=(20, 21))
        for turn in range(4):
            asked = [
                request(
                    ids, name=f"{place}", session=f"s{place}" if sessions else None, max_tokens=6, stop_token_ids=(), seeds=(turn,)
                )
                for place, ids in enumerate(talks)
            ]  # fmt: skip
            results = run(engine, asked)
            told = random_prompts(4, lengths=(5, 6))
            talks = [
                np.concatenate((ids, results[f"{place}"][0].token_ids, told[place][: observed[place]]))
                for place, ids in enumerate(talks)
            ]
        ends.append(talks)
    assert homes == [True] * 3, "their memory was not theirs"
    assert all(np.array_equal(one, other) for one, other in zip(*ends, strict=True))


def held_tokens(engine: NativeEngine) -> int:
    """KV that the tensors of a CPU's rows and sessions have memory for."""
    runner: Any = engine.runner
    sessions = {id(one.kv.bundle): one.kv.bundle for one in runner._kept._sessions.values()}.values()
    tensors = [*runner._keys, *runner._values, *(plane.tensor for bundle in sessions for plane in bundle.planes)]
    decoder = runner.decoder
    return sum(tensor.numel() for tensor in tensors) // (2 * len(decoder.layers) * decoder.shape.kv_width)


@pytest.mark.parametrize("kv_tokens", [None, 600])
def test_one_long_row_does_not_take_the_memory_of_all_rows_before_it(kv_tokens: int | None) -> None:
    model, tokenizer = make_model(max_position_embeddings=1024), make_tokenizer()
    engine = make_engine(model, tokenizer, max_running=24, kv_tokens=kv_tokens)
    short = requests_for(random_prompts(24, lengths=(6, 9)), num_seeds=1, max_tokens=8, stop_token_ids=())
    long = request(random_prompts(1, lengths=(400, 401))[0], name="long", max_tokens=8, stop_token_ids=())
    run(engine, short)
    assert held_tokens(engine) <= (kv_tokens or 24 * 32)
    run(engine, [long])
    assert held_tokens(engine) <= (kv_tokens or 2 * 24 * 32)
    run(engine, short)
    assert held_tokens(engine) <= (kv_tokens or 2 * 24 * 32)


def test_sessions_and_rows_together_keep_to_the_memory_there_is() -> None:
    model, tokenizer = make_model(max_position_embeddings=1024), make_tokenizer()
    engine = make_engine(model, tokenizer, max_running=6, kv_tokens=500)
    draw = np.random.default_rng(0)
    for number in range(60):
        session = f"s{draw.integers(12)}"
        prompt = random_prompts(1, seed=number, lengths=(5, int(draw.integers(8, 160))))[0]
        submit(engine, request(prompt, name=str(number), session=session, max_tokens=4, stop_token_ids=()))
        for _ in range(int(draw.integers(0, 4))):
            engine.step()
        kept: Any = engine.runner._kept  # type: ignore[attr-defined]
        bundles = {id(one.kv.bundle): one.kv.bundle for one in kept._sessions.values()}.values()
        assert kept.num_tokens == sum(bundle.num_rows * bundle.num_columns for bundle in bundles)
        assert kept.num_tokens <= 500 and held_tokens(engine) <= 2 * 500
    finish(engine)
    for number in range(12):
        engine.end_session(f"s{number}")
    assert kept.num_tokens == kept.longest == 0 and not kept._holed


def test_a_request_that_has_to_wait_costs_no_session_its_kv() -> None:
    engine = make_engine(make_model(max_position_embeddings=1024), make_tokenizer(), max_running=4, kv_tokens=300)
    for number, prompt in enumerate(random_prompts(3, lengths=(20, 24))):
        run(engine, [request(prompt, name=f"first{number}", session=f"s{number}", max_tokens=4, stop_token_ids=())])
    prompts = random_prompts(2, lengths=(80, 81))
    submit(engine, request(prompts[0], name="runs", max_tokens=60, stop_token_ids=()))
    engine.step()
    kept: Any = engine.runner._kept  # type: ignore[attr-defined]
    assert len(kept._sessions) == 3
    wide = random_prompts(1, lengths=(160, 161))[0]
    submit(engine, request(wide, name="waits", max_tokens=4, stop_token_ids=()))
    engine.step()
    assert len(kept._sessions) == 3, "two rows of 160 tokens do not fit, with or without sessions"
    finish(engine)


@pytest.mark.parametrize("way", ["products", "fused"])
def test_what_is_not_finite_stays_in_its_own_request(way: Any) -> None:
    model = make_model()
    engine = make_engine(model, make_tokenizer(), max_running=3, way=way)
    prompts = random_prompts(3, lengths=(20, 30))
    asked = [request(prompt, name=str(number), max_tokens=6) for number, prompt in enumerate(prompts)]
    weight: Any = model.model.layers[0].self_attn.k_proj.weight.data
    right = weight.clone()
    weight.fill_(float("nan"))
    broken = run(engine, [replace(one, session=f"s{number}") for number, one in enumerate(asked)])
    assert all(np.isnan(completion.logprobs).any() for (completion,) in broken.values())
    assert not engine.runner._kept.num_tokens, "nothing of it is kept"  # type: ignore[attr-defined]
    weight.copy_(right)
    engine.update_weights(1)
    shorter = [replace(one, prompt_ids=one.prompt_ids[: number + 5]) for number, one in enumerate(asked)]
    assert off_by(model, shorter, run(engine, shorter)) < TOLERANCE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fusing_keeps_names_values_and_outputs(architecture: str) -> None:
    plain, fused = make_model(architecture), make_model(architecture)
    ids = torch.from_numpy(random_prompts(1)[0].astype(np.int64))[None]
    fuse_parameters(fused)
    expected, got = plain.state_dict(), fused.state_dict()
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)


def test_fusing_keeps_gradients() -> None:
    plain, fused = make_model("llama-bias"), make_model("llama-bias")
    ids = torch.from_numpy(random_prompts(1)[0].astype(np.int64))[None]
    fuse_parameters(fused)
    for model in (plain, fused):
        model(ids, labels=ids).loss.backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), fused.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", [name for name, _ in make_model("llama-bias").named_parameters()])
def test_an_in_place_change_of_any_parameter_reaches_the_engine(name: str) -> None:
    model = make_model("llama-bias")
    engine = make_engine(model, make_tokenizer())
    requests = requests_for(random_prompts(2), max_tokens=8)
    run(engine, requests)
    with torch.no_grad():
        model.get_parameter(name).add_(0.3)
    engine.update_weights(1)
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_an_optimizer_step_reaches_the_engine() -> None:
    model = make_model()
    engine = make_engine(model, make_tokenizer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    ids = torch.from_numpy(random_prompts(1)[0].astype(np.int64))[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    engine.update_weights(1)
    requests = requests_for(random_prompts(2))
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def small(config_class: Any, **extra: Any) -> Any:
    shape = dict(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return config_class(**{**shape, **extra})


def test_another_architecture_is_refused_by_name() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
    gemma = Gemma2ForCausalLM(small(Gemma2Config, head_dim=16))
    for model, name in ((gpt2, "gpt2"), (gemma, "gemma2")):
        for refuse in (Decoder.of, fuse_parameters):
            with pytest.raises(
                UnsupportedModel, match=f"architecture '{name}' exactly; it runs llama, mistral, qwen2, qwen3"
            ):
                refuse(model)


def test_a_rope_type_that_depends_on_the_length_is_refused_by_name() -> None:
    model = make_model("llama-tied", rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))
    with pytest.raises(UnsupportedModel, match="this llama model has 'dynamic'"):
        fuse_parameters(model)


def test_other_activations_partial_rotary_and_quantised_weights_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(hidden_act="gelu"), "hidden_act=silu; this llama model has 'gelu'"),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)), "partial rotary"),
    ]
    for shape, message in cases:
        config_class, _, _ = ARCHITECTURES["llama-tied"]
        with pytest.raises(UnsupportedModel, match=message):
            fuse_parameters(LlamaForCausalLM(small(config_class, **shape)))
    model = make_model("llama-tied")
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(UnsupportedModel, match="unquantised weights"):
        fuse_parameters(model)


@pytest.mark.parametrize("rope", [
    dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
])  # fmt: skip
def test_scaled_rotary_embeddings_are_exact(kind: EngineKind, tokenizer: Any, rope: dict[str, Any]) -> None:
    model = make_model("llama-tied", rope_parameters=rope).to(kind.device)
    requests = requests_for(random_prompts(2, lengths=(70, 80)))
    assert off_by(model, requests, run(make_engine(model, tokenizer), requests)) < TOLERANCE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_bfloat16), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_bfloat16_logprobs_stay_close_to_the_modules_own(device: str, architecture: str) -> None:
    model = make_model(architecture, scale=2.0).to(device, torch.bfloat16)
    requests = requests_for(random_prompts(8), num_seeds=4, stop_token_ids=())
    results = run(make_engine(model, make_tokenizer(), max_running=32), requests)
    assert _mean_difference(model, requests, results) < 0.05


def _mean_difference(model: Any, requests: list[Ask], results: Results) -> float:
    differences = [
        np.abs(reference_logprobs(model, one.prompt_ids, completion.token_ids).numpy() - completion.logprobs)
        for one in requests
        for completion in results[one.id]
    ]
    return float(np.concatenate(differences).mean())


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_bfloat16), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_bfloat16_sessions_stay_close_to_the_modules_own(device: str) -> None:
    """On CUDA the new tokens of a turn go through flash attention over the kept blocks."""
    model = make_model("qwen2-sliding", scale=2.0).to(device, torch.bfloat16)
    talked = talk(make_engine(model, make_tokenizer()), random_prompts(6, lengths=(20, 90)), stop_token_ids=())
    assert _mean_difference(model, list(talked.requests.values()), talked.results) < 0.05


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_request_may_be_longer_than_all_before_it(device: str) -> None:
    """On CUDA each needs wider tables, and with them graphs of its own."""
    model = make_model(scale=2.0).to(device)
    engine = make_engine(model, make_tokenizer())
    for longest in (10, 70, 140):
        requests = requests_for(random_prompts(2, lengths=(longest - 5, longest)), max_tokens=4, stop_token_ids=())
        assert off_by(model, requests, run(engine, requests)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(
    SMOLLM2 is None,
    reason="set ROLLCALL_SMOLLM2 to a directory made by `python scripts/get_smollm2.py DIRECTORY`",
)
def test_smollm2_is_exact_and_fluent() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert SMOLLM2 is not None and Path(SMOLLM2).is_dir(), f"ROLLCALL_SMOLLM2={SMOLLM2} is not a directory"
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    engine = make_engine(model, tokenizer, max_running=4, kv_tokens=600)
    questions = ["What is 7 + 5?", "Name a colour of the rainbow.", "Count from one to five."]
    prompts = [
        np.array(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"],
            dtype=np.int32,
        )
        for text in questions
    ]
    requests = requests_for(prompts, max_tokens=24, stop_token_ids=(tokenizer.eos_token_id,))
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE
    greedy = request(prompts[0], temperature=0.0, max_tokens=40, stop_token_ids=(tokenizer.eos_token_id,))
    assert "12" in run_one(engine, greedy).text
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    engine.update_weights(1)
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_a_session_that_turns_to_something_else_has_the_room_of_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the blocks of a card. To fill them needs none of its kernels."""
    module = "rollcall.engine.native.paged"
    for name in (*(f"rollcall.model.kernels.{kernel}" for kernel in ("attention", "sampling", "decode")), module):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[module]
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    from rollcall.engine.native.paged import PagedRunner

    model = make_model()
    fuse_parameters(model)
    runner = PagedRunner(Decoder.of(model), max_running=2, kv_tokens=4 * 64, kv_fraction=0.3, graphs=False)
    ids = np.arange(200, dtype=np.int32) % 30 + 5
    long = Sequence(request=request(ids, session="talk").requests[0], number=0)
    assert runner.admit([long]) == 1
    runner.keep({0: long})
    runner.remove(0)
    other = np.concatenate((ids[:70], ids[:80] + 1)).astype(np.int32)
    shorter = Sequence(request=request(other, session="talk").requests[0], number=1)
    filled = count_fills(monkeypatch)
    assert runner.admit([shorter]) == 1, "all four blocks were kept, and it shares two"
    assert filled == [149 - 70]
