"""`rollcall status RUN_DIR` and `rollcall init`: how a run stands, and a run file to start from."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollcall.base.lease import Lease, hold
from rollcall.base.patience import persist
from rollcall.base.wait import Wait
from rollcall.cli.config import init
from rollcall.cli.runs import show_run
from rollcall.config import load_config
from rollcall.observe.headline import GRADED
from rollcall.run.api import Run
from rollcall.view.api import WatchedRun
from rollcall.view.reader import RunReader
from rollcall.view.summary import standing_rows


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
        run = RunReader(run_dir)
        found = run.standing(run.state())
    other = write_run(tmp_path / "other", last=11, started_s=time.time() + 600)
    with hold(other):
        run = RunReader(other)
        first_step = run.standing(run.state())
    shown = capsys.readouterr().out
    assert "step 20 of 100, reward 0.250, held-out reward 0.100 -> 0.300, left " in shown
    assert found["left_s"] is not None and found["left_s"] >= 80 * 3.0
    assert first_step["left_s"] is None, "no whole step of this process was measured after its first"
    show_run(run_dir, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["steps"], told["reward"], told["left_s"]) == (20, 100, 0.25, None)
    assert told["headline"] == {
        "metric": "eval/reward_mean",
        "words": "held-out reward",
        "first": 0.1,
        "last": 0.3,
        "best": 0.3,
    }


def test_a_run_that_starts_is_shown_before_it_has_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with hold(run_dir):
        show_run(run_dir, as_json=False)
    shown = capsys.readouterr().out
    assert f"held by  process {os.getpid()} on host" in shown and "now      starting; no phase has begun yet" in shown
    assert not run_dir.exists()
    with pytest.raises(ValueError, match="run does not exist. A run creates it a few seconds after it starts"):
        show_run(run_dir, as_json=False)


def test_a_run_that_nobody_has_or_that_is_new_has_no_time_left(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", last=20, started_s=time.time() + 600)
    run = RunReader(run_dir)
    assert run.standing(run.state())["left_s"] is None and run.state().is_over
    with hold(run_dir):
        assert run.standing(run.state())["left_s"] is not None
    assert run.standing(run.state())["left_s"] is None and run.state().is_over, "its holder gave it back"
    empty = RunReader(tmp_path)
    assert standing_rows(empty.standing(empty.state())) == [("step", "0")]


def test_every_reader_says_the_same_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation alone is no step, and neither is half a line."""
    run_dir = write_run(tmp_path / "run", last=20, started_s=time.time())
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "eval/accuracy": 0.5}\n{"step": 22, "time/step_s": 1')
    found = [RunReader(run_dir).step, RunReader(run_dir).summary()["steps"], told(run_dir, capsys)["step"]]
    found += [WatchedRun(run_dir).row()["step"], Run(run_dir).step]
    assert found == [20] * 5


def test_a_run_on_another_host_is_shown_with_what_it_did_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", last=20, started_s=time.time())
    begun = {"phase": "update", "step": 21, "start_s": 1.0}
    (run_dir / "events.jsonl").write_text(json.dumps(begun) + "\n")
    for path in run_dir.iterdir():
        os.utime(path, (1.0, 1.0))
    with hold(run_dir) as lease:
        lease.me = replace(lease.me, host="elsewhere")
        shown = told_status(run_dir, lease, capsys)
        assert "update of step 21; held by process" in shown and "checking whether it is alive" in shown
        wait = Wait(first_s=0)
        wait.tell("waiting for node 2 (10.0.0.3): run `rollcall node` there")
        shown = told_status(run_dir, lease, capsys)
        assert "now      waiting for node 2 (10.0.0.3): run `rollcall node` there; held by process" in shown
        wait.tell("x" * 999)
        assert ("x" * 497 + "...; held by process") in told_status(run_dir, lease, capsys)
        del wait


def told_status(run_dir: Path, lease: Lease, capsys: pytest.CaptureFixture[str]) -> str:
    lease._beat()
    capsys.readouterr()
    show_run(run_dir, as_json=False)
    return capsys.readouterr().out


def test_a_run_that_waits_shows_for_what_since_when_and_no_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", last=20, started_s=time.time() + 600)
    ended = {"phase": "rollout", "step": 20, "start_s": 1.0, "end_s": 2.0, "duration_s": 1.0}
    (run_dir / "events.jsonl").write_text(json.dumps(ended) + "\n")
    with hold(run_dir) as lease:
        wait, work = Wait(first_s=0), Wait(first_s=0, stalls=False)
        work.tell("waiting for rank 0, which computes")
        assert "now      after rollout of step 20 (since" in told_status(run_dir, lease, capsys)
        wait.tell("waiting for node 2 (10.0.0.3): run `rollcall node` there")
        shown = told_status(run_dir, lease, capsys)
        assert re.search(
            r"now +waiting for node 2 \(10.0.0.3\): run `rollcall node` there \(waiting since [0-9:]{8}, \d+ s\)", shown
        )
        assert "after rollout" not in shown and "left" not in shown
        assert told(run_dir, capsys)["lease"]["waiting"]["for"].startswith("waiting for node 2")
        state = WatchedRun(run_dir).row()
        assert (state["state"], state["left_s"]) == ("waiting", None) and "node 2" in state["text"]
        del wait
        assert "after rollout" in told_status(run_dir, lease, capsys), "the wait is over"
        assert told(run_dir, capsys)["lease"]["waiting"] is None


def test_a_run_whose_disk_is_full_shows_that_it_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, shown = write_run(tmp_path / "run", last=20, started_s=time.time()), []
    with hold(run_dir) as lease:

        def write() -> None:
            if not shown:
                raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(
            "rollcall.base.patience.time.sleep", lambda seconds: shown.append(told_status(run_dir, lease, capsys))
        )
        persist(write, path=run_dir / "journal", what="the group of draw 3")
        assert (
            f"{run_dir}/journal: cannot write the group of draw 3: No space left on device (waiting since" in shown[0]
        )
        assert "waiting since" not in told_status(run_dir, lease, capsys)


def told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    show_run(run_dir, as_json=True)
    return json.loads(capsys.readouterr().out)


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
