"""A model directory's config.json: sizes that no model has are refused before anything is built by them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tiny import save_model
from transformers import PreTrainedTokenizerFast

from rollcall.base.errors import ModelFilesError, SizesUnknown
from rollcall.model.files import check_model_dir
from rollcall.model.load import load_tokenizer
from rollcall.plan.memory import read_sizes

SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip


def a_dir(folder: Path, *, weights: int = 1 << 20, text: str | None = None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**SIZES, **changes}) if text is None else text)
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 1_000_000},
            "num_hidden_layers=1000000 is not valid: it must be a whole number from 1 to 1000",
        ),
        ({"hidden_size": -64}, "hidden_size=-64 is not valid"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not valid"),
        ({"vocab_size": "100"}, "vocab_size='100' is not valid"),
        ({"vocab_size": 1.5}, "vocab_size=1.5 is not valid"),
        ({"head_dim": True}, "head_dim=True is not valid"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a finite number"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_parameters.rope_theta=inf is not a finite number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1 is not valid: it must be a number from 0 to 1;"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300 is not valid"),
        ({"rope_theta": 0}, "rope_theta=0 is not valid: it must be a number from 1 to"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope_scaling.factor=0 is not valid"),
        ({"text_config": {"rope_theta": "10000"}}, "text_config.rope_theta='10000' is not valid"),
        ({"eos_token_id": [1, 1_000_000_000]}, r"=1000000000 is not one of the model's 100 tokens \(vocab_size\)"),
        ({"eos_token_id": -1}, "eos_token_id=-1 is not one of"),
        (
            {"vocab_size": 10_000_000},
            "describes a model with more than 640,032,768 weights, .* have only 1,048,576 bytes",
        ),
        ({"text": "{"}, "cannot be read: Expecting"),
        ({"text": "[]"}, "it contains a list, not a map"),
        ({"text": "[" * 100_000}, "cannot be read: maximum recursion depth"),
        ({"text": '{"a": ' * 60 + "1" + "}" * 60}, "more than 50 levels deep"),
    ],
)
def test_a_config_that_is_no_models_is_refused_by_file_and_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFilesError, match=message) as refused:
        check_model_dir(a_dir(tmp_path, **changes))
    assert "config.json" in str(refused.value)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFilesError, match="config.json cannot be read: it is a pipe or a device"):
        check_model_dir(tmp_path)


def test_whole_directories_pass(tmp_path: Path) -> None:
    check_model_dir(a_dir(tmp_path, head_dim=None, sliding_window=None))
    check_model_dir(save_model(tmp_path / "saved"))


def test_weights_that_are_a_pipe_are_refused_before_anyone_waits_for_them(tmp_path: Path) -> None:
    path = save_model(tmp_path / "saved")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is not a regular file"):
        check_model_dir(path)


def test_loading_and_planning_refuse_alike(tmp_path: Path) -> None:
    path = a_dir(tmp_path, num_hidden_layers=-1)
    with pytest.raises(ModelFilesError, match="model.path=.*num_hidden_layers=-1"):
        load_tokenizer(str(path), chat_template=None)
    with pytest.raises(SizesUnknown, match="num_hidden_layers=-1"):
        read_sizes(str(path))


def with_huge_ids(path: Path) -> Path:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: id + 4_000_000_000 for token, id in vocabulary.items()}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_a_tokenizer_with_a_token_id_that_no_model_has_is_refused_at_once(tmp_path: Path) -> None:
    path = with_huge_ids(save_model(tmp_path))
    with pytest.raises(ModelFilesError, match=r"tokenizer.json contains the token id 4,000,.*; copy the model again"):
        load_tokenizer(str(path), chat_template=None)


def test_so_is_one_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, commit = tmp_path / "models--someone--huge-ids", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    with_huge_ids(save_model(cache / "snapshots" / commit))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFilesError, match=r"tokenizer.json contains the token id 4,000,.*; copy the model again"):
        load_tokenizer("someone/huge-ids", chat_template=None)


def test_so_is_one_whose_ids_come_from_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", lambda self: {"a": 2**31})
    with pytest.raises(ModelFilesError, match="the tokenizer of .* contains the token id 2,147,483,648"):
        load_tokenizer(str(save_model(tmp_path)), chat_template=None)
