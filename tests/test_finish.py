"""`rollcall finish`: from a checkpoint whose parts are on nodes to a model on the hub; each step once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gathered import Trained
from hub_server import REPO, Fault, Hub, hub  # noqa: F401 - a fixture
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rollcall.base.errors import ConfigError
from rollcall.checkpoint.merge.merge import merge
from rollcall.checkpoint.verify import VerifyError
from rollcall.cli.main import app
from rollcall.launch.finish import finish as module
from rollcall.launch.finish.finish import FinishedRun, finish
from rollcall.launch.finish.upload import UploadError
from rollcall.model.stored.tensors import StoredError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    trained = Trained(tmp_path)
    monkeypatch.setattr(module, "find_nodes", lambda run_dir, hosts: trained.disks)
    return trained


def states(done: FinishedRun) -> list[str]:
    return [step.state for step in done.steps]


def test_a_run_is_finished_step_by_step_and_each_step_once(hub: Hub, run: Trained) -> None:  # noqa: F811
    run.save(1, on_nodes=True)
    asked = len(list(run.dir.rglob("*")))
    dry = finish(run.dir, dry_run=True)
    assert states(dry) == ["would be done"] * 4 and "2 parts" in dry.steps[0].words
    assert len(list(run.dir.rglob("*"))) == asked and hub.requests == []
    done = finish(run.dir)
    assert states(done) == ["done"] * 4
    assert "differ from the trained model's by at most" in done.steps[2].words
    assert hub.files(REPO)["model.safetensors"] == (run.dir / "merged/model.safetensors").read_bytes()
    assert (run.dir / "checkpoints/step-000001/model/part-00001-of-00002.safetensors").is_file()
    assert states(finish(run.dir)) == ["was done"] * 4
    # Another precision: all but the parts.
    half = finish(run.dir, overrides=["finish.dtype=bf16"])
    assert states(half) == ["was done", "done", "done", "done"] and "stored in bfloat16" in half.steps[2].words
    # A new checkpoint: all of it.
    run.save(2, on_nodes=True)
    assert states(finish(run.dir)) == ["done"] * 4
    assert len(hub.repos[REPO].commits) == 4


def test_a_failed_step_is_where_the_next_call_goes_on(
    hub: Hub,  # noqa: F811
    run: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run.save(1, on_nodes=False)
    hub.faults = [Fault("POST", "/commit/", 403, message="you may only read", count=9)]
    with pytest.raises(UploadError, match="you may only read"):
        finish(run.dir)
    hub.faults = []
    assert states(finish(run.dir)) == ["was done", "was done", "was done", "done"]
    # A merge that does not give the trained model is not uploaded.
    commits = len(hub.repos[REPO].commits)

    def merge_wrongly(*args: Any, **kwargs: Any) -> None:
        merge(*args, **kwargs)
        file = run.dir / "merged/model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"].mul_(2)
        save_file(tensors, file, metadata={"format": "pt"})

    run.save(2, on_nodes=False)
    with monkeypatch.context() as patch, pytest.raises(VerifyError, match="is not the model that was trained"):
        patch.setattr(module, "merge", merge_wrongly)
        finish(run.dir)
    assert len(hub.repos[REPO].commits) == commits


def test_another_model_in_the_place_of_the_merged_one_does_not_count_as_it(hub: Hub, run: Trained) -> None:  # noqa: F811
    older = run.save(1, on_nodes=False)
    run.save(2, on_nodes=False)
    finish(run.dir)
    file = run.dir / "merged/model.safetensors"
    newest = file.read_bytes()
    merge(older, run.dir / "merged")
    assert file.read_bytes() != newest
    assert states(finish(run.dir)) == ["was done", "done", "done", "done"]
    assert file.read_bytes() == newest == hub.files(REPO)["model.safetensors"]
    assert states(finish(run.dir)) == ["was done"] * 4


def test_a_run_file_without_a_repository_uploads_nothing(hub: Hub, run: Trained) -> None:  # noqa: F811
    run.save(1, on_nodes=False)
    done = CliRunner().invoke(app, ["finish", str(run.dir), "finish.upload=null", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["steps"]["upload"]["state"] == "not asked for" and found["uploaded"] is None
    assert hub.requests == [] and Path(found["model"], "config.json").is_file()
    shown = CliRunner().invoke(app, ["finish", str(run.dir), "finish.upload=null", "--dry-run"])
    assert shown.stdout.count("was done") == 3 and "not asked for" in shown.stdout


def test_what_cannot_be_finished_is_said(run: Trained, tmp_path: Path) -> None:
    with pytest.raises(StoredError, match="neither a checkpoint nor a run directory that contains one"):
        finish(run.dir)
    with pytest.raises(ConfigError, match="does not exist"):
        finish(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not a repository name; write OWNER/NAME"):
        finish(run.dir, overrides=["finish.upload.repo=../x"])


def test_merge_verifies_on_request(run: Trained, tmp_path: Path) -> None:
    checkpoint = run.save(1, on_nodes=False)
    words = ["merge", str(checkpoint), "--out", str(tmp_path / "out"), "--verify"]
    done = CliRunner().invoke(app, [*words, "--dtype", "bf16", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verified"]["dtype"] == "bfloat16"
    probe = checkpoint / "model/probe.json"  # what a plain model directory holds has no checksums
    wrong = json.loads(probe.read_text())
    wrong["logprobs"][0][0] -= 1.0
    probe.write_text(json.dumps(wrong))
    words[1] = str(checkpoint / "model")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "is not the model that was trained" in done.output
