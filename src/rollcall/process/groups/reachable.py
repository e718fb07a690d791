"""Lets other processes on the host find, inspect and profile a process of a run, without opening a port.

The process describes itself in a small file in its memory. Other processes find this file through ``/proc``, as they find a pulse
(pulse.py). py-spy reads the stacks; only the process's own user and root may do that.

If the kernel lets a process read only its own children (``kernel.yama.ptrace_scope`` is 1, as on Ubuntu), a reachable
process allows every process of its user to read it, because the reader (a command in another shell, or the process that watches a
node) is not its parent. It grants this permission in advance, so its stacks can be read even when it hangs or is suspended. Only this
process can be read: its children, such as reward and environment processes, do not inherit the permission.

For profiling, a thread listens on an abstract Unix socket, whose name contains the process id; it answers only the same user and
root. It runs torch's profiler for the requested time and sends the trace back. It is a separate thread, so a profiler failure does
not affect the rest of the process. If the requester disconnects, it stops the profiler at once and discards the trace.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rollcall.base.process_table import Process, command_of, descendants
from rollcall.nodes.framing import frame, is_own_users, json_frame, read_exactly, read_frame, read_json_frame
from rollcall.process.groups.pulse import look, memory_file

ABOUT = "rollcall-about"
PAGE = 4096
SPY_S = 60.0  # py-spy reads the symbols of large libraries for native frames
START_S = 120.0  # for the profiler to start: the first start loads libraries
END_S = 300.0  # for creating and sending a trace
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_descriptor = -1  # of the memory file that describes this process


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    title: str  # such as "actor 0 + rollout 0"; empty: it is not part of a run at the moment
    roles: tuple[str, ...] = ()
    run: str = ""  # the run directory as its host sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    function: str
    file: str
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    thread: str  # its number, name and state
    frames: list[Frame]  # innermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The threads of a process at one moment."""

    title: str
    pid: int
    state: str  # psutil's status, such as sleeping
    doing: str  # a worker's current call; empty: none, or it is not a worker
    busy_s: float
    threads: list[Thread]
    error: str  # why the stacks cannot be read


def be_reachable(about: About) -> None:
    """Let other processes find this process, read its stacks and profile it. A second call changes the description."""
    global _descriptor
    if _descriptor < 0:
        _descriptor = os.memfd_create(ABOUT)  # stays open so that others can find it
        serve_profiles()
    # A kernel without this restriction rejects the call, but needs no permission.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY if about.title else 0, 0, 0, 0)
    os.pwrite(_descriptor, json.dumps(asdict(about)).encode().ljust(PAGE, b"\0")[:PAGE], 0)


def _forget() -> None:
    """Drop the file in a forked child, because it does not describe the child."""
    global _descriptor
    if _descriptor >= 0:
        os.close(_descriptor)
    _descriptor = -1


os.register_at_fork(after_in_child=_forget)


@contextmanager
def reachable(about: About) -> Iterator[None]:
    """Make this process reachable during the block. After the block, it belongs to no run."""
    be_reachable(about)
    try:
        yield
    finally:
        be_reachable(About(title=""))


def about_process(pid: int) -> About | None:
    """Read a process's description of itself; return None if the process is not reachable or is gone."""
    path = memory_file(pid, ABOUT)
    try:
        found: dict[str, Any] = json.loads(path.read_bytes().rstrip(b"\0")) if path is not None else {}
        return About(title=found["title"], roles=tuple(found["roles"]), run=found["run"])
    except (OSError, ValueError, KeyError):
        return None


def reachable_here(*, run: str | None = None) -> dict[int, About]:
    """Return the processes on this host that are part of a run (of ``run``, if it is set), by process id."""
    found = {pid: about for pid in sorted(psutil.pids()) if (about := about_process(pid)) is not None and about.title}
    return {pid: about for pid, about in found.items() if run is None or about.run == run}


def stacks_here(*, run: str | None = None, native: bool = False) -> list[Stacks]:
    """Return the stacks of the runs' processes on this host and of their children, such as those that run reward functions."""
    known = reachable_here(run=run)
    titles: dict[int, str] = {pid: about.title for pid, about in known.items()}
    for pid, about in known.items():
        for process in descendants(pid):
            if process.pid != os.getpid() and process.pid not in titles:
                titles[process.pid] = f"started by {about.title}: {command_of(process.pid)[:200].strip()}"
    found = []
    for pid, title in titles.items():
        seen, threads, error = look(pid), list[Thread](), ""
        try:
            threads = read_threads(pid, native=native)
        except UnreadableError as why:
            error = str(why)
        busy_s = round(seen.busy_s, 1)
        stacks = Stacks(
            title=title, pid=pid, state=seen.state, doing=seen.doing, busy_s=busy_s, threads=threads, error=error
        )
        found.append(stacks)
    return found


class UnreadableError(RuntimeError):
    """The stacks of a process cannot be read; the message says why."""


