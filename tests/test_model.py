"""Loading models: weights that are not those of the config, weights that have diverged, and code that comes along."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_model

from rollcall.base.errors import ModelFilesError
from rollcall.checkpoint.merge.merge import merge
from rollcall.model.load import (
    load_causal_lm,
    load_tokenizer,
    loading,
    non_finite_of,
    open_unread,
    outline_causal_lm,
)

CPU = torch.device("cpu")


def stored(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The model directory with other tensors in its file."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def configured(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    fields.pop("layer_types", None)
    file.write_text(json.dumps(fields))
    return path


def load(path: Path) -> Any:
    return load_causal_lm(str(path), device=CPU, dtype=torch.float32)


def rename_all(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"other.{name}"] = tensors.pop(name)


def test_weights_under_other_names_are_refused(tmp_path: Path) -> None:
    path = stored(save_model(tmp_path), rename_all)
    with pytest.raises(
        ModelFilesError, match=r"27 tensors are missing \(lm_head\.weight, model\.embed_tokens\.weight, .*26 ten"
    ):
        load(path)


def test_more_layers_than_are_stored_are_refused(tmp_path: Path) -> None:
    path = configured(save_model(tmp_path), num_hidden_layers=5)
    with pytest.raises(
        ModelFilesError, match=r"36 tensors are missing \(model\.layers\.2\.input_layernorm\.weight, .*\.\.\.\)"
    ):
        load(path)


def test_fewer_layers_than_are_stored_are_refused(tmp_path: Path) -> None:
    path = configured(save_model(tmp_path), num_hidden_layers=1)
    with pytest.raises(
        ModelFilesError, match=r"12 tensors are not part of the model.*model\.layers\.1\.input_layernorm\.weight"
    ):
        load(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = stored(save_model(tmp_path), lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(
        ModelFilesError, match=r"1 tensor is of a different shape \(model\.norm\.weight is \[7\], not \[64\]\)"
    ):
        load(path)


def test_a_head_that_should_be_there_is_refused_and_a_tied_one_is_not(tmp_path: Path) -> None:
    untied = stored(save_model(tmp_path / "untied", "qwen2-untied"), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelFilesError, match=r"1 tensor is missing \(lm_head\.weight\)"):
        load(untied)
    tied = save_model(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load(tied)


def test_weights_that_have_diverged_are_refused(tmp_path: Path) -> None:
    path = stored(save_model(tmp_path), lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ModelFilesError, match=r"1 tensor is not finite \(model\.norm\.weight\)"):
        load(path)


def test_what_is_not_finite_in_the_dtype_is_named() -> None:
    tensors = {
        "fine": torch.tensor([-3e38, 3e38]),
        "nan": torch.tensor([0.0, float("nan"), 1.0]),
        "infinite": torch.tensor([-float("inf")]),
        "empty": torch.empty(0),
        "too large in half": torch.tensor([3.4e38]),
    }
    assert non_finite_of(tensors, dtype=torch.float32) == ["nan", "infinite"]
    assert non_finite_of(tensors, dtype=torch.bfloat16) == ["nan", "infinite", "too large in half"]
    assert non_finite_of({}, dtype=torch.float32) == []


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A model directory of an architecture of its own, whose code leaves a mark when it runs."""
    path = save_model(tmp_path / "model")
    for name in ("config", "tokenizer_config"):
        (path / f"{name}.json").write_text(
            json.dumps(
                {
                    **json.loads((path / f"{name}.json").read_text()),
                    "model_type": "home_made",
                    "tokenizer_class": "HomeMadeTokenizer",
                    "auto_map": {
                        "AutoConfig": "configuration_home.HomeMadeConfig",
                        "AutoModelForCausalLM": "modeling_home.HomeMade",
                        "AutoTokenizer": ["tokenization_home.HomeMadeTokenizer", None],
                    },
                }
            )
        )
    for name in ("configuration_home", "modeling_home", "tokenization_home"):
        (path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    return path


def test_code_that_comes_with_a_model_is_refused_without_a_question(
    with_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    path = str(with_code)
    for attempt in (
        lambda: load_causal_lm(path, device=CPU, dtype=torch.float32),
        lambda: outline_causal_lm(path, dtype=torch.float32),
        lambda: load_tokenizer(path, chat_template=None),
    ):
        with pytest.raises(ModelFilesError, match=r"configuration_home\.py.*model\.trust_remote_code=true"):
            attempt()
    assert not (with_code.parent / "mark").exists()


def test_code_that_comes_with_a_model_runs_where_that_is_allowed(with_code: Path) -> None:
    with pytest.raises(ModelFilesError):  # the code is run, and defines nothing
        load_causal_lm(str(with_code), device=CPU, dtype=torch.float32, trust_remote_code=True)
    assert (with_code.parent / "mark").exists()


def test_threads_load_one_after_the_other() -> None:
    entered = threading.Event()

    def load() -> None:
        with loading("model.path=m"):
            entered.set()

    thread = threading.Thread(target=load)
    with loading("model.path=m"):
        thread.start()
        assert not entered.wait(0.1)
    thread.join()
    assert entered.is_set()


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "safetensors") for kind in ("int8", "int64", "bool", "complex64")),
        ("int8", "bin"),
        ("int8", "checkpoint"),
    ],
)
def test_weights_that_are_no_floating_point_numbers_are_refused_by_name_wherever_they_are_read(
    tmp_path: Path, kind: str, form: str
) -> None:
    path, name = save_model(tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    outline = outline_causal_lm(str(path), dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name].to(getattr(torch, kind))
    (path / "model.safetensors").unlink()
    if form == "bin":
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / ("model.safetensors" if form == "safetensors" else "part-0-of-1.safetensors"))
    words = f"model.path=.* stores {name} as {kind}; weights must be floating-point numbers: save the model in float32"
    with pytest.raises(ValueError, match=words):
        load_causal_lm(str(path), device=CPU, dtype=torch.float32)
    if form != "bin":
        with pytest.raises(ValueError, match=words):  # each process reads its part
            open_unread(str(path), outline)
        with pytest.raises(ValueError, match=words.removeprefix("model.path=")):
            merge(path, tmp_path / "out")
