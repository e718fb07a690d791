"""Being told to stop: what was trained is saved, nothing is trained again, and the command says so."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from runs import column, finish, letter_rows, make_run, metric_rows, weights
from typer.testing import CliRunner

import rollcall.__main__
import rollcall.base.patience
import rollcall.base.stop
import rollcall.run.api
from rollcall.base.journal import Journal
from rollcall.base.stop import INTERRUPTED, STOPPED, Stop, Stopped, heed, heeded, kept
from rollcall.checkpoint.saving import Trained
from rollcall.checkpoint.store import CheckpointStore
from rollcall.cli.main import app
from rollcall.config import Config, dump_config
from rollcall.loop.controller import Controller
from rollcall.loop.evaluate import Evaluation
from rollcall.observe.events import read_phases
from rollcall.view.audit import audit

STEPS = 5
WAIT_S = 180.0


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def call_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, what: Callable[[], None]) -> None:
    """Do something right before the n-th call (from 1) of a method."""
    original, calls = getattr(owner, name), Counter[str]()

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if calls[name] == number:
            what()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)


def saved(config: Config) -> list[str]:
    return sorted(path.name for path in (config.run.dir / "checkpoints").glob("step-*"))


def updates(config: Config) -> Counter[int]:
    """How often each step's update was begun."""
    return Counter(event.step for event in read_phases(config.run.dir) if event.phase == "update")


def stoppable(folder: Path, *overrides: str, name: str = "run") -> Config:
    changes = (f"trainer.steps={STEPS}", "trainer.save_every=0", *overrides)
    return make_run(folder, *changes, name=name, val=letter_rows(4))


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Also where the tests run under `nohup`, which has them ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def stop_in_training(config: Config) -> None:
    with heed(), pytest.raises(Stopped, match="SIG"):
        finish(config)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGHUP))],
)
def test_a_stop_in_an_update_saves_at_the_steps_end_and_no_update_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole, config = stoppable(tmp_path, name="whole"), stoppable(tmp_path)
    finish(whole)
    with monkeypatch.context() as patch:
        call_at(patch, Journal, "mark_trained", 3, lambda: tell(number))
        stop_in_training(config)
    assert saved(config) == ["step-000003"] and len(column(config, "train/loss")) == 3
    finish(config)
    assert audit(config.run.dir).is_clean and updates(config) == dict.fromkeys(range(1, STEPS + 1), 1)
    assert len(column(config, "train/loss")) == STEPS
    for name, tensor in weights(whole).items():
        assert np.array_equal(tensor, weights(config)[name])


@pytest.mark.slow
def test_a_step_that_does_not_end_in_time_is_left_and_what_was_trained_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stoppable(tmp_path, "trainer.stop_grace_s=0.1")

    def hang() -> None:
        tell()
        while True:  # as a compiler does, say: the event loop does not get its turn
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        call_at(patch, Journal, "append", 8 * 2 + 5, hang)
        stop_in_training(config)
    assert saved(config) == ["step-000002"]
    finish(config)
    assert audit(config.run.dir).is_clean and updates(config) == dict.fromkeys(range(1, STEPS + 1), 1)


def test_the_end_of_the_grace_waits_for_an_update_that_would_take_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stoppable(tmp_path, "trainer.stop_grace_s=0.05")

    def linger() -> None:
        tell()
        time.sleep(0.2)

    with monkeypatch.context() as patch:
        call_at(patch, Controller, "_update", 3, linger)
        stop_in_training(config)
    assert saved(config) == ["step-000003"]
    assert [row["step"] for row in metric_rows(config) if "train/loss" in row] == [1, 2, 3]


@pytest.mark.slow
def test_a_disk_that_stays_full_is_not_waited_for_when_the_grace_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stoppable(tmp_path, "trainer.save_every=2", "trainer.stop_grace_s=0.1")
    monkeypatch.setattr(rollcall.base.patience, "RETRY_S", 0.02)
    monkeypatch.setattr(rollcall.base.patience, "DEADLINE_S", WAIT_S)

    def refuse(*_: Any) -> None:
        if rollcall.base.stop.heeded().asked is None:
            tell()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Trained, "write_parts", refuse)
        stop_in_training(config)
    assert not saved(config)
    finish(config)
    assert audit(config.run.dir).is_clean and saved(config)[-1] == f"step-{STEPS:06d}"