def read_threads(pid: int, *, native: bool = False, timeout_s: float = SPY_S) -> list[Thread]:
    """Read all stacks of a Python process with py-spy, even if it hangs in C or is suspended.

    Reading native frames pauses the process for a moment; reading Python frames does not. If a running process changes its stacks
    during the read, they are read again.
    """
    command, deadline, why = [py_spy(), "dump", "--pid", str(pid), "--json"], time.monotonic() + timeout_s, ""
    # Native frames are not available on every architecture, nor for a suspended process.
    for options in ([["--native"]] if native else []) + 5 * [["--nonblocking"]]:
        left_s = max(deadline - time.monotonic(), 0.1)
        try:
            done = subprocess.run(
                [*command, *options], capture_output=True, text=True, timeout=left_s, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnreadableError(str(error)) from None
        if done.returncode == 0:
            return [_thread(found) for found in json.loads(done.stdout)]
        why = _complaint(done.stderr)
        if Process.of(pid) is None:
            raise UnreadableError("the process has ended")
    raise UnreadableError(why)


def _thread(found: Mapping[str, Any]) -> Thread:
    state = "+".join(["active" if found["active"] else "idle", *(["gil"] if found["owns_gil"] else [])])
    frames = [
        Frame(function=frame["name"], file=frame["filename"], line=frame["line"] or None) for frame in found["frames"]
    ]
    name = f' "{found["thread_name"]}"' if found["thread_name"] else ""
    return Thread(thread=f"{found['os_thread_id'] or found['thread_id']}{name} ({state})", frames=frames)


def _complaint(stderr: str) -> str:
    """Return py-spy's error and its cause, without py-spy's own stack trace.

    >>> _complaint("Error: Failed to open\\n\\nCaused by:\\n    0: denied\\n    1: denied\\n\\nStack backtrace:\\n   0: main\\n")
    'py-spy: Failed to open: denied'
    """
    lines = [line.strip() for line in stderr.partition("Stack backtrace")[0].splitlines() if line.strip()]
    causes = [line.partition(": ")[2] for line in lines if line[0].isdigit()]
    first = lines[0].removeprefix("Error: ") if lines else "it printed nothing"
    return ": ".join(["py-spy", first, *dict.fromkeys(causes)])


def as_text(threads: Sequence[Thread]) -> str:
    """Format each thread with its frames, innermost first."""
    lines: list[str] = []
    for thread in threads:
        lines.append(f"Thread {thread.thread}")
        lines += [f"    {one.function} ({one.file}{f':{one.line}' if one.line else ''})" for one in thread.frames]
    return "\n".join(lines)


def py_spy() -> str:
    """Return the path of py-spy, which is installed with Rollcall."""
    path = Path(sysconfig.get_path("scripts"), "py-spy")
    return str(path) if path.exists() else path.name


class ProfileError(RuntimeError):
    """The process cannot be profiled; the message says why."""


def _name(process: Process) -> str:
    return f"\0rollcall-profile-{process.pid}-{process.started}"


def serve_profiles() -> None:
    """Answer requests for profiles in a thread. If it may not create sockets, this process still runs but cannot be profiled."""
    if (own := Process.of(os.getpid())) is None:  # a sandbox may show the /proc of a different process namespace
        return
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_name(own))
        server.listen(1)
    except OSError:
        server.close()
        return
    threading.Thread(target=_serve, args=(server,), name="waits to be profiled", daemon=True).start()


def _serve(server: socket.socket) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            try:
                if is_own_users(peer):
                    peer.settimeout(5.0)
                    _answer(peer, float(read_json_frame(partial(read_exactly, peer.recv))["seconds"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the caller has disconnected, or is not a Rollcall process


def _answer(peer: socket.socket, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="rollcall-profile-") as folder:
        path = Path(folder) / "trace.json.gz"
        try:
            if not _profile(path, peer, seconds=min(seconds, 600.0)):
                return
            data, error = path.read_bytes(), ""
        except Exception as found:  # noqa: BLE001 - torch may raise anything; the error is sent to the requester
            data, error = b"", f"{type(found).__name__}: {found}"
        peer.settimeout(END_S)
        peer.sendall(json_frame({"error": error}) + frame(data))


def _profile(path: Path, peer: socket.socket, *, seconds: float) -> bool:
    """Profile this process and write the trace to ``path``. If the caller disconnects, return False and write nothing."""
    if "torch" not in sys.modules:
        raise ProfileError("the process has not loaded torch")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints into the run's output
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append(ProfilerActivity.CUDA)
    # Without this, it records only the kernels of the other threads.
    profiler = profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    peer.sendall(json_frame({}))  # reports that the profiler has started
    try:
        is_gone = bool(select.select([peer], [], [], seconds)[0])  # readable: the caller has disconnected
    finally:
        profiler.stop()
    if not is_gone:
        profiler.export_chrome_trace(str(path))
    return not is_gone


def profile_process(pid: int, *, seconds: float) -> bytes:
    """Profile a process on this host and return the trace as gzipped JSON. Raise ``ProfileError`` if that fails."""
    if (process := Process.of(pid)) is None:
        raise ProfileError("the process has ended")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(_name(process))
            line.sendall(json_frame({"seconds": seconds}))
            line.settimeout(START_S)
            read = partial(read_exactly, line.recv)
            answer = read_json_frame(read)
            if "error" not in answer:  # it has started
                line.settimeout(seconds + END_S)
                answer = read_json_frame(read)
            if answer["error"]:
                raise ProfileError(answer["error"])
            return read_frame(read)
        except TimeoutError:
            raise ProfileError(
                "the process did not answer in time: another command may be profiling it, or it hangs in a call (see `rollcall stacks`)"
            ) from None
        except OSError as error:
            raise ProfileError(
                f"the process refused to be profiled, or has ended ({error.strerror or error})"
            ) from None
