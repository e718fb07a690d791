"""`rollcall status RUN_DIR` and `rollcall init`: how a run stands, and a run file to start from."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rollcall.cli.config import init
from rollcall.cli.runs import show_run
from rollcall.config import load_config
from rollcall.durable.lease import hold, read_holder
from rollcall.observe.headline import GRADED
from rollcall.observe.standing import standing


def write_run(run_dir: Path, *, last: int, started_s: float) -> Path:
    """Ten steps of an hour each by a process of long ago, the others of 2 s each, evaluated each time."""
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text("trainer: {steps: 100}")
    rows = [{"step": 0, "time": 0.0, "eval/accuracy": 0.0, "eval/reward_mean": 0.1, GRADED: 0.5}]
    for step in range(1, last + 1):
        now = 3600.0 * step if step <= 10 else started_s + 3 * (step - 10)
        row = {"step": step, "time": now, "train/reward_mean": 0.25, "time/step_s": 3600.0 if step <= 10 else 2.0}
        rows.append(row | {"eval/accuracy": 0.0, "eval/reward_mean": 0.3, "time/eval_s": 1.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_a_run_shows_step_of_steps_reward_headline_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", last=20, started_s=time.time() + 600)
    with hold(run_dir):
        show_run(run_dir, as_json=False)
        found = standing(run_dir, num_steps=100, holder=read_holder(run_dir))
        first_step = standing(
            write_run(tmp_path / "other", last=11, started_s=time.time() + 600),
            num_steps=100,
            holder=read_holder(run_dir),
        )
    shown = capsys.readouterr().out
    assert "step 20 of 100, reward 0.250, held-out reward 0.100 -> 0.300, left " in shown
    assert found.left_s is not None and found.left_s >= 80 * 3.0
    assert first_step.left_s is None, "no whole step of this process was measured after its first"
    show_run(run_dir, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["steps"], told["reward"], told["left_s"]) == (20, 100, 0.25, None)
    assert told["headline"] == {"metric": "eval/reward_mean", "first": 0.1, "last": 0.3}


def test_a_run_that_nobody_has_or_that_is_new_has_no_time_left(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", last=20, started_s=time.time() + 600)
    with hold(run_dir):
        holder = read_holder(run_dir)
    assert holder is not None
    assert standing(run_dir, num_steps=100, holder=replace(holder, released=True)).left_s is None
    assert standing(run_dir, num_steps=100, holder=None).left_s is None
    empty = standing(tmp_path, num_steps=None, holder=None)
    assert empty.rows() == [("step", "0")]


def test_init_writes_a_run_file_that_is_the_demo_and_never_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "my run.yaml"
    init(path)
    assert f"rollcall train {path}" in capsys.readouterr().out
    config, demo = load_config(path), load_config(None)
    assert config.run.name == "my-run" and config.run.dir == Path("runs/my-run")
    for section in ("model", "data", "rollout", "reward", "algorithm"):
        assert getattr(config, section) == getattr(demo, section)
    text = path.read_text()
    assert len(text.splitlines()) < 40 and text.count("#") > 10
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists and was not changed"):
        init(path)
    assert path.read_text() == "mine"
