"""Checkpoints are whole or not there; an exported directory opens in transformers and gives the same logits."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import small_disk, unmount
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rollcall.base.errors import CheckpointError
from rollcall.checkpoint.export import export_model
from rollcall.checkpoint.store import CheckpointStore
from rollcall.observe.headline import ACCURACY, REWARD


def make_store(dir: Path, *, keep_last: int = 2, keep_best: int = 1) -> CheckpointStore:
    return CheckpointStore(dir, keep_last=keep_last, keep_best=keep_best)


def writer(text: str = "weights") -> Callable[[Path], None]:
    def write(dir: Path) -> None:
        (dir / "model.bin").write_text(text)
        (dir / "optimizer").mkdir()
        (dir / "optimizer" / "rank-0.bin").write_text(text * 3)

    return write


def save(store: CheckpointStore, step: int, *, text: str = "weights", score: float | None = None, **state: Any) -> Path:
    return store.save(step, write=writer(text), state={"draw": step * 48, **state}, score=score)


def names(dir: Path) -> list[str]:
    return sorted(path.name for path in dir.iterdir())


def test_a_saved_checkpoint_comes_back_with_files_state_and_score(tmp_path: Path) -> None:
    path = save(make_store(tmp_path), 20, score=0.5, rng=[1, 2])
    assert path == tmp_path / "step-000020"
    latest = make_store(tmp_path).latest()
    assert latest is not None
    assert (latest.path, latest.step, latest.score) == (path, 20, 0.5)
    assert latest.state == {"draw": 960, "rng": [1, 2]}
    assert (latest.path / "optimizer" / "rank-0.bin").read_text() == "weights" * 3
    assert names(tmp_path) == ["step-000020"]


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert make_store(tmp_path / "absent").latest() is None


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((10, 0.2), (20, 0.9), (30, 0.3), (40, None), (50, float("nan"))):
        save(store, step, score=score)
    assert names(tmp_path) == ["step-000020", "step-000040", "step-000050"]


def test_the_best_are_those_by_the_number_that_ranks_at_the_time(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1, keep_best=1)
    for step, accuracy, reward, best_by in (
        (1, 0.0, 0.4, ACCURACY),
        (2, 0.5, 0.5, ACCURACY),
        (3, 0.2, 0.9, REWARD),
        (4, 0.1, 0.3, REWARD),
    ):
        scores = {ACCURACY.metric: accuracy, REWARD.metric: reward}
        store.save(
            step, write=writer("x"), state={}, score=scores[best_by.metric], scores=scores, best_by=best_by.metric
        )
    assert [path.name for path in sorted(store.dir.iterdir())] == ["step-000003", "step-000004"]


def test_of_equal_scores_the_newer_is_best_and_none_is_kept_without_keep_best(tmp_path: Path) -> None:
    for folder, keep_best, kept in (("a", 1, ["step-000002", "step-000003"]), ("b", 0, ["step-000003"])):
        store = make_store(tmp_path / folder, keep_last=1, keep_best=keep_best)
        for step, score in ((1, 0.5), (2, 0.5), (3, 0.1)):
            save(store, step, score=score)
        assert names(tmp_path / folder) == kept


def damage_missing(path: Path) -> None:
    (path / "model.bin").unlink()


def damage_size(path: Path) -> None:
    (path / "optimizer" / "rank-0.bin").write_text("short")


def damage_bit(path: Path) -> None:
    (path / "model.bin").write_text("weightz")


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_folder_in_place_of_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()


def damage_half_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text()[:40])


def test_what_killed_saves_left_is_removed_files_and_folders(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=0)
    (tmp_path / ".tmp-node-folder-12345678").touch()
    (tmp_path / ".tmp-step-000001-12345678" / "model").mkdir(parents=True)
    store.clean()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_missing, "model.bin does not exist on this machine"),
        (damage_size, "rank-0.bin has 5 bytes instead of 21"),
        (damage_bit, "model.bin differs"),
        (damage_manifest, "manifest.json does not exist"),
        (damage_folder_in_place_of_manifest, "manifest.json cannot be read (IsADirectoryError"),
        (damage_half_manifest, "manifest.json cannot be read"),
    ],
)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    store = make_store(tmp_path)
    save(store, 10)
    damage(save(store, 20))
    with caplog.at_level(logging.WARNING):
        again = make_store(tmp_path)
        latest = again.latest()
        again.latest()
    assert latest is not None and latest.step == 10
    assert caplog.text.count("is torn") == 1 and reason in caplog.text, "told once, however often a run looks"


def test_torn_checkpoints_do_not_crowd_out_a_valid_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1, keep_best=0)
    save(store, 10)
    damage_bit(save(make_store(tmp_path, keep_last=9), 40))
    save(store, 30)
    latest = store.latest()
    assert latest is not None and latest.step == 30


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 10, text="first")
    save(store, 10, text="second")
    latest = store.latest()
    assert latest is not None and (latest.path / "model.bin").read_text() == "second"
    assert names(tmp_path) == ["step-000010"]


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 10)
    (tmp_path / "step-000010").rename(tmp_path / ".old-step-000010")
    latest = make_store(tmp_path).latest()
    assert latest is not None and latest.step == 10
    make_store(tmp_path).clean()
    assert names(tmp_path) == ["step-000010"]


KILLED = """
import os, signal, sys
from pathlib import Path
from rollcall.checkpoint.store import CheckpointStore
def write(dir):
    (dir / "model.bin").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best=0).save(20, write=write, state={}, score=None)
