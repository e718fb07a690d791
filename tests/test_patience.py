"""Writes that wait for a disk that is full or cannot be written, and go on when it can."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from disks import small_disk, unmount
from runs import finish, make_run, num_records, weights
from scored import make_group

from rollcall.base import patience
from rollcall.base.errors import CheckpointError, ConfigError, JournalError, WorkerDiedError, WorkerError
from rollcall.base.journal import Journal
from rollcall.base.lease import hold
from rollcall.base.patience import DiskError, disk_fault, persist
from rollcall.checkpoint.saving import Trained
from rollcall.checkpoint.store import CheckpointStore
from rollcall.config import Config
from rollcall.loop.record import Record
from rollcall.observe.events import EVENTS, Events
from rollcall.observe.sinks import JsonlSink, TensorBoardSink, read_rows
from rollcall.view.audit import audit


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short, and end, should nobody free the disk."""
    monkeypatch.setattr(patience, "RETRY_S", 0.02)
    monkeypatch.setattr(patience, "DEADLINE_S", 30.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = small_disk(tmp_path / "disk", size="8m")
    try:
        yield path
    finally:
        unmount(path)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    continue
            except OSError:
                continue


class Rescue(logging.Handler):
    """Does something about it when a write says that it waits."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.action = action
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "retrying until it succeeds" in text:
            self.said.append(text)
            if len(self.said) == 1:
                threading.Timer(0.1, self.action).start()  # so that it is tried again in vain first

    def __enter__(self) -> Rescue:
        logging.getLogger("rollcall").addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("rollcall").removeHandler(self)


def at_call(patch: pytest.MonkeyPatch, owner: type, name: str, *, call: int, action: Callable[[], None]) -> None:
    original, calls = getattr(owner, name), 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        pytest.param(Journal, "append", 20, id="a-group"),
        pytest.param(Journal, "mark_trained", 3, id="that-a-step-was-trained", marks=pytest.mark.slow),
        pytest.param(Trained, "write_parts", 2, id="a-checkpoint"),
        pytest.param(JsonlSink, "log", 3, id="metrics", marks=pytest.mark.slow),
        pytest.param(Record, "export", 1, id="the-model", marks=pytest.mark.slow),
    ],
)
def test_a_run_waits_for_a_full_disk_and_ends_as_if_nothing_had_been(
    tmp_path: Path, disk: Path, undisturbed: Config, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int
) -> None:
    config = make_run(tmp_path, f"run.dir={disk}/run", name="tight")
    at_call(monkeypatch, owner, name, call=call, action=lambda: fill(disk))
    with Rescue((disk / "ballast").unlink) as rescue:
        assert finish(config)["steps"] == 6
    assert rescue.said and "No space left" in rescue.said[0] and str(config.run.dir) in rescue.said[0]
    counted = audit(config.run.dir)
    assert counted.is_clean and counted.steps == 6, counted
    assert num_records(config) == 48
    assert [row["step"] for row in read_rows(config.run.dir / "metrics.jsonl")] == list(range(1, 7))
    assert all(tensor.tobytes() == weights(undisturbed)[key].tobytes() for key, tensor in weights(config).items())


class Unwritable:
    """A folder that cannot be written for a while: by a read-only mount for root, whom permissions do not stop."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self) -> None:
        if os.getuid() != 0:
            self.path.chmod(0o500)
            return
        for command in (["--bind", str(self.path), str(self.path)], ["-o", "remount,bind,ro", str(self.path)]):
            if subprocess.run(["mount", *command], capture_output=True, check=False).returncode != 0:
                pytest.skip("cannot make a folder read-only: root, and no right to mount")

    def end(self) -> None:
        if os.getuid() != 0:
            self.path.chmod(0o700)
        else:
            unmount(self.path)


@pytest.mark.parametrize(
    "call", ["write_parts", *(pytest.param(call, marks=pytest.mark.slow) for call in ("append", "save"))]
)
@pytest.mark.slow
def test_a_run_waits_for_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    config = make_run(tmp_path, name="locked")
    folder = config.run.dir / ("journal" if call == "append" else "checkpoints")
    blocked = Unwritable(folder)
    if call == "append":
        at_call(monkeypatch, Journal, "append", call=17, action=blocked.begin)  # the first of a step: a new file
    elif call == "save":
        at_call(monkeypatch, CheckpointStore, "save", call=2, action=blocked.begin)
    else:  # with a save begun, which can then neither be put in place nor be removed
        at_call(monkeypatch, Trained, "write_parts", call=2, action=blocked.begin)
    with Rescue(blocked.end) as rescue:
        assert finish(config)["steps"] == 6
    assert rescue.said and ("Read-only" in rescue.said[0] or "Permission" in rescue.said[0])
    counted = audit(config.run.dir)
    assert counted.is_clean and counted.steps == 6, counted


def test_a_journal_waits_in_one_thread_and_others_wait_for_themselves(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them speaks for all."""
    with Journal(disk / "journal") as journal:
        fill(disk)
        with Rescue((disk / "ballast").unlink) as rescue:
            threads = [
                threading.Thread(target=journal.append, args=(make_group(draw, num_tokens=2000),)) for draw in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(rescue.said) == 1 and caplog.text.count("continuing") == 1, caplog.text
        journal.sync()
        assert [group.draw for group in journal.read(1)] == [0, 1, 2, 3]
    assert not (disk / "journal" / "torn").exists()


def test_a_write_that_still_waits_when_its_journal_is_closed_writes_nothing(disk: Path) -> None:
    journal, failed = Journal(disk / "journal"), []
    journal.append(make_group(0))
    fill(disk)

    def append() -> None:
        try:
            journal.append(make_group(1, num_tokens=5000))
        except JournalError as error:
            failed.append(str(error))

    with Rescue(lambda: None) as rescue:
        thread = threading.Thread(target=append)
        thread.start()
        while not rescue.said:
            time.sleep(0.01)
        journal.close()
        (disk / "ballast").unlink()
        thread.join()
    assert "closed" in failed[0]
    with Journal(disk / "journal") as again:
        assert [group.draw for group in again.read(1)] == [0]


def test_records_that_the_disk_refused_when_they_were_flushed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path) as journal:
        journal.append(make_group(0))
        real, calls = os.fsync, 0

        def fsync(fd: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                os.pwrite(fd, bytes(64), 0)  # the kernel gave the page up
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        journal.sync()
        assert [group.draw for group in journal.read(1)] == [0]


def test_a_worker_that_could_not_write_a_checkpoint_is_asked_again(tmp_path: Path) -> None:
    folders: list[Path] = []

    def write(directory: Path) -> None:
        folders.append(directory)
        (directory / "model.bin").write_bytes(b"half")
        if len(folders) < 3:
            cause = pickle.loads(pickle.dumps(OSError(errno.EDQUOT, "Disk quota exceeded")))
            raise WorkerError("actor rank 0 raised", role="actor", ranks=[0], node_ranks=[0]) from cause

    store = CheckpointStore(tmp_path, keep_last=2, keep_best=0)
    store.save(1, write=write, state={}, score=None)
    assert len(set(folders)) == 3, "no two attempts share a folder"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_only_faults_of_the_disk_are_waited_for(tmp_path: Path) -> None:
    def named(error: Exception) -> int | None:
        fault = disk_fault(error, near=tmp_path)
        return fault.errno if fault else None

    wrapped = pickle.loads(pickle.dumps(CheckpointError("model directory cannot be written", errno=errno.ENOSPC)))
    assert named(wrapped) == errno.ENOSPC, "its cause stays behind in the worker's process"
    assert named(RuntimeError("I/O error: Read-only file system (os error 30)")) == errno.EROFS
    died = WorkerDiedError("rank 0 is dead: No space left on device", role="actor", ranks=[0], node_ranks=[0])
    assert named(died) is None, "a dead worker is not brought back by room on the disk"
    assert named(FileNotFoundError(errno.ENOENT, "No such file")) is None
    assert named(ValueError("a bad value")) is None


def test_a_disk_that_stays_full_ends_in_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "DEADLINE_S", 0.1)

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError, match=r"cannot write the thing: No space left.*free space.*same command again"):
        persist(write, path=tmp_path / "x", what="the thing")


def test_events_do_not_hold_up_the_run_and_are_there_when_the_disk_has_room(disk: Path) -> None:
    events = Events(disk)
    events.write({"number": 0})
    fill(disk)
    for number in range(1, 200):
        events.write({"number": number, "text": "x" * 100})
    assert len((disk / EVENTS).read_bytes().splitlines()) < 200
    (disk / "ballast").unlink()
    events.close()
    lines = (disk / EVENTS).read_bytes().splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(200))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_in_a_new_file(disk: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(disk / "tensorboard", resume_step=None)
    sink.log(1, {"train/loss": 1.0})
    fill(disk)
    with Rescue((disk / "ballast").unlink) as rescue:
        for step in range(2, 200):
            sink.log(step, {"train/loss": float(step)})
    sink.close()
    assert rescue.said, "the disk was never full"
    seen = accumulator.EventAccumulator(str(disk / "tensorboard"))
    seen.Reload()
    assert 199 in [event.step for event in seen.Scalars("train/loss")]


def test_metrics_leave_no_half_line_on_a_full_disk(disk: Path) -> None:
    sink = JsonlSink(disk / "metrics.jsonl", resume_step=None)
    fill(disk)
    with Rescue((disk / "ballast").unlink) as rescue:
        for step in range(1, 300):
            sink.log(step, {"train/loss": 0.123456789})
    sink.close()
    assert rescue.said
    rows = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 300))


def test_a_resumed_runs_metrics_wait_for_a_full_disk(disk: Path) -> None:
    sink = JsonlSink(disk / "metrics.jsonl", resume_step=None)
    for step in (1, 2, 3):
        sink.log(step, {"train/loss": 0.5})
    sink.close()
    fill(disk)
    with Rescue((disk / "ballast").unlink) as rescue:
        JsonlSink(disk / "metrics.jsonl", resume_step=2).close()
    assert rescue.said
    assert [row["step"] for row in read_rows(disk / "metrics.jsonl")] == [1, 2]


def test_a_controller_that_goes_on_with_a_run_waits_for_a_full_disk_and_a_first_one_does_not(disk: Path) -> None:
    with hold(disk / "run"):
        pass
    fill(disk)
    with Rescue((disk / "ballast").unlink) as rescue, hold(disk / "run"):
        assert "the lease" in rescue.said[0]
    fill(disk)
    with pytest.raises(ConfigError, match="No space left"), hold(disk / "another"):
        pass


def test_token_scores_that_the_disk_does_not_take_are_left_out_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rollcall.loop.record.write_token_scores", refuse)
    workers = SimpleNamespace(learner=SimpleNamespace(score=lambda samples: []))
    record: Any = SimpleNamespace(workers=workers, run_dir=tmp_path)
    Record.write_token_scores(record, cast(Any, SimpleNamespace(step=3, groups=[])))
    assert "the token scores of step 3 were not written (No space left on device)" in caplog.text
