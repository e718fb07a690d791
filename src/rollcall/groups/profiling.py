"""A process that can be profiled by another one of its host, while it works.

A thread waits at a Unix socket without a file, whose name has the process id; it answers only the same user and root. It runs torch's
profiler for as long as it is asked and sends the trace back. It works in its own thread, so a profiler that fails ends nothing.
If the one who asked is gone, it stops the profiler at once and throws the trace away.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from rollcall.process_table import Process

LONGEST_S = 600.0
REQUEST_S = 5.0  # for the one who asks to say what
START_S = 120.0  # for the profiler to start: the first time it loads libraries
END_S = 300.0  # for a trace to be made and sent
_PEER = struct.Struct("3i")  # process, user, group


class ProfileError(RuntimeError):
    """The process cannot be profiled; the message says why."""


def _name(process: Process) -> str:
    return f"\0rollcall-profile-{process.pid}-{process.started}"


def serve_profiles() -> None:
    """Answer from now on, in a thread. Where sockets are refused, this process cannot be profiled, and runs as well."""
    own = Process.of(os.getpid())
    if own is None:
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
                _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
                if user not in (0, os.getuid()):
                    continue
                peer.settimeout(REQUEST_S)
                asked = json.loads(peer.makefile("rb").readline(1000))
                _answer(peer, float(asked["seconds"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the one who asked is gone, or is not one of ours


def _answer(peer: socket.socket, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="rollcall-profile-") as folder:
        path = Path(folder) / "trace.json.gz"
        try:
            _profile(path, peer, seconds=min(seconds, LONGEST_S))
            data, error = path.read_bytes(), ""
        except _GoneError:
            return
        except Exception as found:  # noqa: BLE001 - whatever torch raises is told, and ends nothing here
            data, error = b"", f"{type(found).__name__}: {found}"
        peer.settimeout(END_S)
        peer.sendall(json.dumps({"error": error, "bytes": len(data)}).encode() + b"\n")
        peer.sendall(data)


class _GoneError(Exception):
    """The one who asked is gone."""


def _profile(path: Path, peer: socket.socket, *, seconds: float) -> None:
    if "torch" not in sys.modules:
        raise ProfileError("it has not loaded torch")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints into the run's output
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append(ProfilerActivity.CUDA)
    options: dict[str, Any] = {}
    with contextlib.suppress(ImportError, TypeError):  # what the other threads do; without it, only kernels of theirs
        from torch._C._profiler import _ExperimentalConfig

        options["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=kinds, **options)
    profiler.start()
    peer.sendall(b"started\n")
    try:
        is_gone = bool(select.select([peer], [], [], seconds)[0])  # nothing more is sent, so it can only be the end
    finally:
        profiler.stop()
    if is_gone:
        raise _GoneError
    profiler.export_chrome_trace(str(path))


def profile_process(pid: int, *, seconds: float) -> bytes:
    """The trace of a process on this host, as gzipped JSON; raises ``ProfileError``."""
    process = Process.of(pid)
    if process is None:
        raise ProfileError("it has ended")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(_name(process))
            line.sendall(json.dumps({"seconds": seconds}).encode() + b"\n")
            answers = line.makefile("rb")
            line.settimeout(START_S)
            first = answers.readline(1 << 16)
            if first == b"started\n":
                line.settimeout(seconds + END_S)
                first = answers.readline(1 << 16)
            if not first:
                raise ProfileError("it refused, or ended meanwhile")
            head = json.loads(first)
            if head["error"]:
                raise ProfileError(head["error"])
            data = answers.read(head["bytes"])
        except TimeoutError:
            raise ProfileError(
                "it did not answer in time: it may be profiled already, or hang in a call (`rollcall stacks` shows it)"
            ) from None
        except OSError as error:
            raise ProfileError(f"it does not answer ({error.strerror or error})") from None
    if len(data) != head["bytes"]:
        raise ProfileError("it ended while it sent the trace")
    return data