"""


def test_a_save_that_was_killed_leaves_the_previous_checkpoint_and_is_cleaned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_store(tmp_path), 10)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    staging, whole = names(tmp_path)
    assert staging.startswith(".tmp-step-000020-") and whole == "step-000010"
    store = make_store(tmp_path)
    latest = store.latest()
    assert latest is not None and latest.step == 10
    assert staging in names(tmp_path)  # a reader removes nothing
    with caplog.at_level(logging.WARNING):
        store.clean()
    assert names(tmp_path) == ["step-000010"] and staging in caplog.text
    save(store, 20)
    assert names(tmp_path) == ["step-000010", "step-000020"]


def test_what_a_lost_worker_writes_after_a_failed_save_is_removed_by_the_next(tmp_path: Path) -> None:
    """Of the same process: a gang that is rebuilt saves to the same store."""
    store, begun = make_store(tmp_path), []
    save(store, 2)

    def lose_a_worker(dir: Path) -> None:
        begun.append(dir)
        raise RuntimeError("rank 3 is lost")

    with pytest.raises(RuntimeError, match="rank 3 is lost"):
        store.save(4, write=lose_a_worker, state={}, score=None)
    begun[0].mkdir()
    (begun[0] / "actor.pt").write_bytes(b"late")
    save(store, 4)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def write_big(dir: Path) -> None:
    (dir / "model.bin").write_bytes(bytes(600_000))


def write_big_with_torch(dir: Path) -> None:
    torch.save(torch.zeros(150_000), dir / "model.pt")


@pytest.mark.parametrize("write", [write_big, write_big_with_torch])
def test_a_full_disk_is_named_and_earlier_checkpoints_stay(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.base.patience.DEADLINE_S", 0)
    disk = small_disk(tmp_path / "disk", size="1000k")
    try:
        store = make_store(disk / "checkpoints")
        store.save(10, write=write, state={}, score=None)
        with pytest.raises(
            CheckpointError, match=r"step-000020: cannot write the checkpoint.*No space left.*free space"
        ):
            store.save(20, write=write, state={}, score=None)
        assert names(disk / "checkpoints") == ["step-000010"]
        latest = store.latest()
        assert latest is not None and latest.step == 10
    finally:
        unmount(disk)


def test_a_full_disk_that_a_serialiser_reports_in_its_own_words_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.base.patience.DEADLINE_S", 0)

    def write(dir: Path) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match="No space left on device"):
        make_store(tmp_path).save(1, write=write, state={}, score=None)
    assert names(tmp_path) == []


def test_a_writer_that_fails_keeps_its_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    def write(dir: Path) -> None:
        (dir / "x").write_text("x")
        raise KeyError("no such parameter")

    store = make_store(tmp_path)
    with pytest.raises(KeyError, match="no such parameter"):
        store.save(1, write=write, state={}, score=None)
    with pytest.raises(KeyboardInterrupt):
        store.save(1, write=lambda dir: (_ for _ in ()).throw(KeyboardInterrupt()), state={}, score=None)
    assert names(tmp_path) == []


# Export

TEXT = "12 + 7 = 19\n  Is it?"


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "<|pad|>", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return fast


def tiny_sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip


def make_qwen2(tokenizer: PreTrainedTokenizerFast) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**tiny_sizes(tokenizer), tie_word_embeddings=True)).eval()  # type: ignore[arg-type]


def make_llama(tokenizer: PreTrainedTokenizerFast) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**tiny_sizes(tokenizer), tie_word_embeddings=False)).eval()  # type: ignore[arg-type]


def fuse(model: Any) -> None:
    """Make q/k/v and gate/up views of one tensor each, as an engine that multiplies them at once wants them."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for linears in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (layer.mlp.gate_proj, layer.mlp.up_proj),
        ):
            for name in ("weight", "bias"):
                if getattr(linears[0], name) is None:
                    continue
                fused, start = torch.cat([getattr(linear, name).data for linear in linears]), 0
                for linear in linears:
                    parameter = getattr(linear, name)
                    parameter.data = fused.narrow(0, start, len(parameter))
                    start += len(parameter)


