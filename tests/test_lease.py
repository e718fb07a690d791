"""One controller per run directory: refused, taken over, lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disks import small_disk, unmount

from rollcall.base import lease as module
from rollcall.base.errors import ConfigError
from rollcall.base.lease import Holder, Lease, LeaseLostError, hold, read_holder


def forge(run_dir: Path, **changes: Any) -> Holder:
    """A lease as a controller on another host would leave it."""
    holder = replace(module._myself(number=1), host="elsewhere", place="another boot", pid=4242, **changes)
    beat(run_dir, holder, 1)
    return holder


def beat(run_dir: Path, holder: Holder, counter: int) -> None:
    module._path(run_dir, holder.number).write_bytes(module._encode(holder, counter=counter, released=False))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.6)
    monkeypatch.setattr(module, "LOOK_S", 0.05)


@pytest.fixture
def never_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*args: Any) -> None:
        raise AssertionError("it is known at once whether the holder is gone")

    monkeypatch.setattr(module, "_watch", watch)


HOLD = """
import sys
from pathlib import Path
from rollcall.base.lease import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def held_by_another(run_dir: Path, script: str = HOLD) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_holder_that_was_killed_on_this_host_is_followed_at_once(
    tmp_path: Path, never_watches: None, caplog: pytest.LogCaptureFixture
) -> None:
    other = held_by_another(tmp_path / "run")
    with (
        pytest.raises(ConfigError, match=f"another process is training.*process {other.pid} on host"),
        hold(tmp_path / "run"),
    ):
        pass
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    # Dead and not yet buried: its number is still taken, and it will not write again.
    with hold(tmp_path / "run"):
        assert f"process {other.pid}" in caplog.messages[0] and "taking over" in caplog.messages[0]
    other.communicate()


def test_a_process_number_used_again_is_not_taken_for_the_holder(tmp_path: Path, never_watches: None) -> None:
    mine = replace(module._myself(number=1), process_start=1)
    beat(tmp_path / "run", mine, 1)
    with hold(tmp_path / "run") as lease:
        assert lease.me.number == 2


