"""Low-rank adapters: against `peft` itself, against the merged model, and what must not change beside them."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from adapters import ALL, CPU, make_adapter, merged_of
from engine_contract import finish, request, submit
from learners import LONGEST, TEMPERATURE, make_samples, naive_gradients, naive_logprobs, section, trainable
from ranks import Ranks
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from saved import save as save_checkpoint
from saved import write_parts
from tiny import (
    compiles,
    make_model,
    make_tokenizer,
    needs_bfloat16,
    needs_compiler,
    random_prompts,
    reference_logprobs,
    save_model,
)
from torch import Tensor
from typer.testing import CliRunner

from rollcall.base.errors import ConfigError, ModelFilesError
from rollcall.checkpoint.merge.merge import merge
from rollcall.checkpoint.probe import read_probe
from rollcall.checkpoint.store import CheckpointStore
from rollcall.checkpoint.training import export_learner, read_learner
from rollcall.checkpoint.verify import verify
from rollcall.cli.main import app
from rollcall.config import Config, Grpo, RolloutSection, RunSection, load_config
from rollcall.config.lora import LoraSection
from rollcall.config.sections import ModelSection
from rollcall.engine.native.adapters import BASE
from rollcall.engine.native.engine import NativeEngine
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner, Reference
from rollcall.loop.resume import refuse_changing_base
from rollcall.model.adapter import Adapter, add_to_weights
from rollcall.model.base import base_identities
from rollcall.model.decoder import Decoder, fuse_parameters, module_names
from rollcall.model.layer import Layer, Shape, TorchOps
from rollcall.model.load import load_causal_lm
from rollcall.model.low_rank import LayerAdapter, LowRank
from rollcall.model.peft_files import write_adapter
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.find import PROBE
from rollcall.plan.activations import Passes
from rollcall.plan.memory import ModelSizes
from rollcall.plan.placement import Role
from rollcall.run.build import build_adapter, build_learner, load_sampler
from rollcall.run.evaluation import plan_evaluation
from rollcall.run.serving import plan_serving
from rollcall.run.worker import RoleWorker

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SOME = LoraSection(rank=4, alpha=6, targets=["q_proj", "v_proj", "up_proj"])


def make_learner(
    model: Any, adapter: Adapter | None, algorithm: Any = None, *, gang: Gang | None = None, **changes: Any
) -> Learner:
    return Learner(
        model,
        section(**changes),
        algorithm=algorithm or Grpo(),
        temperature=TEMPERATURE,
        max_response_tokens=LONGEST,
        total_updates=10,
        gang=gang,
        adapter=adapter,
    )


def merged(name: str, adapter: Adapter, **shape: Any) -> Any:
    model = make_model(name, **shape)
    add_to_weights(model, adapter.named_tensors(), gain=adapter.section.gain)
    return model


def values(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in adapter.named_tensors().items()}


@pytest.mark.parametrize("lora", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-untied", "llama-bias"])
def test_an_adapter_computes_what_the_merged_model_does(name: str, lora: LoraSection) -> None:
    model = trainable(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    adapter = make_adapter(model, lora)
    samples = make_samples(make_model(name))[:4]
    learner = make_learner(model, adapter)
    other = merged(name, adapter)
    for sample, row in zip(samples, learner.score(samples), strict=True):
        expected = reference_logprobs(other, sample.prompt_ids, sample.response_ids, temperature=TEMPERATURE)
        np.testing.assert_allclose(row.logprobs[sample.mask], expected.numpy()[sample.mask], atol=1e-4)
    learner.update(samples)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()), "the base is frozen"
    assert not any(tensor.requires_grad for tensor in Decoder.of(model).named_tensors().values())
    assert set(learner.optimizer.named) == set(adapter.named_tensors()), "the optimizer has the adapter alone"


def test_a_new_adapter_changes_nothing_and_comes_from_the_seed() -> None:
    model = trainable()
    samples = make_samples(make_model())[:3]
    plain = make_learner(trainable(), None).score(samples)
    found = make_learner(model, make_adapter(model, full=False)).score(samples)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    one, same, other = (make_adapter(model, full=False, seed=seed).named_tensors() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.q_proj_lora_A"], other["layers.0.q_proj_lora_A"])


def test_the_reference_is_the_model_without_its_adapter() -> None:
    model = trainable()
    samples = make_samples(make_model())[:3]
    learner = make_learner(model, make_adapter(model))
    reference = Reference(body=learner.body, section=learner.section, temperature=TEMPERATURE, plain=True)
    expected = make_learner(trainable(), None).score(samples)
    for one, other in zip(reference(samples), expected, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert not np.allclose(learner.score(samples)[0].logprobs, expected[0].logprobs)


@pytest.mark.slow
def test_dropout_is_drawn_from_the_seed_and_the_same_when_activations_are_recomputed() -> None:
    samples = make_samples(make_model())

    def trained(seed: int = 0, **changes: Any) -> tuple[dict[str, Tensor], Any]:
        model = trainable()
        adapter = make_adapter(model, ALL.model_copy(update={"dropout": 0.5}))
        adapter = replace(adapter, seed=seed)
        torch.manual_seed(int(np.random.default_rng().integers(1000)))  # what others draw does not matter
        learner = make_learner(model, adapter, tokens_per_microbatch=60, **changes)
        for _ in range(2):
            learner.update(samples)
        return values(adapter), learner.score(samples[:1])[0].logprobs

    first, again, recomputed = trained(), trained(), trained(activation_checkpointing=True)
    for name, tensor in first[0].items():
        assert torch.equal(tensor, again[0][name]), name
        torch.testing.assert_close(recomputed[0][name], tensor, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(tensor, first[0][name], atol=1e-5) for name, tensor in trained(seed=1)[0].items())
    np.testing.assert_array_equal(first[1], again[1])


@needs_bfloat16
def test_a_bfloat16_adapter_has_float32_masters() -> None:
    model = make_model().bfloat16()
    fuse_parameters(model)
    adapter = make_adapter(model)
    learner = make_learner(model, adapter, lr=1e-4)
    learner.update(make_samples(make_model())[:3])
    assert {tensor.dtype for tensor in learner.optimizer.targets.values()} == {torch.float32}
    assert {tensor.dtype for tensor in adapter.named_tensors().values()} == {torch.bfloat16}


def test_bfloat16_does_not_round_away_what_a_young_adapter_adds() -> None:
    """8 has neighbours at 0.0625: neither 0.02 of the product nor 0.02 of the adapter reaches one, and both together do."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    pair = LowRank(a=one, b=0.02 * one)
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Layer))
    weights = {**fields, "out": 0.02 * one, "down": 0.02 * one, "window": 0}
    layer = Layer(**{**weights, "lora": LayerAdapter(out=pair, down=pair)})  # type: ignore[arg-type]
    ops = TorchOps(shape=Shape(heads=1, kv_heads=1, head_dim=1, eps=1e-6), cos=one, sin=one)
    for name in ("out", "down"):
        assert float(ops.add_product(8 * one, one, layer, name)) == 8.0625
        assert float(ops.add_product(8 * one, one, replace(layer, lora=None), name)) == 8


