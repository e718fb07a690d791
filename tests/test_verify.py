"""A directory that is the trained model passes verify; every wrong one is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learners import learner_of, step
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer, save_model

from rollcall.base.errors import CheckpointError, ModelFilesError
from rollcall.checkpoint.export import export_model
from rollcall.checkpoint.probe import read_probe
from rollcall.checkpoint.training import export_learner
from rollcall.checkpoint.verify import VERIFIED, VerifyError, mark_of, verify, why_not_verified
from rollcall.learner.gang import Gang
from rollcall.model.stored.find import PROBE
from rollcall.model.stored.tensors import StoredError

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    learner = learner_of(Gang.alone())
    export_learner(learner, make_tokenizer(), folder / "before")
    step(learner, 1)
    export_learner(learner, make_tokenizer(), folder / "model")
    narrow = copy.deepcopy(learner.model).to(torch.bfloat16)
    export_model(narrow, make_tokenizer(), folder / "bfloat16")
    return folder


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "model", tmp_path / "model"))


def changed(model: Path, change: Callable[[Tensors], object]) -> Path:
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def test_the_trained_model_passes_and_counts_as_verified_until_a_file_changes(model: Path) -> None:
    assert why_not_verified(model) == "it was not verified"
    result = verify(model)
    assert result.difference < result.tolerance / 4 and result.num_tokens > 50
    assert "differ from the trained model's by at most" in result.words and "compared in float32" in result.words
    assert why_not_verified(model) == ""
    (model / "README.md").write_text("a card")
    assert why_not_verified(model) == "README.md is new since it was verified"
    (model / "README.md").unlink()
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert why_not_verified(model) == "config.json has changed since it was verified"
    config.unlink()
    assert why_not_verified(model) == "config.json is gone since it was verified"
    (model / VERIFIED).write_text("[]")
    assert why_not_verified(model) == "it was not verified"


def test_the_weights_of_another_step_are_refused(trained: Path, model: Path) -> None:
    with pytest.raises(VerifyError, match="is not the model that was trained: the log-probs of 100 tokens differ"):
        verify(trained / "before", model / PROBE)
    assert why_not_verified(trained / "before") == "it was not verified"


@pytest.mark.slow
def test_every_tensor_matters(model: Path) -> None:
    for name, whole in load_file(model / "model.safetensors").items():
        if "layers.0" in name:  # as in the other layer
            continue
        changed(model, lambda tensors, name=name: tensors[name].zero_())
        with pytest.raises(VerifyError, match="is not the model that was trained"):
            verify(model)
        changed(model, lambda tensors, name=name, whole=whole: tensors[name].copy_(whole))
    verify(model)


def swap(tensors: Tensors) -> None:
    tensors[LAYER.format(0)], tensors[LAYER.format(1)] = tensors[LAYER.format(1)], tensors[LAYER.format(0)]


def round_all(tensors: Tensors) -> None:
    tensors.update({name: tensor.bfloat16().float() for name, tensor in tensors.items()})


def diverge(tensors: Tensors) -> None:
    tensors["model.norm.weight"][0] = float("nan")


@pytest.mark.parametrize("change", [swap, round_all, diverge])
def test_swapped_rounded_and_diverged_weights_are_refused(model: Path, change: Callable[[Tensors], None]) -> None:
    with pytest.raises(VerifyError, match="is not the model that was trained"):
        verify(changed(model, change))


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda file: edit(file, eos_token_id=5)),
        ("generation_config.json", lambda file: edit(file, eos_token_id=5)),
        ("tokenizer.json", lambda file: file.write_text(file.read_text().replace('"7"', '"?"'))),
        ("chat_template.jinja", lambda file: file.write_text("{{ messages }}")),
    ],
)
def test_what_no_logprob_shows_is_refused_by_the_name_of_the_file(
    model: Path, name: str, change: Callable[[Path], None]
) -> None:
    before = (model / name).read_bytes() if (model / name).exists() else b""
    change(model / name)
    assert (model / name).read_bytes() != before
    with pytest.raises(
        VerifyError, match=rf"is not the model that was trained: {name} has changed since the run saved it"
    ):
        verify(model)
    assert why_not_verified(model) == "it was not verified"


def test_what_may_differ_beside_the_weights_passes(model: Path) -> None:
    edit(model / "generation_config.json", temperature=0.5)
    edit(model / "config.json", _name_or_path="a/name", transformers_version="0")
    (model / "README.md").write_text("a card")
    verify(model)
    edit(model / PROBE, beside={})  # as an earlier version left it
    edit(model / "config.json", eos_token_id=5)
    verify(model)


def test_another_precision_passes_only_when_it_was_asked_for(trained: Path, model: Path) -> None:
    with pytest.raises(VerifyError, match=r"in bfloat16, but it was trained in float32.*--dtype bfloat16 --verify"):
        verify(trained / "bfloat16", model / PROBE)
    with pytest.raises(VerifyError, match="in float32, but it was supposed to be stored in bfloat16"):
        verify(model, dtype="bfloat16")
    result = verify(trained / "bfloat16", model / PROBE, dtype="bfloat16")
    assert 1e-4 < result.difference < result.tolerance and "stored in bfloat16" in result.words
    assert why_not_verified(trained / "bfloat16") == ""
    round_trip = Path(shutil.copytree(trained / "bfloat16", model.parent / "zeroed"))
    with pytest.raises(VerifyError, match="is not the model that was trained"):
        verify(changed(round_trip, lambda tensors: tensors[LAYER.format(1)].zero_()), dtype="bfloat16")


def test_directories_that_do_not_open_are_refused(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", vocab_size=50)
    with pytest.raises(CheckpointError, match=r"probe.json does not exist"):
        verify(other)
    with pytest.raises(VerifyError, match="is not the model that was trained"):
        verify(other, model / PROBE)
    small = save_model(tmp_path / "small", vocab_size=40, intermediate_size=32)
    with pytest.raises(VerifyError, match="is not the model that was trained"):
        verify(small, model / PROBE)
    with pytest.raises(ModelFilesError, match=r"1 tensor is missing \(model.norm.weight\)"):
        verify(changed(small, lambda tensors: tensors.pop("model.norm.weight")), model / PROBE)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFilesError, match="cannot be loaded"):
        verify(model)
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(VerifyError, match="it has no tokenizer"):
        verify(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(StoredError):
        verify(model)


def test_code_that_comes_with_a_model_is_not_run(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own_code.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own_code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(VerifyError, match="needs to run code from its own files"):
        verify(model)


def test_a_trained_model_that_computed_nan_cannot_be_verified(model: Path) -> None:
    probe = json.loads((model / PROBE).read_text())
    probe["logprobs"][0][0] = None
    (model / PROBE).write_text(json.dumps(probe))
    with pytest.raises(VerifyError, match="not finite"):
        verify(model)


def test_a_pipe_in_place_of_a_small_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in (VERIFIED, PROBE):
        os.mkfifo(tmp_path / name)
    assert mark_of(tmp_path) is None
    with pytest.raises(CheckpointError, match="pipe or a device"):
        read_probe(tmp_path / PROBE)