def test_a_stopped_holder_is_refused_as_stopped(tmp_path: Path, never_watches: None) -> None:
    other = held_by_another(tmp_path / "run")
    other.send_signal(signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    with pytest.raises(ConfigError, match="which is stopped"), hold(tmp_path / "run"):
        pass
    other.kill()
    other.communicate()


def test_a_holder_on_another_host_whose_counter_stands_still_is_followed(
    tmp_path: Path, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    forge(tmp_path / "run")
    with hold(tmp_path / "run"):
        assert read_holder(tmp_path / "run").pid == os.getpid()  # type: ignore[union-attr]
    assert "process 4242 on host elsewhere" in caplog.messages[0] and "watching" in caplog.messages[0]


def test_a_holder_on_another_host_whose_counter_advances_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    holder, done = forge(tmp_path / "run"), threading.Event()

    def live() -> None:
        counter = 2
        while not done.wait(0.1):
            beat(tmp_path / "run", holder, counter)
            counter += 1

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="process 4242 on host elsewhere"), hold(tmp_path / "run"):
            pass
    finally:
        done.set()
        thread.join()


def test_of_many_that_take_over_at_once_one_succeeds(tmp_path: Path) -> None:
    gone = replace(module._myself(number=1), process_start=1)
    beat(tmp_path / "run", gone, 1)
    start, won, refused = threading.Barrier(8), [], []

    def take() -> None:
        start.wait()
        try:
            won.append(module._take(tmp_path / "run"))
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    won[0].release()


def test_a_lease_that_is_replaced_while_it_is_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(tmp_path / "run", module._myself(number=1), 1)
    listed = module._files

    def list_and_replace(run_dir: Path) -> list[tuple[Path, int]]:
        found = listed(run_dir)
        if found[0][1] == 1:
            beat(run_dir, module._myself(number=2), 1)
            found[0][0].unlink()
        return found

    monkeypatch.setattr(module, "_files", list_and_replace)
    newest = module.read_holder(tmp_path / "run")
    assert newest is not None and newest.number == 2


def test_a_lease_given_back_is_free_and_its_number_is_not_used_again(tmp_path: Path, never_watches: None) -> None:
    for number in (1, 2, 3):
        with hold(tmp_path / "run") as lease:
            assert lease.me.number == number
        assert [path.name for path in tmp_path.iterdir()] == [f".run.lease-{number}"]
    holder = read_holder(tmp_path / "run")
    assert holder is not None and holder.released


def test_a_file_that_is_no_lease_is_watched_like_one(tmp_path: Path, hurried: None) -> None:
    (tmp_path / ".run.lease-7").write_text("half of a le")
    with hold(tmp_path / "run") as lease:
        assert lease.me.number == 8


FROZEN = """
import sys, time
from pathlib import Path
from rollcall.base import lease as module
module._place = lambda: "another boot"
module.BEAT_S, module.SURE_S = 0.1, 2.0
run_dir = Path(sys.argv[1])
with module.hold(run_dir) as lease:
    print("held", flush=True)
    with (run_dir.parent / "written").open("a") as file:
        while True:
            lease.check()
            file.write("x")
            file.flush()
            time.sleep(0.01)
"""


def test_a_holder_that_was_frozen_while_another_took_over_writes_nothing_more(
    tmp_path: Path, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 3.0)  # as ever, longer than a holder is sure of itself
    other = held_by_another(tmp_path / "run", FROZEN)
    while not (tmp_path / "written").exists() or not (tmp_path / "written").stat().st_size:
        time.sleep(0.01)
    other.send_signal(signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    written = (tmp_path / "written").stat().st_size
    with hold(tmp_path / "run"):
        other.send_signal(signal.SIGCONT)
        assert other.wait() == 1
        assert (tmp_path / "written").stat().st_size == written
    other.communicate()


def test_a_lost_lease_is_told_with_who_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    with hold(tmp_path / "run") as lease:
        lease.check()
        usurper = replace(module._myself(number=2), host="elsewhere", pid=99)
        beat(tmp_path / "run", usurper, 0)
        wait_until_lost(lease)
        with pytest.raises(LeaseLostError, match="taken over by process 99 on host elsewhere"):
            lease.check()
    assert read_holder(tmp_path / "run") is not None


def wait_until_lost(lease: Lease) -> None:
    for _ in range(200):
        if lease._lost is not None:
            return
        time.sleep(0.05)
    raise AssertionError("the holder does not notice")


def test_a_full_disk_does_not_stop_the_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    disk = small_disk(tmp_path / "disk", size="64k")
    try:
        with hold(disk / "run"):
            with pytest.raises(OSError, match="No space"):
                (disk / "ballast").write_bytes(bytes(1 << 20))
            before = read_holder(disk / "run")
            assert before is not None
            for _ in range(200):
                now = read_holder(disk / "run")
                if now is not None and now.counter > before.counter + 2:
                    break
                time.sleep(0.05)
            else:
                raise AssertionError("the counter stands still")
    finally:
        unmount(disk)


def test_a_lease_that_cannot_be_renewed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with hold(tmp_path / "run") as lease:
        for count in (1, 2):
            with monkeypatch.context() as patched:
                patched.setattr(module.os, "pwrite", refuse)
                lease._beat()
                lease._beat()
            assert caplog.text.count("cannot renew the lease: Read-only file system; trying again every") == count
            lease._beat()


def test_a_folder_that_takes_no_lease_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module, "create_atomic", refuse)
    with pytest.raises(ConfigError) as told, hold(tmp_path / "run"):
        pass
    words = str(told.value)
    assert f"cannot write to the folder {tmp_path}: Permission denied; make the folder writable for " in words
    assert words.endswith(", or choose another run.dir") and "lease" not in words


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file, but a run needs a folder"), hold(tmp_path / "run"):
        pass
