"""sshd on lab hosts, and a host from which they are reached: each with a key of its own, known to the other side."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.command import LabError
from lab.lab import Host, needs_lab

SSHD = "/usr/sbin/sshd"
START_S = 30.0
CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
UseDNS no
StrictModes no
PasswordAuthentication no
"""


def missing_for_ssh() -> str | None:
    absent = [tool for tool in (SSHD, "ssh", "ssh-keygen") if shutil.which(tool) is None]
    return f"needs {', '.join(absent)} (apt install openssh-server openssh-client)" if absent else None


def needs_ssh_lab(test):  # noqa: ANN001, ANN201
    return needs_lab(pytest.mark.skipif(missing_for_ssh() is not None, reason=missing_for_ssh() or "")(test))


def serve_ssh(hosts: Sequence[Host], *, client: Host) -> None:
    """sshd on ``hosts``. The user of ``client`` gets in with its own key, and knows the keys of all of them."""
    key = _inside(client, client.home / ".ssh/id_ed25519")
    if not key.exists():
        key.parent.mkdir(mode=0o700, exist_ok=True)
        make_key(key)
    known = []
    for host in hosts:
        folder = _inside(host, Path("/run/lab-sshd"))
        folder.mkdir()
        _inside(host, Path("/run/sshd")).mkdir(mode=0o755, exist_ok=True)
        make_key(folder / "host_key")
        (folder / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
        (folder / "config").write_text(CONFIG.format(folder="/run/lab-sshd"))
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        known.append(f"{host.name},{host.ip} {public}\n")
        start_sshd(host)
    with (key.parent / "known_hosts").open("a") as file:
        file.writelines(known)


def start_sshd(host: Host) -> None:
    host.start([SSHD, "-D", "-e", "-f", "/run/lab-sshd/config"])
    give_up = time.monotonic() + START_S
    # Port 22 in the kernel's list of sockets.
    while ":0016 00000000:0000 0A" not in (host.root / "proc/1/net/tcp").read_text():
        if time.monotonic() > give_up:
            raise LabError(f"sshd of {host.name} does not listen after {START_S:g} s")
        time.sleep(0.05)


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _inside(host: Host, path: Path) -> Path:
    """A path of the host, from outside."""
    return host.root / path.relative_to("/")
