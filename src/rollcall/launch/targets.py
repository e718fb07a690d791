"""The targets of `rollcall launch`, by name."""

from __future__ import annotations

from rollcall.launch.dstack import Dstack
from rollcall.launch.errors import LaunchError
from rollcall.launch.kuberay import Kuberay
from rollcall.launch.skypilot import Skypilot
from rollcall.launch.slurm import Slurm
from rollcall.launch.ssh.target import Ssh
from rollcall.launch.target import Target


def target_names() -> list[str]:
    return list(_all())


def get_target(name: str) -> Target:
    found = _all()
    if name not in found:
        raise LaunchError(f"{name!r} is not a target; use one of {', '.join(found)}")
    return found[name]


def _all() -> dict[str, Target]:
    targets: list[Target] = [Ssh(), Slurm(), Skypilot(), Dstack(), Kuberay()]
    return {target.name: target for target in targets}
