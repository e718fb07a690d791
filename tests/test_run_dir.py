"""What a run directory is to the next start: a failed start leaves none, a finished run says so, an old one makes room."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import column, finish, letter_rows, make_run
from safetensors.torch import save_file

from rollcall.base.errors import CheckpointError, ConfigError, WorkerDiedError
from rollcall.checkpoint.exported import exported_model
from rollcall.checkpoint.run_dir import GIB, checkpoint_bytes, size_words
from rollcall.checkpoint.store import CheckpointStore
from rollcall.loop.record import Record
from rollcall.model.stored.find import PROBE
from rollcall.observe.console import Console
from rollcall.plan.memory import read_sizes
from rollcall.run import training
from rollcall.run.api import read_config
from rollcall.run.evaluation import newest_model_of
from rollcall.run.training import train
from rollcall.view.audit import audit


def test_a_start_without_its_logger_leaves_nothing_and_the_next_one_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = make_run(tmp_path, "trainer.loggers=[wandb]", "trainer.steps=1")
    with pytest.raises(ValueError, match="pip install wandb"):
        finish(config)
    assert not config.run.dir.exists()


def test_a_start_that_fails_after_the_directory_was_made_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("wandb could not start")

    config = make_run(tmp_path, "trainer.steps=1")
    with monkeypatch.context() as patch:
        patch.setattr("rollcall.run.training.make_sinks", fail)
        with pytest.raises(ValueError, match="could not start"):
            finish(config)
        assert not config.run.dir.exists()
        config.run.dir.mkdir()
        (config.run.dir / "run.yaml").write_text(json.dumps({"run": {"seed": 99}}))  # of a start that was killed there
        with pytest.raises(ValueError, match="could not start"):
            finish(config)
    assert finish(config)["steps"] == 1, "a start before which nothing was trained is no other run"


@pytest.mark.slow
def test_fresh_says_where_the_old_run_went_and_puts_it_back_if_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path, "trainer.steps=1")
    finish(config)
    mark = config.run.dir / "mark"
    mark.touch()
    broken = make_run(tmp_path, "trainer.steps=1", "model.path=/no/such/model")
    with pytest.raises(ValueError, match="/no/such/model"):
        train(broken, fresh=True, quiet=True)
    assert mark.exists()
    train(config, fresh=True)
    assert f"the run that was in {config.run.dir} is now in {config.run.dir}.old-1" in capsys.readouterr().out
    assert not mark.exists() and Path(f"{config.run.dir}.old-1/mark").exists()


def test_a_finished_run_says_so_and_how_to_extend_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_run(tmp_path, "trainer.steps=2", "trainer.eval_every=1", val=letter_rows(4))
    first = finish(config)
    before = {path: path.stat().st_mtime_ns for path in config.run.dir.rglob("*")}
    assert train(config) == first
    said = capsys.readouterr().out
    assert "is finished: all 2 steps are trained, held-out" in said
    assert f"rollcall train {config.run.dir} trainer.steps=4" in said
    assert {path: path.stat().st_mtime_ns for path in config.run.dir.rglob("*")} == before
    assert finish(make_run(tmp_path, "trainer.steps=3", "trainer.eval_every=1", val=letter_rows(4)))["steps"] == 3


def test_the_model_stays_the_newest_when_parts_are_gathered_into_its_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, keep_best=0)
    store.save(2, write=lambda folder: None, state={}, score=None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    save_file({"w": torch.zeros(2)}, tmp_path / "model/model.safetensors")
    last = store.latest()
    assert last is not None
    (last.path / ".gather").mkdir()
    later = (tmp_path / "model").stat().st_mtime + 10
    os.utime(last.path, (later, later))
    assert exported_model(tmp_path, last=last) == tmp_path / "model"
    os.utime(last.path / "manifest.json", (later, later))
    assert exported_model(tmp_path, last=last) is None


def test_a_model_that_was_cut_off_is_written_again_and_leftovers_of_a_killed_write_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_run(tmp_path, "trainer.steps=2")
    finish(config)
    weights = config.run.dir / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    names = (".tmp-summary.json-1", "checkpoints/.trash-step-000001", "samples/.tmp-x", "token_scores/.tmp-x")
    left = [config.run.dir / name for name in names]
    for path in left:
        path.mkdir(parents=True)
    assert newest_model_of(config)[1] == "checkpoint of step 2"
    assert {torn.path for torn in audit(config.run.dir).torn} >= set(left)
    finish(config)
    assert weights.read_bytes() == whole and "is not a complete safetensors file" in caplog.text
    assert not any(path.exists() for path in left) and audit(config.run.dir).is_clean
    weights.unlink()
    shutil.rmtree(config.run.dir / "checkpoints")
    with pytest.raises(CheckpointError, match="has no tensors; use a directory with a model's weights"):
        newest_model_of(config)


@pytest.mark.slow
def test_a_model_whose_files_beside_the_weights_are_damaged_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_run(tmp_path, "trainer.steps=1", "model.lora.rank=2")
    finish(config)
    model = config.run.dir / "model"
    whole = {path.name: path.read_bytes() for path in model.iterdir()}
    for name in ("adapter_config.json", "config.json", "tokenizer.json", PROBE):
        (model / name).write_bytes(whole[name][:-2])
        assert newest_model_of(config)[1] == "checkpoint of step 1"
        assert f"{name} is not a complete JSON file" in caplog.text
        (model / name).write_bytes(whole[name])
        assert newest_model_of(config)[1] == "trained model"
    for name in ("adapter_config.json", "config.json", "tokenizer.json"):
        (model / name).unlink()
        assert newest_model_of(config)[1] == "checkpoint of step 1"
        finish(config)
        assert (model / name).read_bytes() == whole[name]
    changed = json.loads(whole["adapter_config.json"]) | {"base_model_name_or_path": "elsewhere"}
    (model / "adapter_config.json").write_text(json.dumps(changed))
    assert newest_model_of(config)[1] == "trained model", "somebody has moved its model"


def test_another_seed_is_still_refused_where_a_run_has_begun(tmp_path: Path) -> None:
    finish(make_run(tmp_path, "trainer.steps=1"))
    with pytest.raises(ConfigError, match="run.seed"):
        finish(make_run(tmp_path, "trainer.steps=2", "run.seed=8"))


def test_a_run_directory_is_as_good_as_its_run_file(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=1")
    with pytest.raises(ConfigError, match="without run.yaml"):
        read_config(tmp_path / "model")
    finish(config)
    moved = config.run.dir.rename(tmp_path / "1000")  # a name that YAML reads as a number
    again = read_config(moved, overrides=["trainer.steps=2"])
    assert again.run.dir == moved and again.trainer.steps == 2 and finish(again)["steps"] == 2
    (moved / "run.yaml").write_text("cluster: {env: {HF_TOKEN: <redacted>}}")
    with pytest.raises(ConfigError, match="contains no secrets"):
        read_config(moved)


GRADED = ("trainer.eval_every=1", "trainer.save_every=1", "trainer.keep_last=1", "eval.temperature=1", "actor.lr=3e-2")


@pytest.mark.slow
def test_graded_rewards_are_the_headline_and_rank_the_checkpoints_also_after_a_resume(tmp_path: Path) -> None:
    finish(make_run(tmp_path, *GRADED, "trainer.steps=2", val=letter_rows(8)))
    config = make_run(tmp_path, *GRADED, "trainer.steps=5", val=letter_rows(8))
    summary = finish(config)
    rewards = column(config, "eval/reward_mean")
    assert summary["headline"] == "eval/reward_mean" and max(column(config, "eval/graded_fraction")) > 0
    assert summary["eval"]["reward_mean"] == {"first": rewards[0], "last": rewards[-1], "best": max(rewards)}
    best = max(range(1, 6), key=lambda step: (rewards[step], step))
    kept = {path.name for path in (config.run.dir / "checkpoints").iterdir()}
    assert kept == {"step-000005", f"step-{best:06d}"}
    last = CheckpointStore(config.run.dir / "checkpoints", keep_last=1, keep_best=1).latest()
    assert last is not None and last.score == rewards[-1]


class Recorder(Console):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step_s" in metrics:
            self.seen.append(f"step {step}")

    def restart(self, step: int) -> None:
        self.seen.append(f"restart at {step}")

    def phase(self, text: str | None) -> None:
        if text is not None and text.startswith(("rollout", "export")):
            self.seen.append(text)


def test_the_console_is_told_where_an_attempt_begins_and_what_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, note, lost = Recorder(), Record.note_update, []

    def lose_once(self: Record, batch: Any, *rest: Any, **named: Any) -> None:
        if batch.step == 3 and not lost:
            lost.append(batch.step)
            raise WorkerDiedError("rollout rank 0 is lost", role="rollout", ranks=[0], node_ranks=[])
        note(self, batch, *rest, **named)

    monkeypatch.setattr(Record, "note_update", lose_once)
    monkeypatch.setattr("rollcall.run.training.make_console", lambda *_, **__: console)
    train(make_run(tmp_path, "trainer.steps=3", "trainer.save_every=2"))
    assert console.seen == [
        "restart at 0", "rollout of step 1", "step 1", "rollout of step 2", "step 2", "rollout of step 3",
        "restart at 2", "rollout of step 3", "step 3", "export of step 3",
    ]  # fmt: skip


def test_the_size_of_a_run_is_what_it_leaves(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=4", "trainer.save_every=1", "trainer.keep_last=2", "trainer.keep_best=0")
    finish(config)
    num_parameters = _num_parameters(tmp_path / "model")
    (*_, last) = sorted((config.run.dir / "checkpoints").iterdir())
    held = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    checkpoint = checkpoint_bytes(config, read_sizes(config.model.path), width=4)
    assert checkpoint == pytest.approx(held, rel=0.1)
    assert size_words(config, checkpoint=checkpoint, model=4 * num_parameters) is None, (
        "a small run is not worth a word"
    )


def test_a_save_that_host_memory_cannot_hold_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_run(tmp_path)
    training._say_size(config)
    assert not caplog.messages
    monkeypatch.setattr(training.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    training._say_size(config)
    (warning,) = caplog.messages
    assert "host memory, but only 0.0 GiB is available, so this process would be killed; train an adapter" in warning


def test_a_large_run_is_told_before_it_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * GIB
    monkeypatch.setattr("rollcall.checkpoint.run_dir.free_bytes", lambda path: free)
    config = make_run(tmp_path, "trainer.steps=9", "trainer.save_every=1", "trainer.keep_last=3", "trainer.keep_best=0")
    run_dir = config.run.dir

    def words(place: str) -> str | None:
        local = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"place": place})})
        return size_words(local, checkpoint=2 * GIB, model=GIB // 2)

    assert words("shared") == (
        f"{run_dir} will store a model of 0.5 GiB and 3 checkpoints of 2.0 GiB. This takes up to 8.5 GiB in {run_dir} during a save, and "
        "100.0 GiB are available on its disk"
    )
    assert words("local") == (
        f"{run_dir} will store a model of 0.5 GiB and each node will store its parts of 3 checkpoints of 2.0 GiB. This takes up to 0.5 GiB "
        f"in {run_dir} during a save, and 100.0 GiB are available on its disk"
    )
    free = 7 * GIB
    assert "too little. Lower trainer.keep_last" in str(words("shared"))


def _num_parameters(model: Path) -> int:
    from safetensors.numpy import load_file

    return sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
