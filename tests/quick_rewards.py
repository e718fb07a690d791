"""Reward processes that are forked, with everything imported, instead of started: for the many short runs of the tests.

    tests --a socket: environment, folder, file descriptors--> server --fork--> keeper --fork--> reward process
      ^                                                                           |
      +------------------a pipe: its number, at the end its status-----------------+

The server has one thread and has imported what a reward process imports, so that a process forked from it is like a started
one, without a third of the work of a run of one step. The processes of test_reward.py are started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

WAIT_S = 600.0
MOST_BYTES = 1 << 20
owner = 0  # the process that has a server: that of the tests, or one of `fork_server`
_lock = threading.Lock()
_servers: list[socket.socket] = []  # none or one


def start(command: list[str], **options: Any) -> Any:
    is_forked = os.getpid() == owner and "rollcall.reward.worker:RewardWorker" in command
    return (Forked if is_forked else subprocess.Popen)(command, **options)


SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": start})  # for the module that starts processes


class Forked:
    """A reward process, by the names of `subprocess.Popen`."""

    def __init__(
        self,
        command: list[str],
        *,
        pass_fds: tuple[int, ...],
        stdout: int,
        env: Mapping[str, str],
        cwd: str | None,
        **_: Any,
    ) -> None:
        status, its_status = os.pipe()
        message = json.dumps({"env": dict(env), "cwd": cwd or os.getcwd(), "target": command[3]}).encode()
        with _lock:
            socket.send_fds(_servers[0] if _servers else _start_server(), [message], [its_status, stdout, *pass_fds])
        os.close(its_status)
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """The limit is not kept: it is for kernels that do not let go of a killed process."""
        if self.returncode is None:
            with self._status:
                self.returncode = int(self._status.readline())
        return self.returncode


def fork_server() -> None:
    """For a forked process that will train: it has one thread yet, and everything imported."""
    global owner
    owner = os.getpid()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        os.setsid()
        serve(there)
        os._exit(0)
    there.close()
    here.settimeout(WAIT_S)
    _servers[:] = [here]


def _start_server() -> socket.socket:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, __file__, str(there.fileno())],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
        stdin=subprocess.DEVNULL,
        pass_fds=[there.fileno()],
        start_new_session=True,  # Ctrl-C is for the tests
    )
    there.close()
    here.settimeout(WAIT_S)
    _servers.append(here)
    return here


def serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MOST_BYTES, 16)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _keep(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: dict[str, Any], status: int, output: int, *passed: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _be_a_reward_process(request, status, output, *passed)
    for descriptor in (output, *passed):
        os.close(descriptor)
    # Its number stays its own until somebody has asked for its status, as with a child of the tests.
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    try:
        os.write(status, f"{code}\n".encode())
    except BrokenPipeError:
        pass  # the tests have ended
    asked = select.poll()
    asked.register(status, 0)
    asked.poll()  # for the other end to close
    os._exit(0)


def _be_a_reward_process(request: dict[str, Any], status: int, output: int, *passed: int) -> NoReturn:
    from rollcall.process import child

    code = 1
    try:
        os.setsid()
        os.write(status, f"{os.getpid()}\n".encode())
        os.close(status)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        sys.path[0] = request["cwd"]  # as `python -m` does
        child.main([request["target"], *map(str, passed)])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import rollcall.reward.worker  # noqa: F401 - what is forked has it

    serve(socket.socket(fileno=int(sys.argv[1])))