@pytest.mark.slow
@needs_compiler
def test_a_compiled_learner_and_engine_have_the_same_adapter() -> None:
    samples = make_samples(make_model())[:3]
    plain, model = make_learner(trainable(), make_adapter(trainable())), trainable()
    expected = plain.update(samples)
    with compiles():
        learner = make_learner(model, make_adapter(model))
        learner.body.compile()
        found = learner.update(samples)
        learner.score(samples)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    prompts = random_prompts(3)
    outs = []
    for compile in (False, True):
        engine = NativeEngine(
            model, make_tokenizer(), max_running=8, kv_tokens=None, compile=compile, adapters={"a": make_adapter(model)}
        )
        outs.append(sample_all(engine, {f"r{place}": (prompt, None) for place, prompt in enumerate(prompts)}))
    for name, completion in outs[0].items():
        np.testing.assert_allclose(completion[0].logprobs, outs[1][name][0].logprobs, atol=1e-4)


# The engine


def sample_all(engine: Any, wanted: dict[str, tuple[np.ndarray, str | None]]) -> dict[str, Any]:
    for place, (name, (prompt, adapter)) in enumerate(wanted.items()):
        one = request(prompt, name=name, seeds=(place,), max_tokens=8)
        submit(engine, replace(one, adapter=adapter))
    return finish(engine)