def test_a_checkpoint_that_failed_is_saved_again_at_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, write = stoppable(tmp_path, "trainer.save_every=2"), CheckpointStore.save

    def fail_first(store: CheckpointStore, step: int, **about: Any) -> Path:
        if heeded().asked is None:
            tell()
            raise ValueError("what fails once")
        return write(store, step, **about)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", fail_first)
        stop_in_training(config)
    (name,) = saved(config)
    assert name == f"step-{len(column(config, 'train/loss')):06d}"
    finish(config)
    assert audit(config.run.dir).is_clean and updates(config) == dict.fromkeys(range(1, STEPS + 1), 1)


@pytest.mark.slow
def test_one_ctrl_c_ends_a_run_that_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stoppable(tmp_path, "trainer.save_every=2")
    monkeypatch.setattr(rollcall.base.patience, "RETRY_S", 0.02)
    num_writes = 0

    def refuse(*_: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 2:
            tell(signal.SIGINT)
        assert num_writes < 10, "Ctrl-C was not heeded"
        raise OSError(errno.ENOSPC, "No space left on device")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    try:
        with monkeypatch.context() as patch, heed(), pytest.raises(KeyboardInterrupt) as ended:
            patch.setattr(Trained, "write_parts", refuse)
            finish(config)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(ended.value, Stopped) and num_writes >= 2 and not saved(config)
    finish(config)
    assert audit(config.run.dir).is_clean and saved(config)[-1] == f"step-{STEPS:06d}"


def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heed() as stop:
            tell(signal.SIGHUP)
            with kept():
                pass
            tell(signal.SIGHUP)
            assert stop.asked is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_whose_terminal_is_closed_can_still_print_and_save() -> None:
    script = """
import os, sys, time, rollcall.base.stop
with rollcall.base.stop.heed() as stop, stop.waiting(60):
    print("ready", flush=True)
    while stop.asked is None:
        time.sleep(0.01)
    print("to nobody", flush=True)
    print("nor here", file=sys.stderr, flush=True)
    os._exit(42 if stop.asked == "SIGHUP" else 1)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_an_update_that_cannot_end_in_time_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stoppable(tmp_path, "trainer.stop_grace_s=60")
    monkeypatch.setattr(Stop, "left_s", 0.0)
    with monkeypatch.context() as patch:
        call_at(patch, Journal, "append", 8 * 2 + 5, tell)
        stop_in_training(config)
    assert saved(config) == ["step-000002"] and set(updates(config)) == {1, 2}


@pytest.mark.slow
def test_an_evaluation_that_a_stop_left_out_is_done_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stoppable(tmp_path, "trainer.eval_every=2")
    with monkeypatch.context() as patch:
        call_at(patch, Journal, "mark_trained", 2, tell)
        stop_in_training(config)
    assert [row["step"] for row in metric_rows(config) if "eval/accuracy" in row] == [0]
    finish(config)
    assert [row["step"] for row in metric_rows(config) if "eval/accuracy" in row] == [0, 2, 4, STEPS]


@pytest.mark.slow
def test_a_checkpoint_that_a_stop_saved_before_its_evaluation_can_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stoppable(tmp_path, "trainer.eval_every=2", "trainer.keep_last=1", "trainer.keep_best=1")
    with monkeypatch.context() as patch:
        call_at(patch, Journal, "mark_trained", 2, tell)
        stop_in_training(config)
        measured = Evaluation.metrics
        best = {"eval/accuracy": 1.0, "eval/reward_mean": 1.0}
        worse = {"eval/accuracy": 0.0, "eval/reward_mean": 0.0}
        patch.setattr(Evaluation, "metrics", lambda one: measured(one) | (best if one.groups[0].step == 2 else worse))
        finish(config)
    assert saved(config) == ["step-000002", f"step-{STEPS:06d}"]


def test_a_stop_after_an_evaluation_saves_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stoppable(tmp_path, "trainer.eval_every=2")
    monkeypatch.setattr(Stop, "left_s", 0.0)
    with monkeypatch.context() as patch:
        call_at(patch, Journal, "append", 8 * 2 + 5, tell)  # step 2 is evaluated, and step 3 is not begun
        stop_in_training(config)
    manifest = json.loads((config.run.dir / "checkpoints" / "step-000002" / "manifest.json").read_text())
    assert set(manifest["scores"]) == {"eval/accuracy", "eval/reward_mean"}


def test_a_stop_is_no_failure_to_be_tried_again_when_a_worker_is_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        tell()
        raise RuntimeError("the engine was told to stop as well")

    config = stoppable(tmp_path)
    with monkeypatch.context() as patch:
        call_at(patch, Journal, "append", 8 * 2 + 5, lose)
        stop_in_training(config)
    assert saved(config) == ["step-000002"]


def test_before_a_run_trains_a_stop_ends_the_command_where_it_is(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)  # Ray leaves a handler of its own where another test has started it
    with heed() as stop:
        with pytest.raises(Stopped, match="SIGTERM"):
            tell()
            time.sleep(5)
        with pytest.raises(Stopped), stop.waiting(10):
            raise AssertionError("nothing begins after a stop")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, STOPPED, "stopped by SIGTERM"),
        (signal.SIGUSR1, STOPPED, "stopped by SIGUSR1"),
        (signal.SIGHUP, STOPPED, "stopped by SIGHUP"),
        (signal.SIGINT, INTERRUPTED, "stopped by Ctrl-C"),
    ],
)
def test_a_stop_while_the_command_is_imported_is_one_line_and_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, status: int, line: str
) -> None:
    class Teller:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "rollcall.cli.main":
                tell(number)

    monkeypatch.delitem(sys.modules, "rollcall.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Teller(), *sys.meta_path])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    try:
        with pytest.raises(SystemExit) as ended:
            rollcall.__main__.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == status and capsys.readouterr().err == f"{line}\n"


def test_a_stop_that_an_import_swallows_still_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swallower:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "rollcall.cli.main":
                with suppress(KeyboardInterrupt):
                    tell()

    monkeypatch.delitem(sys.modules, "rollcall.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Swallower(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["rollcall", "version"])
    with pytest.raises(SystemExit) as ended:
        rollcall.__main__.main()
    assert ended.value.code == STOPPED


def test_a_stop_while_train_reads_its_run_file_is_one_line_and_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_config(*_: Any, **__: Any) -> None:
        tell()
        raise AssertionError("nothing listens")

    monkeypatch.setattr(rollcall.run.api, "read_config", read_config)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        result = CliRunner().invoke(app, ["train"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == STOPPED and result.output == "stopped by SIGTERM\n"


def test_the_end_of_the_grace_says_nothing_of_a_coroutine_that_it_came_before() -> None:
    async def never() -> None: ...

    with warnings.catch_warnings(record=True) as said, heed() as stop:
        warnings.simplefilter("always")
        made = never()
        with pytest.raises(Stopped), stop.waiting(0.0):
            tell()
            time.sleep(WAIT_S)
        del made
    assert not said


def test_a_request_that_comes_twice_is_one_and_a_later_one_ends_the_process() -> None:
    script = """
import os, signal, time, rollcall.base.stop
with rollcall.base.stop.heed() as stop, stop.waiting(60):
    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR1)
    rollcall.base.stop.SAME_S = 0.0
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "alive\n"), done.stderr


