"""What a node says of itself, and the small experiments nodes make with each other.

This file and ``net/interfaces.py`` are sent to the nodes as code and use only the standard library: a node with a wrong
rollcall, or none, must still be able to say so. Answers are plain dictionaries. Each experiment is one method of ``Probe``, one probe per node;
every method returns by the deadline it is given.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from rollcall.net.interfaces import interface_addresses, interface_of

SMI_S = 20.0  # nvidia-smi on a sick card may never return
GPU_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "temperature.gpu",
)  # fmt: skip
SLOWED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
PORTS = (10_000, 32_000)  # what clusters listen on, beside the kernel's own choice
BODY, COUNT = 8, 8192  # a file of the rename experiment is one number of 8 digits, 8192 times


class Probe:
    """One node's end of the examination."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._measuring: subprocess.Popen[str] | None = None

    def clock(self) -> float:
        return time.time()

    def facts(self, ask: dict[str, Any]) -> dict[str, Any]:
        """``ask``: packages (names), disks (purpose to path), paths (that must exist), address (this node's)."""
        gpus, driver, complaint = read_gpus()
        errors = [complaint] if complaint else []
        memory = read_meminfo()
        shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        interface = interface_of(ask["address"])
        return {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "executable": sys.executable,
            "packages": {name: installed(name) for name in ask["packages"]},
            **torch_build(),
            "driver": driver,
            "rocm": first_line("/opt/rocm/.info/version"),
            "disks": [disk(purpose, path) for purpose, path in ask["disks"].items()],
            "memory_total": memory.get("MemTotal", 0),
            "memory_available": memory.get("MemAvailable", 0),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "shm_total": shm.f_frsize * shm.f_blocks if shm else 0,
            "gpus": gpus,
            "interface": interface,
            "link_mbit": link_speed(interface),
            "missing_paths": [path for path in ask["paths"] if not os.path.exists(path)],
            "errors": errors,
        }

    # Ports

    def listen(self, address: str) -> list[int]:
        """Accept connections on two ports until the probe ends: one of ours, one of the kernel's choice."""
        for ports in (random.sample(range(*PORTS), 50), [0]):
            listener = _bind(address, ports)
            if listener is not None:
                threading.Thread(target=_accept, args=(listener,), daemon=True).start()
                self._listeners.append(listener)
        return [listener.getsockname()[1] for listener in self._listeners]

    def reach(self, targets: list[tuple[int, str, int]], timeout_s: float) -> list[tuple[int, int, str]]:
        """(rank, port, why) of those that cannot be connected to."""
        failed: list[tuple[int, int, str]] = []
        for rank, address, port in targets:
            try:
                with socket.create_connection((address, port), timeout=timeout_s) as connection:
                    connection.settimeout(timeout_s)
                    if connection.recv(2) != b"ok":
                        failed.append((rank, port, "somebody else answers there"))
            except OSError as error:
                failed.append((rank, port, str(error)))
        return failed

    def open_beside(self, address: str, port: int, timeout_s: float) -> list[str]:
        """This node's other addresses, but loopback, at which that port takes connections; nothing is said there."""
        found: list[str] = []
        for _, name in socket.if_nameindex():
            for other in interface_addresses(name):
                local = ipaddress.ip_address(other)
                if other == address or local.is_loopback or local.is_link_local:
                    continue
                # An error: it is closed there, as it should be.
                with suppress(OSError), socket.create_connection((other, port), timeout=timeout_s):
                    found.append(other)
        return found

    # The shared folder

    def write(self, folder: str, name: str, text: str) -> str | None:
        """None, or why it cannot be written."""
        try:
            scratch = os.path.join(folder, f".{name}")
            with open(scratch, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, os.path.join(folder, name))
        except OSError as error:
            return _why(error)
        return None

    def remove(self, folder: str, names: list[str]) -> None:
        for name in names:
            with suppress(OSError):  # never written, or the folder is read-only here; the findings say so
                os.remove(os.path.join(folder, name))

    def see(self, folder: str, expected: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """How long until all files are seen with their text; ``missing``: those that are not in time, and why."""
        began = time.monotonic()
        while True:
            missing = {name: why for name, text in expected.items() if (why := _unseen(folder, name, text))}
            seconds = time.monotonic() - began
            if not missing or seconds > timeout_s:
                return {"seconds": seconds, "missing": missing}
            time.sleep(0.02)

    def replace_often(self, folder: str, name: str, seconds: float) -> int:
        """Put a new file in another's place again and again; returns how often."""
        give_up, count = time.monotonic() + seconds, 0
        while time.monotonic() < give_up:
            count += 1
            scratch = os.path.join(folder, f".{name}-next")
            with open(scratch, "w") as file:
                file.write(f"{count:0{BODY}d}" * COUNT)
            os.replace(scratch, os.path.join(folder, name))
            time.sleep(0.005)
        return count

    def watch(self, folder: str, name: str, seconds: float) -> dict[str, Any]:
        """Read that file all the while: it is whole at every moment, or ``torn`` says what was seen instead."""
        give_up, reads, torn = time.monotonic() + seconds, 0, None
        while time.monotonic() < give_up:
            reads += 1
            try:
                with open(os.path.join(folder, name)) as file:
                    text = file.read()
            except OSError as error:
                if error.errno != errno.ESTALE:  # NFS: replaced while it was open; opening it again helps
                    torn = torn or f"it was not there ({_why(error)})"
                continue
            if len(text) != BODY * COUNT or text != text[:BODY] * COUNT:
                torn = torn or f"half of it was there ({len(text)} bytes)"
            time.sleep(0.001)
        return {"reads": reads, "torn": torn}

    # Bandwidth

    def start_measuring(self, task: dict[str, Any], address: str) -> int | None:
        """Start this node's rank of the all-reduce; the first rank returns the port at which the others meet it."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["CUDA_VISIBLE_DEVICES"] = "0" if task["backend"] == "nccl" else ""
        if interface := interface_of(address):
            environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        self._measuring = subprocess.Popen(
            [sys.executable, "-m", "rollcall.doctor.bandwidth"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._measuring.stdin is not None
        self._measuring.stdin.write(f"{json.dumps(task)}\n")
        self._measuring.stdin.flush()
        if task["port"] is not None:
            return None
        assert self._measuring.stdout is not None
        line = self._measuring.stdout.readline()
        return int(line) if line.strip().isdigit() else None

    def measured(self, timeout_s: float) -> dict[str, Any]:
        """``result``, one line of JSON, or ``error``."""
        assert self._measuring is not None
        try:
            out, errors = self._measuring.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._measuring.kill()
            self._measuring.communicate()
            return {"error": f"not finished after {timeout_s:.0f} s"}
        if self._measuring.returncode:
            return {"error": ([line for line in errors.splitlines() if line.strip()] or ["no message"])[-1]}
        return {"result": out.strip().splitlines()[-1]}


def _bind(address: str, ports: list[int]) -> socket.socket | None:
    """A listener on the first of these that is free."""
    for port in ports:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=128)
    return None


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"ok")


def _unseen(folder: str, name: str, text: str) -> str | None:
    try:
        with open(os.path.join(folder, name)) as file:
            return None if file.read() == text else "it has another text"
    except OSError as error:
        return _why(error)


def _why(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({code})" if code else "")


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> dict[str, str | None]:
    """What torch was built for, from its version file: importing it takes seconds, and fails where it is broken."""
    found: dict[str, str | None] = {"torch_cuda": None, "torch_hip": None}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return found
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            text = file.read()
    except OSError:
        return found
    for name in ("cuda", "hip"):
        match = re.search(rf"^{name}\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        found[f"torch_{name}"] = match.group(1) if match else None
    return found


def disk(purpose: str, path: str) -> dict[str, Any]:
    """Of the nearest folder that exists."""
    place = path
    while not os.path.exists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    usage = shutil.disk_usage(place)
    return {"purpose": purpose, "path": path, "free": usage.free, "total": usage.total}


def read_meminfo() -> dict[str, int]:
    """Bytes by name."""
    with open("/proc/meminfo") as file:
        rows = (line.split() for line in file)
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def first_line(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return None


def read_gpus() -> tuple[list[dict[str, Any]], str | None, str | None]:
    """The cards, their driver, and a complaint if nvidia-smi is there and does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None, None
    try:
        rows = _query(program, GPU_FIELDS)
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [], None, f"nvidia-smi fails: {said[-1] if said else error}"
    slowed: list[list[str]] = []
    for name in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # the older drivers' name
        try:
            slowed = _query(program, ("index", name))
            break
        except (subprocess.SubprocessError, OSError):
            continue
    reasons = {row[0]: row[1] for row in slowed if len(row) == 2}
    gpus = [parse_gpu(row, reasons.get(row[0], "0x0")) for row in rows if len(row) == len(GPU_FIELDS)]
    return gpus, (rows[0][2] if gpus else None), None


def _query(program: str, fields: tuple[str, ...]) -> list[list[str]]:
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def parse_gpu(row: list[str], reasons: str) -> dict[str, Any]:
    """A row of GPU_FIELDS; what a card does not report reads "[N/A]"."""

    def number(text: str) -> int | None:
        return int(float(text)) if re.fullmatch(r"[0-9.]+", text) else None

    mask = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
    return {
        "index": int(row[0]),
        "name": row[1],
        "memory_total": (number(row[3]) or 0) << 20,
        "memory_used": (number(row[4]) or 0) << 20,
        "ecc_uncorrected": number(row[5]),
        "temperature": number(row[6]),
        "slowed_by": [reason for bit, reason in SLOWED.items() if mask & bit],
    }


def link_speed(interface: str | None) -> int | None:
    """Mbit/s, where the driver says."""
    text = first_line(f"/sys/class/net/{interface}/speed") if interface else None
    return int(text) if text and text.isdigit() else None