def logits(model: Any, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokenizer.encode(TEXT)])).logits


@pytest.mark.parametrize("make_model", [make_qwen2, make_llama])
@pytest.mark.parametrize("fused", [False, True])
def test_an_exported_model_opens_in_transformers_with_the_same_logits(
    tmp_path: Path, make_model: Callable[..., Any], fused: bool
) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    expected = logits(model, tokenizer)
    if fused:
        fuse(model)
        q, k = (model.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.k_proj.weight)
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    for _ in range(2):  # the second time from a model that from_pretrained made
        out = export_model(model, tokenizer, tmp_path / "model")
        loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        model, info = loaded
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert model.dtype == torch.float32
        assert torch.equal(logits(model.eval(), tokenizer), expected)
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("make_model", [make_qwen2, make_llama])
def test_the_exported_tokenizer_keeps_text_and_chat_template(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    out = export_model(make_model(tokenizer), tokenizer, tmp_path / "model")
    back = AutoTokenizer.from_pretrained(out)
    assert back.encode(TEXT) == tokenizer.encode(TEXT)
    assert back.decode(back.encode(TEXT)) == TEXT
    chat = [{"role": "user", "content": "hi"}]
    assert back.apply_chat_template(chat, tokenize=False) == "user: hi\n"


def test_generation_stops_at_the_tokenizers_end_and_at_special_tokens_only(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for given, wanted in ((2, end), (None, end), ([end, pad], [end, pad]), ([7, pad], [end, pad])):
        model = make_llama(tokenizer)
        model.generation_config.eos_token_id = given
        out = export_model(model, tokenizer, tmp_path / "model")
        generation = json.loads((out / "generation_config.json").read_text())
        assert (generation["eos_token_id"], generation["pad_token_id"]) == (wanted, pad)
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == wanted


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    out = export_model(make_qwen2(tokenizer), tokenizer, tmp_path / "model")
    stored = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in stored and "model.embed_tokens.weight" in stored
    back = AutoModelForCausalLM.from_pretrained(out)
    assert back.lm_head.weight.data_ptr() == back.model.embed_tokens.weight.data_ptr()


def test_a_model_tied_by_hand_but_not_in_its_config_keeps_both_tensors(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_llama(tokenizer)
    model.lm_head.weight = model.model.embed_tokens.weight
    out = export_model(model, tokenizer, tmp_path / "model")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out), tokenizer), logits(model, tokenizer))


def test_exporting_again_replaces_a_model_but_never_another_folder(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_llama(tokenizer)
    out = export_model(model, tokenizer, tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    export_model(model, tokenizer, out)
    assert not AutoModelForCausalLM.from_pretrained(out).lm_head.weight.any()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("")
    with pytest.raises(ValueError, match="photos .*not a model directory"):
        export_model(model, tokenizer, tmp_path / "photos")
    assert names(tmp_path / "photos") == ["cat.png"]
