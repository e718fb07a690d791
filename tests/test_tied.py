"""Commands that a launcher runs on a machine: tied to its connection, and what they say of the machine."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollcall.base.errors import ClusterError
from rollcall.base.version import __version__
from rollcall.nodes.machine import Here, look_here, tied_to_stdin

WAIT_S = 60.0
TIED = """
import subprocess, sys
from rollcall.nodes.machine import tied_to_stdin
try:
    with tied_to_stdin():
        print("working", flush=True)
        {work}
    print("done", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print("undone", flush=True)
"""


def begin(work: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TIED.format(work=work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as sshd does
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell does in the background
    )
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    return process


def test_the_end_of_stdin_interrupts_a_command_and_what_it_runs() -> None:
    process = begin("subprocess.run(['sh', '-c', 'echo asleep; exec sleep 600'])")
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "asleep\n"  # a signal between fork and exec would be lost
    process.stdin.close()
    assert process.stdout.read() == "undone\n" and process.wait(WAIT_S) == 0


def test_after_the_work_the_end_of_stdin_means_nothing() -> None:
    process = begin("pass")
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.stdin.close()
    assert process.wait(WAIT_S) == 0


def test_a_machine_says_where_a_head_could_listen_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path / "state"))
    here = look_here("mine", interface=None)
    assert (here.version, here.rank) == (__version__, None) and int(here.address.rpartition(":")[2]) > 1024
    assert not (tmp_path / "state").exists()
    assert Here.of(f"Welcome!\n{{not json\n{here.model_dump_json()}\nbye\n") == here
    assert Here.of("nothing") is None


def test_a_closed_stdin_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(fd: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with monkeypatch.context() as patch, pytest.raises(ClusterError, match="stdin is already closed"):
        patch.setattr("rollcall.nodes.machine.os.fstat", closed)
        with tied_to_stdin():
            pass