@pytest.mark.parametrize("way", ["products", "fused", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_rows_of_one_batch_have_different_adapters(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_card, device = way == "cuda", "cuda" if way == "cuda" else "cpu"
    if not on_card:
        monkeypatch.setattr("rollcall.engine.native.rows.cpu_way", lambda: way)
    shape: dict[str, Any] = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2) if on_card else {}
    model = make_model(**shape).to(device)
    fuse_parameters(model)
    adapters = {"one": make_adapter(model, ALL, seed=5), "two": make_adapter(model, SOME, seed=7)}
    engine = NativeEngine(
        model, make_tokenizer(), max_running=3, kv_tokens=4096 if on_card else None,
        adapters=adapters,
    )  # fmt: skip
    others: dict[str | None, Any] = {
        None: merged("qwen2-tied", adapters["one"], **shape),
        "two": merged("qwen2-tied", adapters["two"], **shape),
        BASE: make_model(**shape),
    }
    prompts = random_prompts(6)
    wanted = {f"r{place}": (prompt, [None, "two", BASE][place % 3]) for place, prompt in enumerate(prompts)}

    def check() -> None:
        for name, (completion,) in sample_all(engine, wanted).items():
            prompt, adapter = wanted[name]
            expected = reference_logprobs(others[adapter], prompt, completion.token_ids)
            atol = 2e-3 if on_card else 1e-4
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=atol, err_msg=f"{name} {adapter}")

    check()
    # New values reach graphs that were captured before.
    for tensor in adapters["two"].named_tensors().values():
        tensor.mul_(1.5)
    others["two"] = merged("qwen2-tied", adapters["two"], **shape)
    engine.update_weights(1)
    check()


def test_the_engine_takes_over_what_was_trained_with_the_next_version() -> None:
    model = trainable()
    adapter = make_adapter(model)
    learner, samples = make_learner(model, adapter, lr=0.05), make_samples(make_model())
    engine = NativeEngine(model, make_tokenizer(), max_running=4, kv_tokens=None, adapters={"policy": adapter})
    pointers = [pair.a.data_ptr() for layer in engine.served._layers for pair in (layer.qkv, layer.down)]  # type: ignore[union-attr]
    learner.update(samples)
    engine.update_weights(1)
    assert pointers == [pair.a.data_ptr() for layer in engine.served._layers for pair in (layer.qkv, layer.down)]  # type: ignore[union-attr]
    other, prompts = merged("qwen2-tied", adapter), random_prompts(2)
    for name, (completion,) in sample_all(
        engine, {f"r{place}": (prompt, None) for place, prompt in enumerate(prompts)}
    ).items():
        expected = reference_logprobs(other, prompts[int(name[1:])], completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)


def test_a_request_for_an_unknown_adapter_is_refused() -> None:
    model = trainable()
    prompt = random_prompts(1)[0]
    plain = NativeEngine(model, make_tokenizer(), max_running=2, kv_tokens=None)
    with pytest.raises(ValueError, match="this engine has no adapters"):
        sample_all(plain, {"r": (prompt, "two")})
    engine = NativeEngine(model, make_tokenizer(), max_running=2, kv_tokens=None, adapters={"one": make_adapter(model)})
    with pytest.raises(ValueError, match="this engine has base, one"):
        sample_all(engine, {"r": (prompt, "two")})


# PEFT


def peft_model(folder: Path, name: str, adapter: Adapter, *, trains: bool = False) -> Any:
    peft = pytest.importorskip(
        "peft", reason="this test compares with peft, which is not installed (pip install 'rollcall[dev]')"
    )
    write_adapter(folder, adapter.named_tensors(), adapter.section, base="base")
    return peft.PeftModel.from_pretrained(make_model(name), folder, is_trainable=trains).eval()


def by_module(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {module_names(name)[0].replace(".weight", ".default.weight"): tensor for name, tensor in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-bias"])
def test_outputs_gradients_and_a_few_steps_are_those_of_peft(tmp_path: Path, name: str, lora: LoraSection) -> None:
    model = trainable(name)
    adapter = make_adapter(model, lora)
    other = peft_model(tmp_path, name, adapter, trains=True)
    samples = make_samples(make_model(name))
    algorithm = Grpo(kl_coef=0.1, entropy_coef=0.05)
    learner = make_learner(model, adapter, algorithm, tokens_per_microbatch=60)
    for sample, row in zip(samples[:3], learner.score(samples[:3]), strict=True):
        with torch.no_grad():
            (full,) = naive_logprobs(other, [sample])
        chosen = full.gather(1, torch.from_numpy(sample.response_ids.astype(np.int64))[:, None])[:, 0].numpy()
        np.testing.assert_allclose(row.logprobs[sample.mask], chosen[sample.mask], atol=1e-4)
    trained = {key: parameter for key, parameter in other.named_parameters() if parameter.requires_grad}
    adamw = torch.optim.AdamW(trained.values(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        adamw.zero_grad()
        found = naive_gradients(other, algorithm, samples)
        expected = {key.removeprefix("base_model.model."): grad for key, grad in found.items() if grad is not None}
        sums: dict[str, Tensor] = {}
        original = learner.optimizer.step

        def step_and_note(sums: dict[str, Tensor] = sums, original: Any = original) -> Any:
            sums.update({key: tensor.clone() for key, tensor in learner.optimizer._sums.items()})
            return original()

        learner.optimizer.step = step_and_note  # type: ignore[method-assign]
        learner.update(samples)
        learner.optimizer.step = original  # type: ignore[method-assign]
        own = by_module(sums)
        assert own.keys() == expected.keys()
        scale = max(float(grad.abs().max()) for grad in expected.values())
        for key, grad in expected.items():
            assert float((own[key] - grad).abs().max()) <= 1e-4 * scale, (step, key)
        adamw.step()
    after = {key.removeprefix("base_model.model."): parameter.detach() for key, parameter in trained.items()}
    for key, tensor in by_module(values(adapter)).items():
        torch.testing.assert_close(tensor, after[key], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_peft_initialises_as_this_does(tmp_path: Path) -> None:
    peft = pytest.importorskip(
        "peft", reason="this test compares with peft, which is not installed (pip install 'rollcall[dev]')"
    )
    torch.manual_seed(0)
    other = peft.get_peft_model(make_model(), peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    theirs = {name: tensor for name, tensor in other.named_parameters() if "lora_" in name}
    own = make_adapter(trainable(), LoraSection(rank=8, alpha=16), full=False).named_tensors()
    assert {name.removeprefix("base_model.model.") for name in theirs} == set(by_module(own))
    for name, tensor in by_module(own).items():
        their = theirs[f"base_model.model.{name}"]
        assert tensor.shape == their.shape and float(tensor.abs().max()) <= 1.001 / tensor.shape[1] ** 0.5
        assert float(their.detach().std()) == pytest.approx(float(tensor.std()), rel=0.15)
    other.save_pretrained(tmp_path)
    lora = LoraSection(rank=8, alpha=16, path=str(tmp_path))
    read = Adapter.make(Decoder.of(trainable()), lora, seed=0, device=CPU, base="base")
    for name, tensor in by_module(read.named_tensors()).items():
        assert torch.equal(tensor, theirs[f"base_model.model.{name}"].detach()), "an adapter that peft wrote is read"


def test_an_adapter_begins_where_another_ended(tmp_path: Path) -> None:
    model = trainable()
    adapter = make_adapter(model, SOME)
    write_adapter(tmp_path, adapter.named_tensors(), SOME, base="base")
    again = make_adapter(model, SOME.model_copy(update={"path": str(tmp_path)}), full=False)
    assert all(torch.equal(tensor, again.named_tensors()[name]) for name, tensor in adapter.named_tensors().items())


def test_adapters_of_each_other_are_refused(tmp_path: Path) -> None:
    names = ("one", "other")
    for name, base in zip(names, reversed(names), strict=True):
        save_model(tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        write_adapter(tmp_path / name, make_adapter(trainable()).named_tensors(), ALL, base=str(tmp_path / base))
    with pytest.raises(ModelFilesError, match="is an adapter whose base model leads back to .*/one; correct"):
        load_causal_lm(str(tmp_path / "one"), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        (dict(rank=8), {}, "has rank 4, but model.lora.rank is 8; set model.lora.rank=4"),
        (
            dict(targets="all_linear"),
            {},
            r"has targets \[q_proj,v_proj,up_proj\].*set model.lora.targets=\[q_proj,v_proj,up_proj\]",
        ),
        ({}, dict(use_rslora=True), "use_rslora=true, which is not supported"),
        ({}, dict(bias="all"), 'bias="all", which is not supported'),
        ({}, dict(init_lora_weights="pissa_niter_4"), 'init_lora_weights="pissa_niter_4", which is not supported'),
        ({}, dict(kasa_config={"beta": 0.1}), "kasa_config=.*, which is not supported"),
        ({}, dict(r="many"), "does not describe a LoRA adapter"),
        (
            {},
            dict(lora_alpha=1e300),
            r"Rollcall supports: alpha=1e\+300: input should be less than or equal to 1000000",
        ),
        (
            {},
            dict(target_modules=["q_proj", "lm_head"]),
            r"Rollcall supports: targets: 'lm_head' cannot have an adapter; .*down_proj$",
        ),
    ],
)
def test_an_adapter_that_is_not_the_run_files_is_refused(
    tmp_path: Path, changes: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    model = trainable()
    write_adapter(tmp_path, make_adapter(model, SOME).named_tensors(), SOME, base="base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    lora = LoraSection(
        **{"rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj", "up_proj"], "path": str(tmp_path), **changes}
    )
    with pytest.raises(ModelFilesError, match=words):
        make_adapter(model, lora)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = trainable(num_hidden_layers=1)
    write_adapter(tmp_path, make_adapter(other).named_tensors(), ALL, base="base")
    with pytest.raises(
        ModelFilesError,
        match=r"is an adapter for a different model: 14 tensors are missing \(base_model.model.model.layers.1",
    ):
        make_adapter(trainable(), ALL.model_copy(update={"path": str(tmp_path)}))


def _as(dtype: torch.dtype) -> Any:
    return lambda path: path.write_bytes(save({name: one.to(dtype) for name, one in load_file(path).items()}))


def _with_nan(path: Path) -> None:
    tensors = {name: one.clone() for name, one in load_file(path).items()}
    tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"][0, 0] = torch.nan
    path.write_bytes(save(tensors))


@pytest.mark.parametrize("targets", [None, "all-linear"], ids=["named targets", "all-linear"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not a complete safetensors file"),
        (
            lambda path: path.rename(path.with_name("adapter_model.bin")),
            "adapter_model.bin, which Rollcall does not read",
        ),
        (
            _as(torch.int64),
            "12 tensors are stored as int64 .*up_proj.lora_A.weight.*; use an adapter with floating-point weights",
        ),
        (
            _with_nan,
            "1 tensor is not finite .base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight., so the adapter has",
        ),
    ],
    ids=["cut off", "pickle", "integers", "nan"],
)
def test_weights_of_an_adapter_that_cannot_be_used_are_refused(
    tmp_path: Path, damage: Any, words: str, targets: str | None
) -> None:
    model = trainable()
    write_adapter(tmp_path, make_adapter(model, SOME).named_tensors(), SOME, base="base")
    if targets is not None:  # then the weights' names are read first
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": targets}))
    damage(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelFilesError, match=words):
        make_adapter(model, SOME.model_copy(update={"path": str(tmp_path)}))


# Checkpoints


def test_a_checkpoint_holds_the_adapter_alone_and_training_goes_on_from_it(tmp_path: Path) -> None:
    samples = make_samples(make_model())

    def start() -> tuple[Learner, Adapter]:
        model = trainable()
        adapter = make_adapter(model, SOME)
        return make_learner(model, adapter, weight_decay=0.1, warmup_steps=2), adapter

    learner, adapter = start()
    for _ in range(2):
        learner.update(samples)
    save_checkpoint(Gang.alone(), tmp_path, learner=learner)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "tokenizer.json", "probe.json"} <= names
    assert "model.safetensors" not in names
    again, other = start()
    read_learner(again, tmp_path)
    assert all(torch.equal(tensor, values(other)[name]) for name, tensor in values(adapter).items())
    assert learner.update(samples) == again.update(samples)
    assert all(torch.equal(tensor, values(other)[name]) for name, tensor in values(adapter).items())


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (SOME.model_copy(update={"rank": 2, "alpha": 3.0}), "has rank 4, but model.lora.rank is 2"),
        (SOME.model_copy(update={"targets": "all_linear"}), "has targets"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(tmp_path: Path, lora: LoraSection, words: str) -> None:
    model = trainable()
    save_checkpoint(Gang.alone(), tmp_path, learner=make_learner(model, make_adapter(model, SOME)))
    with pytest.raises(ModelFilesError, match=words):
        read_learner(make_learner(model, make_adapter(model, lora)), tmp_path)


def test_a_model_path_may_be_an_adapter_and_the_export_may_be_merged(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    model = load_causal_lm(str(base), device=CPU, dtype=torch.float32)
    adapter = replace(make_adapter(model), base=str(base))
    learner, samples = make_learner(model, adapter), make_samples(make_model())[:2]
    export_learner(learner, make_tokenizer(), tmp_path / "adapter")
    export_learner(learner, make_tokenizer(), tmp_path / "merged", merged=True)
    expected = learner.score(samples)
    for name in ("adapter", "merged"):
        loaded = load_causal_lm(str(tmp_path / name), device=CPU, dtype=torch.float32)
        for one, other in zip(make_learner(loaded, None).score(samples), expected, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    merge(tmp_path / "adapter", tmp_path / "out")
    assert verify(tmp_path / "out").difference < 1e-3, "it computes what the adapter computed"
    for path in (tmp_path / "base").iterdir():
        path.unlink()
    base.rmdir()
    with pytest.raises(ModelFilesError, match="is an adapter for .*base, which does not exist on this machine"):
        load_causal_lm(str(tmp_path / "adapter"), device=CPU, dtype=torch.float32)


def test_a_checkpoint_is_refused_where_the_model_of_its_adapter_has_changed(tmp_path: Path) -> None:
    model = trainable()
    save_checkpoint(Gang.alone(), tmp_path, learner=make_learner(model, make_adapter(model, SOME)))
    read_learner(make_learner(trainable(), make_adapter(model, SOME)), tmp_path)
    other = trainable()
    Decoder.of(other).layers[1].out.mul_(1.01)
    with pytest.raises(
        ModelFilesError,
        match="is an adapter that was not trained on the weights in base: they have changed",
    ):
        read_learner(make_learner(other, make_adapter(model, SOME)), tmp_path)
    for key, value in (("rms_norm_eps", 1e-3), ("rope_parameters", {"rope_type": "default", "rope_theta": 7.0})):
        other = trainable()
        setattr(other.config, key, value)
        with pytest.raises(ModelFilesError, match=f"whose config.json differs from the one in base .{key}: "):
            read_learner(make_learner(other, make_adapter(model, SOME)), tmp_path)


def test_an_adapter_is_not_put_on_a_model_that_has_changed(tmp_path: Path) -> None:
    folder, base = saved_adapter(tmp_path) / "model", tmp_path / "base"
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'))
    with pytest.raises(
        ModelFilesError, match="whose config.json differs from the one in .*base .rms_norm_eps: 1e-06 -> 0.001"
    ):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)
    (base / "config.json").write_text(config)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelFilesError, match="is an adapter that was not trained on the weights in .*base: they have changed"
    ):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)
    with pytest.raises(StoredError, match="they have changed since it was saved"):
        merge(folder, tmp_path / "out")
    (folder / PROBE).unlink()  # as of another program
    load_causal_lm(str(folder), device=CPU, dtype=torch.float32)


def _reversed(weights: dict[str, Tensor]) -> None:
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[4:14] = embeddings[4:14].flip(0).clone()


def _two_signs(weights: dict[str, Tensor]) -> None:
    for place in (1, 3):  # each is the second half of eight bytes
        weights["model.norm.weight"][place] *= -1


def change_weights(base: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(base / "model.safetensors")
    change(weights)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [_reversed, _two_signs], ids=["places", "signs"])
def test_the_places_of_a_models_numbers_count(tmp_path: Path, change: Any) -> None:
    folder = saved_adapter(tmp_path) / "model"
    change_weights(tmp_path / "base", change)
    with pytest.raises(
        ModelFilesError, match="is an adapter that was not trained on the weights in .*base: they have changed"
    ):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)


def test_the_identity_of_a_model_is_the_same_however_its_tensors_lie_in_memory() -> None:
    one = torch.arange(1, 16, dtype=torch.bfloat16).view(5, 3)
    lies = [one.clone(), one.t().contiguous().t(), torch.cat([one[:1], one])[1:]]
    found = [base_identities([("a", each), ("b", one)], dtype=torch.bfloat16) for each in lies]
    assert found[0] == found[1] == found[2] != base_identities([("a", one.flip(0)), ("b", one)], dtype=torch.bfloat16)
    last = one.clone()
    last[-1, -1] += 1  # in the two bytes that are no whole word
    assert base_identities([("a", last), ("b", one)], dtype=torch.bfloat16) != found[0]
    with mock.patch("rollcall.model.base.PIECE", 2):  # a row is longer than a piece
        rows = base_identities([("a", one)], dtype=torch.bfloat16)
        assert rows == base_identities([("a", lies[1])], dtype=torch.bfloat16)
        assert rows != base_identities([("a", one.flip(0))], dtype=torch.bfloat16), "pieces have their order"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_identity_of_a_model_is_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    weights = torch.randn(1031, 1025, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )  # three pieces, no whole words
    here, there = (base_identities([("a", each)], dtype=dtype) for each in (weights, weights.cuda()))
    assert here == there and len(here) == (3 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_is_compared_with_a_model_that_is_loaded_in_another_precision(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = saved_adapter(tmp_path) / "model"
    load_causal_lm(str(folder), device=CPU, dtype=dtype)
    change_weights(tmp_path / "base", _reversed)
    with pytest.raises(
        ModelFilesError, match="is an adapter that was not trained on the weights in .*base: they have changed"
    ):
        load_causal_lm(str(folder), device=CPU, dtype=dtype)


@pytest.mark.slow
def test_an_adapter_of_rounded_weights_is_compared_where_that_is_possible(tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path, dtype=torch.bfloat16) / "model"
    assert list(read_probe(folder / PROBE).base) == ["bfloat16"]
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        load_causal_lm(str(folder), device=CPU, dtype=dtype)
    change_weights(tmp_path / "base", _reversed)
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(ModelFilesError, match="was not trained on the weights in"):
            load_causal_lm(str(folder), device=CPU, dtype=dtype)
    load_causal_lm(str(folder), device=CPU, dtype=torch.float16)  # rounded in two ways


@pytest.mark.slow
def test_an_adapter_on_an_adapter_is_loaded_in_any_precision_and_on_any_device(tmp_path: Path) -> None:
    folder = on_an_adapter(tmp_path)
    assert read_probe(folder / PROBE).base == {}
    for dtype in (torch.float32, torch.bfloat16):  # the weights below it are rounded before the first adapter is added
        load_causal_lm(str(folder), device=CPU, dtype=dtype)
    with mock.patch("torch.addmm", lambda c, b, a, *, alpha: c + alpha * (b.flip(1) @ a.flip(0))):  # in another order
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)
    change_weights(tmp_path / "base", _reversed)
    with pytest.raises(ModelFilesError, match="was not trained on the weights in"):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "uint4"')),
        lambda path: path.write_text("[]"),
    ],
    ids=["cut off", "unknown type", "a list"],
)
def test_a_probe_that_cannot_be_read_is_refused(tmp_path: Path, damage: Any) -> None:
    folder = saved_adapter(tmp_path) / "model"
    damage(folder / PROBE)
    with pytest.raises(ModelFilesError, match="probe.json is damaged .*; restore the file, or delete it"):
        load_causal_lm(str(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_adapter_that_makes_weights_infinite_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = saved_adapter(tmp_path) / "model"
    path = folder / "adapter_model.safetensors"
    larger = 1e25 if dtype == torch.float32 else 1e4  # each number is finite
    path.write_bytes(save({name: larger * one for name, one in load_file(path).items()}))
    with pytest.raises(
        ModelFilesError, match="with the adapter added, .*proj.weight is not finite: .* use another adapter"
    ):
        load_causal_lm(str(folder), device=CPU, dtype=dtype)
    shutil.copytree(folder, tmp_path / "alone")  # without checksums
    if dtype == torch.float32:
        with pytest.raises(StoredError, match="with the adapter added, .*proj.weight is not finite"):
            merge(tmp_path / "alone", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_merged_export_is_refused_where_its_weights_would_be_infinite(tmp_path: Path) -> None:
    model = trainable()
    adapter = make_adapter(model)
    for tensor in adapter.named_tensors().values():
        tensor.mul_(1e25)
    learner = make_learner(model, adapter)
    with pytest.raises(ModelFilesError, match="with the adapter added, .*proj.weight is not finite"):
        export_learner(learner, make_tokenizer(), tmp_path / "model", merged=True)
    assert not (tmp_path / "model").exists()


def saved_adapter(folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of an adapter; its model is in ``base`` beside it."""
    base = save_model(folder / "base")
    model = load_causal_lm(str(base), device=CPU, dtype=dtype)
    learner = make_learner(model, replace(make_adapter(model), base=str(base)))
    store = CheckpointStore(folder / "run" / "checkpoints", keep_last=1, keep_best=0)
    return store.save(1, write=partial(write_parts, learner=learner), state={"next_draw": 0}, score=None)


def on_an_adapter(folder: Path) -> Path:
    """The directory of an adapter; its model is that of ``saved_adapter``."""
    below = str(saved_adapter(folder) / "model")
    model = load_causal_lm(below, device=CPU, dtype=torch.float32)
    export_learner(
        make_learner(model, replace(make_adapter(model, seed=3), base=below)), make_tokenizer(), folder / "above"
    )
    return folder / "above"


@pytest.mark.slow
def test_the_command_merges_an_adapter_of_a_run_a_checkpoint_or_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "project" / "runs"
    root.mkdir(parents=True)
    step, run = saved_adapter(root), root / "run"
    shutil.copytree(step / "model", run / "model")
    (run / "metrics.jsonl").touch()
    (run / "run.yaml").write_text("algorithm: {name: dapo}")
    for other in (root, root.parent, run / "checkpoints"):
        (other / "run.yaml").write_text("algorithm: {name: ppo}")
    for number, source in enumerate((run, step, step / "model", run / "model")):
        out = tmp_path / f"out-{number}"
        done = CliRunner().invoke(app, ["merge", str(source), "--out", str(out), "--verify"])
        assert done.exit_code == 0 and "verified" in done.output, done.output
        assert "no checksums" not in done.output and "Loading weights" not in done.output
        assert (out / "model.safetensors").is_file() and not (out / "adapter_config.json").exists()
        assert "| algorithm | dapo |" in (out / "README.md").read_text(), "the card is the run's own"
    merge(root / "base", tmp_path / "plain")
    assert "algorithm" not in (tmp_path / "plain" / "README.md").read_text(), (
        "a run file two folders up is of another model"
    )


def test_a_merge_never_replaces_the_model_of_its_adapter(tmp_path: Path) -> None:
    step = saved_adapter(tmp_path)
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    with pytest.raises(StoredError, match="the adapter's model, which the merge reads; choose another --out"):
        merge(step, tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


def test_a_merge_never_replaces_a_model_below_the_model_of_its_adapter(tmp_path: Path) -> None:
    source = on_an_adapter(tmp_path)
    with pytest.raises(StoredError, match="base contains .*base, the adapter's model, .* choose another --out"):
        merge(source, tmp_path / "base")
    merge(source, tmp_path / "out")


def test_a_merge_refuses_an_adapter_that_changed_in_its_checkpoint(tmp_path: Path) -> None:
    step = saved_adapter(tmp_path)
    path = step / "model" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-6] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(
        StoredError, match=r"adapter_model.safetensors .*has changed since it was written \(its checksum differs\)"
    ):
        merge(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_of_an_adapter_leaves_nothing_beside_its_target(tmp_path: Path) -> None:
    step, out = saved_adapter(tmp_path), tmp_path / "models" / "out"

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with (
        mock.patch("safetensors.torch.save_file", full),
        pytest.raises(StoredError, match="out cannot be written: No space left on device; free space"),
    ):
        merge(step, out)
    assert not list(out.parent.iterdir())
    left = out.parent / ".adapter-out"  # by a merge that was killed
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    merge(step, out)
    assert list(out.parent.iterdir()) == [out]


# Several processes

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 3, several micro-batches": (3, dict(sharding="fsdp", tokens_per_microbatch=40)),
    "2 x 2, sequence parallel, recomputed": (
        4,
        dict(sharding="fsdp", tensor_parallel_size=2, sequence_parallel=True, activation_checkpointing=True),
    ),
    "tensor 4, two of which share a head": (4, dict(tensor_parallel_size=4)),
    "hsdp 2 x 2": (4, dict(sharding="hsdp", sharding_group_size=2)),
    "copies 2": (2, {}),
    "context 2": (2, dict(context_parallel_size=2)),
    "fsdp 2 x context 2": (4, dict(sharding="fsdp", context_parallel_size=2)),
}


def train(gang: Gang, changes: dict[str, Any], lora: LoraSection, start: Path | None, end: Path | None) -> Any:
    """The metrics of some updates and the adapter after them, and what the reference says; from and to a checkpoint."""
    model = trainable("qwen3-untied")
    learner = make_learner(
        model,
        make_adapter(model, lora),
        Grpo(kl_coef=0.1, entropy_coef=0.01),
        gang=gang,
        **{"grad_clip": 0.5, "weight_decay": 0.1, "warmup_steps": 2, **changes},
    )
    samples = make_samples(make_model("qwen3-untied"))
    if start is not None:
        read_learner(learner, start)
    rows = [learner.update(samples) for _ in range(2)]
    if end is not None:
        save_checkpoint(gang, end, learner=learner)
    reference = Reference(body=learner.body, section=learner.section, temperature=TEMPERATURE, plain=True)
    scores = [score.logprobs for one in (reference, learner.score) for score in one(samples[:2])]
    return rows, {name: tensor.detach().numpy() for name, tensor in learner.body.whole_tensors()}, scores


def assert_same(found: Any, expected: Any) -> None:
    for left, right in zip(found[0], expected[0], strict=True):
        assert left == pytest.approx(right, rel=2e-4, abs=2e-5)
    assert list(found[1]) == list(expected[1])
    for name, tensor in expected[1].items():
        np.testing.assert_allclose(found[1][name], tensor, atol=1e-4, err_msg=name)
    for left, right in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(left, right, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_divided_learner_trains_the_same_adapter(ranks: Ranks, tmp_path: Path, world: str) -> None:
    size, changes = WORLDS[world]
    lora = ALL if "2 x 2" in world else SOME.model_copy(update={"targets": ["k_proj", "o_proj", "gate_proj"]})
    for path in ("alone", "divided"):
        (tmp_path / path).mkdir()
    expected = train(Gang.alone(), {}, lora, None, tmp_path / "alone")
    for found in ranks.run(train, changes, lora, None, tmp_path / "divided", size=size):
        assert_same(found, expected)
    # Each goes on from the other's checkpoint.
    expected = train(Gang.alone(), {}, lora, tmp_path / "divided", None)
    assert_same(ranks.run(train, changes, lora, tmp_path / "alone", None, size=size)[0], expected)


def test_an_actor_sends_its_adapter_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = Config(
        run=RunSection(dir=tmp_path / "run"), model=ModelSection(path=str(save_model(tmp_path / "model")), lora=ALL),
        actor=section(lr=0.05), rollout=RolloutSection(max_running=4, temperature=TEMPERATURE), algorithm=Grpo(kl_coef=0.1),
    )  # fmt: skip
    actor, rollout = (RoleWorker(config, config.model.path, in_parts=frozenset()) for _ in range(2))
    for worker, roles in ((actor, (Role.ACTOR, Role.REFERENCE)), (rollout, (Role.ROLLOUT,))):
        worker.build(dict.fromkeys(roles, 0), {})
    sent: list[dict[str, Tensor]] = []
    send = actor._weights.send
    monkeypatch.setattr(actor._weights, "send", lambda tensors, version: send(note(tensors, sent), version=version))
    invitation = actor.invite({"rollout": True}, "127.0.0.1")["rollout"]
    samples = make_samples(make_model())
    before = {name: tensor.clone() for name, tensor in rollout.model.named_parameters()}
    for version in (0, 1):
        with ThreadPoolExecutor() as pool:
            taking = pool.submit(rollout.use_weights, version, "rollout", [invitation])
            actor.send_weights(version)
            taking.result()
        actor.update(samples)
    actor.invite({}, "127.0.0.1")
    assert actor.adapter is not None and actor.learner is not None
    num_bytes = sum(tensor.nbytes for tensor in actor.adapter.named_tensors().values())
    assert all(sum(tensor.nbytes for tensor in tensors.values()) == num_bytes for tensors in sent)
    assert len(sent) == 2 and sent[1].keys() == actor.adapter.named_tensors().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.model.named_parameters())
    plain = actor.score_reference(samples[:1])[0].logprobs
    np.testing.assert_array_equal(plain, make_learner(actor.model, None).score(samples[:1])[0].logprobs)
    assert rollout.engine is not None and rollout.adapter is not None
    other = merged_of(config.model.path, rollout.adapter)
    prompt = random_prompts(1)[0]
    (completion,) = sample_all(rollout.engine, {"r": (prompt, None)})["r"]
    expected = reference_logprobs(other, prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)
    assert rollout.engine.version == 1


def note(tensors: Any, sent: list[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    sent.append({})
    for name, tensor in tensors:
        sent[-1][name] = tensor
        yield name, tensor


def test_an_evaluation_of_a_run_that_has_not_begun_has_its_first_adapter(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    model = load_causal_lm(str(base), device=CPU, dtype=torch.float32)
    adapter = make_adapter(model)
    write_adapter(tmp_path, adapter.named_tensors(), ALL, base=str(base))
    lora = f"{{rank: 3, alpha: 6, path: {tmp_path}}}"
    (tmp_path / "run.yaml").write_text(f"model: {{path: {base}, lora: {lora}}}\nrun: {{dir: {tmp_path / 'run'}}}\n")
    how = dict(data=None, samples=None, temperature=None, max_prompts=None)
    for plan in (
        plan_evaluation(tmp_path / "run.yaml", overrides=[], **how),  # type: ignore[arg-type]
        plan_serving(str(tmp_path / "run.yaml"), overrides=[]),
        plan_serving(str(base), overrides=[f"model.lora={lora}"]),
    ):
        assert plan.lora is not None and plan.lora.path == str(tmp_path)
    sampler = load_sampler(plan.config.model, plan.config.rollout, str(base), make_tokenizer(), lora=plan.lora)
    sampler.engine.close()
    expected = merged_of(str(base), adapter).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sampler.model.state_dict().items())
    with pytest.raises(ConfigError, match=r"model.path=.* is given, but model.lora.path=.* add model.lora=null"):
        plan_serving(str(tmp_path / "run.yaml"), overrides=[f"model.path={base}"])
    assert plan_serving(str(tmp_path / "run.yaml"), overrides=[f"model.path={base}", "model.lora=null"]).lora is None


def test_an_adapter_is_not_trained_further_on_another_model(tmp_path: Path) -> None:
    path, base, other = saved_adapter(tmp_path) / "model", tmp_path / "base", save_model(tmp_path / "other")
    lora = [f"model.lora={{rank: 3, alpha: 6, path: {path}}}"]

    def start(model_path: Path) -> None:
        config = load_config(None, [f"model.path={model_path}", *lora])
        model = load_causal_lm(str(model_path), device=CPU, dtype=torch.float32)
        build_learner(config, model, gang=Gang.alone(), adapter=build_adapter(config, model, device=CPU))
        load_sampler(
            config.model, config.rollout, str(model_path), make_tokenizer(), lora=config.model.lora
        ).engine.close()

    start(base)
    start(other)  # the same weights in another place
    change_weights(other, _reversed)
    words = "model.lora.path=.* is an adapter that was not trained on the weights in .*other: .*, or set model.path to the model of the adapter"
    with pytest.raises(ModelFilesError, match=words):
        start(other)
    config = load_config(None, [f"model.path={other}", *lora])
    with pytest.raises(ModelFilesError, match=words):
        load_sampler(config.model, config.rollout, str(other), make_tokenizer(), lora=config.model.lora)
    change_weights(other, _reversed)  # as it was
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'))
    with pytest.raises(
        ModelFilesError, match="whose config.json differs from the one in .*other .rms_norm_eps: 1e-06 -> 0.001"
    ):
        start(other)


# The run file


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora.rank=0"], "model.lora.rank"),
        (
            ["model.lora.targets=[lm_head]"],
            r"model.lora.targets: 'lm_head' cannot have an adapter; write all_linear, or a list",
        ),
        (["model.lora.targets=q_proj"], r"model.lora.targets: 'q_proj' is a string; write a list: \[q_proj\]$"),
        (["model.lora.targets='q_proj, v_proj'"], r"is a string; write a list: \[q_proj, v_proj\]$"),
        (["model.lora.rank=513", "rollout.engine=vllm"], r"model.lora.rank=513 is more than vLLM allows \(512\)"),
        (["model.lora.targets=[]"], "nothing to train"),
        (["model.lora.targets=[q_proj,q_proj]"], "q_proj twice"),
        (["model.lora.rank=8", "algorithm.name=ppo"], "critic"),
        (["model.lora.path=~nobody-of-this-name/x"], "model.lora.path: .* home directory of an unknown user"),
    ],
)
def test_a_lora_section_that_cannot_work_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


def test_a_run_is_not_the_model_of_an_adapter_but_its_checkpoint_is(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000003"
    save_model(checkpoint / "model")
    (checkpoint / "manifest.json").write_text('{"step": 3, "files": {}}')
    for path in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(ConfigError, match=f"write model.path={checkpoint}, or a directory"):
            refuse_changing_base(load_config(None, [f"model.path={path}", "model.lora.rank=4"]))
        refuse_changing_base(load_config(None, [f"model.path={path}"]))
    for path in (checkpoint, checkpoint / "model"):
        config = load_config(None, [f"model.path={path}", "model.lora.rank=4"])
        refuse_changing_base(config)
        adapter = build_adapter(config, trainable(), device=CPU)
        assert adapter is not None and adapter.base == str(checkpoint / "model"), "peft opens it"


@pytest.mark.parametrize("key", ["model.path", "run.dir"])
def test_a_home_of_nobody_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .* home directory of an unknown user; write the full path"):
        load_config(None, [f"{key}=~nobody-of-this-name/x"])


def test_the_plan_counts_the_adapter_alone() -> None:
    for name, lora in (("qwen2-tied", ALL), ("llama-bias", SOME), ("qwen3-untied", ALL)):
        model = trainable(name)
        sizes = ModelSizes.of(model.config.to_dict(), where=name)
        own = sum(tensor.numel() for tensor in make_adapter(model, lora).named_tensors().values())
        assert sizes.adapter_parameters(lora) == own
    common: dict[str, Any] = dict(
        sizes=sizes, width=2, num_parameters=own, gradient_width=2, has_head=True, compiled=True
    )
    assert Passes(**common, frozen=True).peak(64) < Passes(**common).peak(64), "embeddings and head have no gradient"


def test_targets_are_named_in_the_order_of_a_layer() -> None:
    assert load_config(None, ["model.lora.targets=all-linear"]).model.lora.modules[-1] == "down_proj"  # type: ignore[union-attr]
    assert LoraSection(targets=["v_proj", "q_proj"]).modules == ("q_proj", "v_proj")
    assert copy.copy(SOME).gain == 1.5
