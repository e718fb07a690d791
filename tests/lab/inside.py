"""What runs as PID 1 in a lab: the rack, which holds the wires and all hosts, and in it one per host.

Run by path with the arguments of `rack` or `host`; it imports the standard library alone. Each prints its
network-namespace inode once it is ready, by which the owner finds it, and then reaps until it is killed. Killing the rack
kills the lab: the hosts' PID namespaces lie in the rack's. The rack waits for the owner: when the owner's process ends,
however it ends, the rack removes the lab's folder and exits.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

MS_BIND, MS_REC, MS_NOSUID = 4096, 16384, 2
_libc = ctypes.CDLL(None, use_errno=True)


def main(role: str, plan: str) -> NoReturn:
    settings = json.loads(plan)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    if role == "rack":
        rack(keep=settings["keep"], folder=settings["folder"], owner_fd=settings["owner_fd"])
    host(
        name=settings["name"], hide=settings["hide"], keep=settings["keep"], etc=settings["etc"], home=settings["home"]
    )


def rack(*, keep: list[str], folder: str, owner_fd: int) -> NoReturn:
    _hide(["/run"], keep=keep)  # `ip netns add` writes there; this way its names end with the rack
    # A packet to the outside is answered "unreachable" at once, where it would otherwise be waited for.
    for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", name).write_text("1")
    _ready()
    select.select([owner_fd], [], [])  # a pidfd: readable when the process has ended
    shutil.rmtree(folder, ignore_errors=True)  # the owner may be removing it too
    os._exit(0)


def host(*, name: str, hide: list[str], keep: list[str], etc: str, home: str) -> NoReturn:
    socket.sethostname(name)
    _hide([*hide, "/sys/fs/cgroup"], keep=keep, files=etc)
    os.chdir(home)
    _ready()
    while True:
        signal.pause()


def _hide(folders: list[str], *, keep: list[str], files: str | None = None) -> None:
    """Lay an empty tmpfs over each folder, and what is to be kept over that, at its own path.

    What is kept is opened first and bound through its descriptor: by then its path leads into the tmpfs.
    """
    kept = {path: os.open(path, os.O_PATH) for path in sorted(keep) if Path(path).exists()}
    over = {
        str(Path("/etc", file.name).resolve()): os.open(file, os.O_PATH) for file in Path(files or "/none").glob("*")
    }
    for folder in folders:
        if os.path.isdir(folder):
            mode = "mode=1777" if os.stat(folder).st_mode & 0o1000 else "mode=755"
            _mount("tmpfs", folder, kind="tmpfs", flags=MS_NOSUID, data=mode)
    for path, descriptor in kept.items():
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND | MS_REC)
    for path, descriptor in over.items():
        if os.path.exists(path):  # a name that this system has no file for needs no other one either
            _mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND)
    for descriptor in (*kept.values(), *over.values()):
        os.close(descriptor)


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0, data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount on {target}: {os.strerror(code)}")


def _ready() -> None:
    """Say so, and let go of the pipe that says it."""
    os.write(1, b"%d\n" % os.stat("/proc/self/ns/net").st_ino)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
