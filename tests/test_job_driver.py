"""A job's controller is started again when something kills it, and only then; it has the job's secrets and prints none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import column, make_run

from rollcall.base.redact import REDACTED
from rollcall.base.stop import STOPPED
from rollcall.config import Config, dump_config
from rollcall.launch.jobs.submit import ENTRYPOINT
from rollcall.nodes.declared import SEALED, seal
from rollcall.view.audit import audit

WAIT_S = 600.0
TOKEN, SECRET = "the-clusters-own-token", "wandb-5e77a9-not-for-you"
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
    command = [sys.executable, "-m", "rollcall.launch.jobs.driver", str(path)]
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


@pytest.mark.slow  # with short commands instead of a run, below; `test_jobs.py` has a job that trains
@pytest.mark.chaos
def test_a_killed_controller_goes_on_from_the_run_directory(tmp_path: Path) -> None:
    process, config = start(tmp_path)
    wait_until(config.run.dir / "checkpoints/step-000002", process)
    os.kill(controller_of(process), signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0 and "killed by SIGKILL; starting it again" in errors, errors
    found = audit(config.run.dir)
    assert found.is_clean and found.steps == 6 == len(column(config, "train/loss"))


@pytest.mark.slow
@pytest.mark.chaos
def test_a_job_that_is_stopped_saves_and_stays_stopped(tmp_path: Path) -> None:
    process, config = start(tmp_path, "trainer.save_every=0")
    wait_until(config.run.dir / "metrics.jsonl", process)
    for pid in (controller_of(process), process.pid):  # Ray tells both
        os.kill(pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == STOPPED and "started again" not in errors
    assert list((config.run.dir / "checkpoints").glob("step-*"))


def drive(code: str, folder: Path, *, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """A job's driver with ``code`` in place of the controller."""
    wrapper = (
        "import sys\nfrom rollcall.loop.attempts import Budget\nfrom rollcall.launch.jobs.driver import supervise\n"
        f"sys.exit(supervise([sys.executable, '-c', {code!r}], budget=Budget(most=1, window_s=60)))"
    )
    sealed = {SEALED: seal({"A_KEY": SECRET}, TOKEN), "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", wrapper]
    return subprocess.run(command, cwd=folder, env={**os.environ, **sealed}, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_controller_with_a_secret_is_started_again_when_it_is_killed(tmp_path: Path) -> None:
    result = drive(
        "import os, pathlib\n"
        "again = pathlib.Path('again')\n"
        "if not again.exists(): again.touch(); os.kill(os.getpid(), 9)\n"
        "print('has', os.environ['A_KEY'])",
        tmp_path,
    )
    assert (result.returncode, result.stdout) == (0, f"has {REDACTED}\n"), result.stderr
    assert "killed by SIGKILL; starting it again" in result.stderr


def test_a_controller_has_its_secrets_and_prints_none_of_them(tmp_path: Path) -> None:
    result = drive(
        "import os, subprocess, sys\n"
        "assert 'ROLLCALL_SEALED' not in os.environ\n"
        "print('length', len(os.environ['A_KEY']), 'value', os.environ['A_KEY'], flush=True)\n"
        "subprocess.run(['sh', '-c', 'echo child $A_KEY; echo error $A_KEY >&2'])\n"
        "os.write(1, b'no newline ' + os.environ['A_KEY'].encode())\n"
        "sys.exit(7)",
        tmp_path,
    )
    assert result.returncode == 7 and SECRET not in result.stdout + result.stderr
    expected = f"length {len(SECRET)} value {REDACTED}\nchild {REDACTED}\nerror {REDACTED}\nno newline {REDACTED}"
    assert result.stdout == expected


@pytest.mark.slow
def test_a_controller_that_is_killed_too_often_ends_the_job_with_a_status_that_says_so(tmp_path: Path) -> None:
    assert drive("import os; os.kill(os.getpid(), 9)", tmp_path).returncode == 128 + 9


@pytest.mark.slow
def test_a_controller_is_over_though_a_process_it_left_holds_its_output_open(tmp_path: Path) -> None:
    result = drive("import subprocess; subprocess.Popen(['sleep', '20']); print('done', flush=True)", tmp_path)
    assert (result.returncode, result.stdout) == (0, "done\n")


def test_a_driver_with_another_token_says_so(tmp_path: Path) -> None:
    result = drive("print('ran')", tmp_path, token="other")
    assert result.returncode != 0 and "were sealed with a different token" in result.stderr
    assert "ran" not in result.stdout


@pytest.mark.slow  # a status that a short command chose is the job's too, above
def test_an_error_of_the_run_is_the_jobs(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "data.max_prompt_tokens=1")
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and "started again" not in errors, errors


def test_the_shell_that_ray_starts_it_by_gives_its_place_to_the_driver(tmp_path: Path) -> None:
    """A node passes a signal on to processes with the driver's name in their command. A shell with it would end by the signal."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho $$\n")
    fake.chmod(0o755)
    env = {**os.environ, "ROLLCALL_PYTHON": str(fake)}
    started = subprocess.Popen(ENTRYPOINT, shell=True, env=env, stdout=subprocess.PIPE, text=True)
    assert int(started.communicate(timeout=WAIT_S)[0]) == started.pid
