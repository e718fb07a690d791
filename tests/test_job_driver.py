"""A job's controller is started again when something kills it, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import column, make_run

from rollcall.audit import audit
from rollcall.config import Config, dump_config

WAIT_S = 180.0
SLOW = """
import time
from pathlib import Path

def score(*row):
    time.sleep(0.02)
    return 0.0
"""


def start(folder: Path, *overrides: str) -> tuple[subprocess.Popen[str], Config]:
    (folder / "slow.py").write_text(SLOW)
    reward = [{"type": "function", "path": "slow:score"}]
    config = make_run(folder, "trainer.steps=6", "trainer.save_every=2", *overrides, reward=reward)
    path = folder / "run.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "rollcall.cluster.job_driver", str(path)]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    return process, config


def controller_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def wait_until(there: Path, process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not there.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, f"{there} did not appear"
        time.sleep(0.02)


@pytest.mark.chaos
def test_a_killed_controller_goes_on_from_the_run_directory(tmp_path: Path) -> None:
    process, config = start(tmp_path)
    wait_until(config.run.dir / "checkpoints/step-000002", process)
    os.kill(controller_of(process), signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0 and "ended by SIGKILL; it is started again" in errors, errors
    found = audit(config.run.dir)
    assert found.is_clean and found.steps == 6 == len(column(config, "train/loss"))


@pytest.mark.slow
@pytest.mark.chaos
def test_a_job_that_is_stopped_stays_stopped(tmp_path: Path) -> None:
    process, config = start(tmp_path)
    wait_until(config.run.dir / "journal", process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0 and "started again" not in errors


def test_an_error_of_the_run_is_the_jobs(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "data.max_prompt_tokens=1")
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and "started again" not in errors, errors
