"""`rollcall compare`: two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import finish, letter_rows, make_run
from typer.testing import CliRunner

from rollcall.cli.main import app


def test_two_runs_are_shown_with_what_differs_and_what_came_of_it(tmp_path: Path) -> None:
    runs = []
    for name, changes in (("one", ()), ("two", ("trainer.steps=3", "actor.lr=1e-3", "algorithm.name=dapo"))):
        config = make_run(tmp_path, "trainer.steps=2", "trainer.eval_every=1", *changes, name=name, val=letter_rows(4))
        finish(config)
        runs.append(config)
    paths = [str(config.run.dir) for config in runs]
    found = json.loads(CliRunner().invoke(app, ["compare", *paths, "--json"]).output)
    assert found["runs"] == paths
    assert found["settings"]["trainer.steps"] == [2, 3] and found["settings"]["algorithm.name"] == ["grpo", "dapo"]
    assert not {"run.name", "run.dir", "run.seed"} & found["settings"].keys()
    summaries = [json.loads((config.run.dir / "summary.json").read_text()) for config in runs]
    for name, key in (("first", "first"), ("last", "last"), ("best", "best")):
        wanted = [summary["eval"]["accuracy"][key] for summary in summaries]
        assert found["numbers"][f"held-out accuracy, {name}"] == wanted
    assert found["numbers"]["rollout tokens/s"] == [summary["rollout_tokens_per_s"] for summary in summaries]
    shown = CliRunner().invoke(app, ["compare", *paths])
    assert shown.exit_code == 0 and "algorithm.name" in shown.output and "step time (s)" in shown.output
    same = CliRunner().invoke(app, ["compare", paths[0], paths[0]])
    assert "all settings are the same" in same.output


def test_a_run_that_has_not_ended_is_compared_by_its_metrics_so_far(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=1")
    finish(config)
    (config.run.dir / "summary.json").unlink()
    found = json.loads(CliRunner().invoke(app, ["compare", str(config.run.dir), str(config.run.dir), "--json"]).output)
    assert found["numbers"]["steps"] == [1, 1] and found["numbers"]["held-out accuracy, last"] == [None, None]


def test_a_run_without_its_settings_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    shown = CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path)])
    assert shown.exit_code == 1 and "run.yaml does not exist" in shown.output
    assert "so restore the file first" in shown.output and "--fresh" not in shown.output


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_what_is_no_run_is_refused(tmp_path: Path, place: str) -> None:
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / place), str(tmp_path)])
    assert shown.exit_code == 1 and "pass the directory of a run (run.dir)" in shown.output
