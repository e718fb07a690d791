"""Forks a group's workers from one process on each node, the *zygote*, which imports torch and Rollcall only once.

A new interpreter spends seconds of CPU time on these imports, and minutes on a busy shared file system, for every worker on a
node and again for every replacement. So instead of ``python default_worker.py ...``, Ray starts
``python -m rollcall.process.ray.zygote default_worker.py ...`` (py_executable of the runtime environment). This small process, the
*stub*, passes its arguments, variables, folder and standard streams to the zygote, whose child becomes the worker. The first stub on a
node starts the zygote. If the zygote does not answer in time, the stub becomes the worker itself, as Ray intended.

Who waits for whom: a stub waits for its worker to exit, and exits with the same status. If a stub is killed, its worker is killed too.
The zygote exits when the node's raylet exits, when its group ends, or after ``IDLE_S`` without a worker. It must never touch CUDA,
because its forked workers could then no longer use CUDA.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from rollcall.base.importing import uncollected
from rollcall.nodes.framing import is_own_users, json_frame, read_exactly, read_json_frame

MODULES = "ROLLCALL_ZYGOTE_MODULES"  # the modules that the zygote imports
GROUP = "ROLLCALL_ZYGOTE_GROUP"  # each group has one zygote per node
COMMAND = '"$ROLLCALL_PYTHON" -m rollcall.process.ray.zygote'  # a bash line, on a node that `rollcall node` started
ANSWER_S = 240.0  # ray_start.TUNED: Ray gives up on a worker that has not registered after 300 s
IDLE_S = 30.0  # a stub may start a zygote just when its run has ended
LOOK_S = 0.1  # between two checks for workers that have exited
FORKED = b"f"  # the first byte of the zygote's answer; the second is the worker's exit status


def main(arguments: list[str]) -> int:
    """Run the stub; return the worker's exit status."""
    answer = None
    if (zygote := _connect()) is not None:
        zygote.settimeout(ANSWER_S)
        request = {"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
        with suppress(OSError):  # the zygote is too slow, or has exited
            socket.send_fds(zygote, [FORKED], [0, 1, 2])
            zygote.sendall(json_frame(request))
            answer = zygote.recv(1)
            zygote.settimeout(None)
    if zygote is None or answer != FORKED:
        os.execv(sys.executable, [sys.executable, *arguments])
    status = zygote.recv(1)
    return status[0] if status else 1  # no status: the zygote was killed


def _connect() -> socket.socket | None:
    """Connect to the group's zygote on this node, and start it if there is none. Return None if that fails."""
    address = f"\0rollcall-zygote-{os.environ[GROUP]}"  # in the abstract namespace, without a file
    for _ in range(2):
        zygote = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            zygote.connect(address)
        except ConnectionRefusedError:
            zygote.close()
            _start(address)
            continue
        return zygote if is_own_users(zygote) else None
    return None


def _start(address: str) -> None:
    """Fork the zygote, unless another stub has just done so."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
    except OSError:  # another stub has bound the address and is about to listen
        listener.close()
        time.sleep(0.1)
        return
    listener.listen(1024)
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        _serve(listener)
    os.waitpid(child, 0)
    listener.close()


def _serve(listener: socket.socket) -> NoReturn:
    """Run the zygote. Stubs that arrive during its imports wait in the listener's queue."""
    with uncollected():
        for module in os.environ[MODULES].split():
            importlib.import_module(module)
    nothing = os.open(os.devnull, os.O_RDWR)
    # Until now, these were the first stub's streams, so that errors during the imports are shown.
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    gc.collect()
    gc.freeze()  # otherwise a collection in a worker would write to the shared pages, and thereby copy them
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent ignores it, a worker's status would be lost
    raylet, since_s = int(os.environ.get("RAY_RAYLET_PID", "0")), time.monotonic()
    stubs: dict[int, socket.socket] = {}  # by their worker's process id
    while True:
        ready, _, _ = select.select([listener, *stubs.values()], [], [], LOOK_S)
        for pid in [pid for pid, stub in stubs.items() if stub in ready]:  # readable: the stub was killed
            os.kill(pid, signal.SIGKILL)
            stubs.pop(pid).close()
        if listener in ready:
            stub, _ = listener.accept()
            if (pid := _fork(stub, keep_out=[listener, *stubs.values()])) is not None:
                stubs[pid] = stub
        for pid, status in _ended():
            if pid in stubs:
                with stubs.pop(pid) as stub, suppress(OSError):  # the stub was killed
                    stub.sendall(bytes([status & 0xFF]))
        if stubs:
            since_s = time.monotonic()
        if time.monotonic() - since_s > IDLE_S or (raylet and not stubs and not os.path.exists(f"/proc/{raylet}")):
            os._exit(0)


def _ended() -> Iterator[tuple[int, int]]:
    """Yield each child that has exited, with its exit status."""
    with suppress(ChildProcessError):  # there is no child
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _fork(stub: socket.socket, *, keep_out: list[socket.socket]) -> int | None:
    """Fork the worker that this stub requests, and return its process id. In the worker, this does not return."""
    if not is_own_users(stub):
        stub.close()
        return None
    stub.settimeout(ANSWER_S)
    try:
        _, streams, _, _ = socket.recv_fds(stub, 1, 3)
        request = read_json_frame(partial(read_exactly, stub.recv))
    except OSError:
        stub.close()
        return None
    stub.settimeout(None)
    if (pid := os.fork()) == 0:
        for other in (*keep_out, stub):
            other.close()
        _become_worker(request, streams)
    for stream in streams:
        os.close(stream)
    with suppress(OSError):  # the stub was killed
        stub.sendall(FORKED)
    return pid


def _become_worker(request: dict[str, Any], streams: list[int]) -> NoReturn:
    os.setpgid(0, 0)  # the raylet kills a worker's whole process group
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python's own generator reseeds itself
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
