"""Helps launchers: describes a machine before a node starts on it, and ties commands to the launcher's connection."""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel

from rollcall.base.errors import ClusterError
from rollcall.base.version import __version__, installed
from rollcall.nodes.address import free_ports, is_loopback, join_address, own_address, split_address
from rollcall.nodes.bootstrap import is_running
from rollcall.nodes.cluster import compared
from rollcall.nodes.state import read_record, sole_owner


class Here(BaseModel, extra="forbid", strict=True, frozen=True):
    version: str  # Rollcall's
    host: str  # its own host name
    address: str  # HOST:PORT where a head could listen, or where it listens if rank 0 already runs on this machine
    is_alone: bool  # other machines cannot reach that address
    rank: int | None  # `None` if the machine is not a node of the cluster
    versions: dict[str, str] = {}  # must be the same on all nodes

    @classmethod
    def of(cls, text: str) -> Here | None:
        """Parse the last line that contains a description; a login shell may print other lines before it."""
        for line in reversed(text.splitlines()):
            if line.startswith("{"):
                try:
                    here = cls.model_validate_json(line)
                    split_address(here.address)
                except (ValueError, ClusterError):
                    continue
                if f"{here.version}{here.host}{here.address}{''.join(here.versions.values())}".isprintable():
                    return here
        return None


def look_here(cluster: str, *, interface: str | None) -> Here:
    ip = own_address(toward=None, node_ip=None, interface=interface)
    with sole_owner(cluster):  # the lock leaves no files behind on a machine that is not a node
        record = read_record(cluster)
    running = record if record is not None and is_running(record) else None
    is_head = running is not None and running.rank == 0
    return Here(
        version=__version__,
        host=socket.gethostname(),
        address=running.head_address if running and is_head else join_address(ip, free_ports(1)[0]),
        is_alone=is_loopback(ip),
        rank=running.rank if running else None,
        versions={"Python": compared(platform.python_version()), "Ray": installed("ray"), "torch": installed("torch")},
    )


@contextmanager
def tied_to_stdin() -> Iterator[None]:
    """When stdin closes, interrupt this command and its children, as Ctrl-C in a terminal would. A closed stdin means that the launcher
    has exited or wants to stop. The command then cleans up."""
    try:
        os.fstat(0)
    except OSError:  # a different file could get descriptor 0
        raise ClusterError(
            "--tied ends the command when its stdin closes, but stdin is already closed; keep it open"
        ) from None
    done = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            continue
        if not done.is_set():
            os.killpg(0, signal.SIGINT)

    # A shell starts background commands with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, name="stdin", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