def test_handlers_that_ray_installs_do_not_stay() -> None:
    def ray_init(*, told: bool) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if told:
            tell()
            time.sleep(5)

    with heed() as stop:
        with kept():
            ray_init(told=False)
        assert signal.getsignal(signal.SIGTERM) == stop.hear
        with pytest.raises(Stopped, match="SIGTERM"), kept():
            ray_init(told=True)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in the process that follows a run for its node
    try:
        with kept():
            ray_init(told=False)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


SLOW_ONCE = """
import time
from pathlib import Path

METRICS = Path("run/metrics.jsonl")

def score(*row):
    time.sleep(0.05 if METRICS.exists() and METRICS.stat().st_size and not Path("go").exists() else 0)
    return 0.0
"""


@pytest.mark.chaos
def test_sigterm_to_every_process_of_a_run_ends_it_with_one_line_and_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_ONCE)
    config = make_run(
        tmp_path, "trainer.steps=9", "trainer.save_every=0", reward=[{"type": "function", "path": "slow:score"}]
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    process = commands.start("train", "run.yaml", cwd=tmp_path)
    give_up = time.monotonic() + WAIT_S
    metrics = config.run.dir / "metrics.jsonl"
    while not (metrics.exists() and "train/loss" in metrics.read_text()):  # it is empty until the first step has ended
        assert process.poll() is None and time.monotonic() < give_up, process.stderr
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (*map(int, children), process.pid):  # as `ray job stop` does
        os.kill(pid, signal.SIGTERM)
    status, errors = process.wait(), process.stderr
    step = len(column(config, "train/loss"))
    assert status == STOPPED, errors
    assert errors == f"stopped by SIGTERM after step {step} of 9, which is saved; the same command continues the run\n"
    assert saved(config) == [f"step-{step:06d}"]
    (tmp_path / "go").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    finish(config)
    found = audit(config.run.dir)
    assert found.is_clean and found.steps == 9 and set(updates(config).values()) == {1}
    assert not any(row.get("train/reward_errors") for row in metric_rows(config)), "the scorers outlived the signal"


def test_the_status_is_one_that_no_other_end_has() -> None:
    assert STOPPED == os.EX_TEMPFAIL and len({STOPPED, INTERRUPTED, 0, 1, 2}) == 5
