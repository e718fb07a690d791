"""SkyPilot on lab hosts: the real `sky` on a host outside Slurm, which reaches Slurm's login node by ssh.

SkyPilot installs itself on the nodes with uv. The hosts have no network, so they get what it downloads there: uv from a `curl` that
knows this one address, Python 3.10 of this machine, packages from a folder. ``scripts/setup_peers.sh`` makes both environments.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.lab import CHECKOUT, Host, Lab, LabError
from lab.slurm import SlurmLab, missing_for_slurm
from lab.sshd import missing_for_ssh, serve_ssh

PEERS = Path(os.environ.get("ROLLCALL_PEERS") or CHECKOUT / ".peers")
SKY, RUNTIME = PEERS / "skypilot", PEERS / "skypilot-runtime"
WHEELS = RUNTIME / "wheels"
START_S = 600.0  # of SkyPilot's server, with everything else that runs here
CLUSTER = "lab"  # what SkyPilot calls this Slurm
CURL = """\
#!/bin/sh
case "$*" in
*https://astral.sh/uv/install.sh*) echo 'mkdir -p "$UV_INSTALL_DIR" && cp {uv} "$UV_INSTALL_DIR/uv"' ;;
*) echo "there is no network for curl $*" >&2; exit 6 ;;
esac
"""
SLURM_CONFIG = """\
Host {cluster}
  HostName {login}
  User root
  IdentityFile ~/.ssh/id_ed25519
"""
# SkyPilot's nodes have their home folders in workdir. Managed jobs need no machine of their own: the API server looks after them.
SKY_CONFIG = """\
slurm:
  cluster_configs:
    {cluster}:
      workdir: {workdir}
jobs:
  controller:
    consolidation_mode: true
"""


def missing_for_skypilot() -> str | None:
    if not (SKY / "bin/uv").exists() or not WHEELS.exists():
        return f"SkyPilot in the lab needs python3.10 and scripts/setup_peers.sh {PEERS} skypilot"
    if shutil.which("rsync") is None:
        return "SkyPilot in the lab needs rsync (apt install rsync)"
    return missing_for_ssh() or missing_for_slurm()


needs_skypilot = pytest.mark.skipif(missing_for_skypilot() is not None, reason=missing_for_skypilot() or "")


def kept() -> list[Path]:
    """The environments that hosts need beside the lab's own, and the Pythons that they were made of."""
    return [each for env in (SKY, RUNTIME) for each in (env.absolute(), env.resolve(), _base(env))]


def _base(env: Path) -> Path:
    words = [env / "bin/python", "-c", "import sys; print(sys.base_prefix)"]
    return Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())


class SkyLab:
    """The last host of the lab is the ``laptop``, the others are ``slurm``."""

    def __init__(self, lab: Lab) -> None:
        *others, self.laptop = lab.hosts
        self.slurm = SlurmLab(lab, hosts=others)
        self.workdir = lab.shared / "sky"
        self.workdir.mkdir()
        serve_ssh([self.slurm.login], client=self.laptop)
        self._write_for_users_of_slurm()
        _write(self.laptop, ".slurm/config", SLURM_CONFIG.format(cluster=CLUSTER, login=self.slurm.login.ip))
        _write(self.laptop, ".sky/config.yaml", SKY_CONFIG.format(cluster=CLUSTER, workdir=self.workdir))
        self.env = {
            "PATH": f"{SKY.absolute()}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            # It builds a wheel of itself for the nodes.
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(WHEELS.absolute()),
        }
        self._start_server()

    @property
    def left(self) -> list[str]:
        """What runs on Slurm's hosts, without what the lab started there, and what lies in their shared folder."""
        hosts = (self.slurm.login, *self.slurm.nodes)
        running = [each for host in hosts for each in self.slurm.own_processes(host) if "sshd" not in each]
        return running + [str(path) for path in self.workdir.glob(".sky_clusters/*")]

    def _start_server(self) -> None:
        """Here, because several threads of one `sky status` start it, and on a busy machine one takes another's for dead (0.14)."""
        for words in (["sky", "api", "start"], ["sky", "check", "slurm"]):
            done = self.laptop.run(words, env=self.env, timeout_s=START_S)
            if done.returncode:
                raise LabError(f"{shlex.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}")

    def _write_for_users_of_slurm(self) -> None:
        """Variables that every session on the login node has; Slurm passes them on to the nodes."""
        folder = self.slurm.lab.shared / "bin"
        folder.mkdir()
        (folder / "curl").write_text(CURL.format(uv=shlex.quote(str(SKY.absolute() / "bin/uv"))))
        (folder / "curl").chmod(0o755)
        given: Mapping[str, str] = {
            **self.slurm.env,
            "UV_FIND_LINKS": str(WHEELS.absolute()),
            "UV_NO_INDEX": "1",
            "UV_OFFLINE": "1",
            "UV_PYTHON_DOWNLOADS": "never",
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
        lines.append(f'export PATH={shlex.quote(str(folder))}:"$PATH":{shlex.quote(str(_base(RUNTIME) / "bin"))}\n')
        for name in (".profile", ".bashrc"):  # of a login shell, and of a command that ssh runs
            _write(self.slurm.login, name, "\n".join(lines))


def _write(host: Host, name: str, text: str) -> None:
    """A file in the home folder of a host."""
    path = host.root / host.home.relative_to("/") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
