"""Collects a node's facts and runs small experiments between nodes.

This file and ``nodes/interfaces.py`` are sent to the nodes as code. They use only the standard library and psutil, which Ray
installs, so a node with a wrong version of Rollcall, or without it, can still answer. Answers are plain dictionaries. Each
experiment is one method of ``Probe``, for which the doctor waits until a deadline.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from rollcall.nodes.interfaces import interface_of

GPU_FIELDS = ("index", "name", "memory.total", "memory.used")


class Probe:
    """Answers the doctor's questions on one node."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._meeting: socket.socket | None = None

    def facts(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Collect facts about the node. ``ask`` names packages, disks (purpose to path) and paths that must exist."""
        gpus, complaint = read_gpus()
        memory = psutil.virtual_memory()
        return {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "packages": {name: installed(name) for name in ask["packages"]},
            "torch_build": torch_build(),
            "disks": [disk(purpose, path) for purpose, path in ask["disks"].items()],
            "memory_total": memory.total,
            "memory_available": memory.available,
            "shm_total": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
            "gpus": gpus,
            "gpu_error": complaint,
            "missing_paths": [path for path in ask["paths"] if not os.path.exists(path)],
        }

    def listen(self, address: str) -> list[int]:
        """Accept connections on two ports until the probe ends: one in the range that clusters use, and one that the kernel
        chooses."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for ports in (random.sample(range(10_000, 32_000), 50), [0]):
            for port in ports:
                with suppress(OSError):  # the port is taken
                    listener = socket.create_server((address, port), family=family, backlog=128)
                    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
                    self._listeners.append(listener)
                    break
        return [listener.getsockname()[1] for listener in self._listeners]

    def reach(self, targets: list[tuple[int, str, int]], timeout_s: float) -> list[tuple[int, int, str]]:
        """Return (rank, port, why) for each target that cannot be reached."""
        failed: list[tuple[int, int, str]] = []
        for rank, address, port in targets:
            try:
                with socket.create_connection((address, port), timeout=timeout_s) as connection:
                    if connection.recv(2) != b"ok":
                        failed.append((rank, port, "another program answers at this port"))
            except OSError as error:
                failed.append((rank, port, str(error)))
        return failed

    def write(self, folder: str, name: str) -> str | None:
        """Write a file to the shared folder and return why that failed, if it did."""
        try:
            with open(os.path.join(folder, name), "w") as file:
                file.write(name)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return _why(error)
        return None

    def see(self, folder: str, names: list[str], timeout_s: float) -> dict[str, str]:
        """Return the files that did not appear with the right content in time, each with the reason."""
        ends = time.monotonic() + timeout_s
        while (missing := {name: why for name in names if (why := _unseen(folder, name))}) and time.monotonic() < ends:
            time.sleep(0.02)
        return missing

    def remove(self, folder: str, name: str) -> None:
        with suppress(OSError):  # the file was never written, or the folder is read-only; the findings report both
            os.remove(os.path.join(folder, name))

    def open_meeting(self, address: str) -> int:
        """Open a port where the ranks rendezvous for the all-reduce, and return it."""
        from rollcall.nodes.door import listen_at

        self._meeting = listen_at(address)
        return self._meeting.getsockname()[1]

    def all_reduce(self, address: str, meeting: tuple[str, int, str], *, rank: int, size: int, backend: str) -> float:
        """Return the bytes per second on each link in the fastest round. ``meeting``: rank 0's address, port and secret."""
        os.environ["CUDA_VISIBLE_DEVICES"] = "0" if backend == "nccl" else ""
        import torch

        from rollcall.learner.gang import Gang
        from rollcall.nodes.meeting import Place

        master, port, secret = meeting
        place, interface = Place(address=master, port=port, secret=secret), interface_of(address)
        device = torch.device("cuda:0" if backend == "nccl" else "cpu")
        gang = Gang.join(place, rank=rank, size=size, device=device, listener=self._meeting, interface=interface)
        num_bytes = 32 << 20
        data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        seconds: list[float] = []
        for _ in range(4):  # the first round opens connections
            data.fill_(1)
            gang.gather(None)  # waits for all ranks
            began = time.perf_counter()
            gang.sum_over(data)
            if backend == "nccl":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if not bool((data == float(size)).all()):
            raise RuntimeError("the all-reduce returned a wrong sum")
        gang.gather(None)
        gang.close()
        # A ring sends 2 (n - 1) / n of the data over each link.
        return num_bytes * 2 * (size - 1) / size / min(seconds[1:])


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"ok")


def _unseen(folder: str, name: str) -> str | None:
    try:
        with open(os.path.join(folder, name)) as file:
            return None if file.read() == name else "its content differs"
    except OSError as error:
        return _why(error)


def _why(error: OSError) -> str:
    return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> str:
    """Read what torch was built for from its version file. An import would take seconds, and fail if torch is broken."""
    spec, text = importlib.util.find_spec("torch"), ""
    if spec is not None and spec.origin is not None:
        with suppress(OSError), open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            text = file.read()
    for name, title in (("cuda", "CUDA"), ("hip", "ROCm")):
        if found := re.search(rf"^{name}\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return f"{title} {found[1]}"
    return "the CPU"


def disk(purpose: str, path: str) -> dict[str, Any]:
    """Return the free and total space on a path's disk, measured at the nearest folder that exists."""
    place = path
    while not os.path.exists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    usage = shutil.disk_usage(place)
    return {"purpose": purpose, "path": path, "free": usage.free, "total": usage.total}


def read_gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs, and an error message if nvidia-smi is installed but does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None
    command = [program, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:  # with a broken GPU it may never return
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        lines = (getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [], f"nvidia-smi failed: {lines[-1] if lines else error}"
    return [parse_gpu(line.split(",")) for line in done.stdout.splitlines() if line.strip()], None


def parse_gpu(row: list[str]) -> dict[str, Any]:
    """Parse a row with GPU_FIELDS, in which "[N/A]" marks a value that a GPU does not report."""
    index, name, *numbers = (cell.strip() for cell in row)
    total, used = (int(text) << 20 if text.isdigit() else 0 for text in numbers)
    return {"index": int(index), "name": name, "memory_total": total, "memory_used": used}
