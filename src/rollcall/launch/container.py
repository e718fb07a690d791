"""Builds the command that runs a node inside a container, and the shell lines that provide its image.

A container gets only the variables that the command names. Their values come from the command's environment, never from its
arguments. Containers use the host's network, so Ray listens on the node's ports.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollcall.config.launch import ContainerSection, LaunchSection
from rollcall.config.sections import ClusterSection
from rollcall.launch.record import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    section: ContainerSection
    name: str
    gpu: str  # cuda, rocm, or none
    folders: tuple[str, ...] = ()  # the launch's folders, which are mounted in addition to the user's mounts

    @property
    def is_daemon(self) -> bool:
        """Whether the runtime manages its containers by name. An apptainer container is a plain process on the node."""
        return self.section.runtime in ("docker", "podman")

    def before(self) -> list[str]:
        """Return shell lines that build the image if it is missing and remove an old container with this name."""
        section, lines = self.section, []
        if self.is_daemon:
            tool, image = section.runtime, shlex.quote(section.image)
            if section.build is not None:
                build = shlex.join([tool, "build", "--tag", section.image, str(section.build)])
                lines.append(f"{tool} image inspect {image} >/dev/null 2>&1 || {build}")
            lines.append(f"{shlex.join([tool, 'rm', '--force', self.name])} >/dev/null 2>&1 || true")
        elif section.build is not None:
            built = shlex.join(["apptainer", "build", section.image, str(section.build)])
            lines.append(f"test -e {shlex.quote(section.image)} || {built}")
        return lines

    def run(self, words: Sequence[str], *, variables: Iterable[str], detach: bool = False) -> list[str]:
        """Return the command that runs ``words`` in a new container; with ``detach``, it runs in the background."""
        section, mounts = self.section, mounts_of(self.section, self.folders)
        if not self.is_daemon:
            gpus = {"cuda": ["--nv"], "rocm": ["--rocm"]}.get(self.gpu, [])
            binds = [word for mount in mounts for word in ("--bind", mount)]
            return ["apptainer", "exec", "--cleanenv", *gpus, *binds, section.image, *words]
        start = [section.runtime, "run", "--name", self.name, "--network", "host", "--shm-size", section.shm, "--init"]
        if section.runtime == "docker":  # podman containers get their caller's limits, which a user cannot raise
            start += ["--ulimit", "memlock=-1:-1"]
        start += [word for mount in mounts for word in ("--volume", mount)]
        amd = ("/dev/kfd", "/dev/dri") if self.gpu == "rocm" else ()
        start += [word for device in (*amd, *section.devices) for word in ("--device", device)]
        if self.gpu == "rocm":
            start += ["--group-add", "video", "--security-opt", "seccomp=unconfined"]
        elif self.gpu == "cuda":
            start += ["--gpus", "all"] if section.runtime == "docker" else ["--device", "nvidia.com/gpu=all"]
        start.append("--detach" if detach else "--rm")
        return [*start, *(word for name in variables for word in ("--env", name)), section.image, *words]

    def shell(self) -> list[str]:
        """Return the command for a shell in the node's container that reads its script from stdin."""
        if self.is_daemon:
            return [self.section.runtime, "exec", "--interactive", self.name, "bash", "-s"]
        return self.run(["bash", "-s"], variables=())

    def exports(self, variables: Iterable[str]) -> list[str]:
        """Return shell lines that export variables under the names from which apptainer reads them."""
        if self.is_daemon:
            return []
        return [f'[ -z "${{{name}+set}}" ] || export APPTAINERENV_{name}="${name}"' for name in variables]

    def stop(self) -> list[str] | None:
        """Return the command that removes the container, or None with apptainer, whose containers exit with their command."""
        return [self.section.runtime, "rm", "--force", self.name] if self.is_daemon else None


def mounts_of(section: ContainerSection, folders: Iterable[str | Path]) -> list[str]:
    """Return the user's mounts and the launch's folders as HOST_PATH:CONTAINER_PATH."""
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in section.mounts]
    return [*given, *(f"{folder}:{folder}" for folder in folders)]


def container_of(
    launch: LaunchSection, cluster: ClusterSection, *, name: str, folders: Sequence[Path] = ()
) -> Container | None:
    section = launch.container
    if section is None:
        return None
    if section.runtime == "enroot":
        raise LaunchError("launch.container.runtime=enroot needs Slurm with pyxis; use docker, podman or apptainer")
    gpu = "none" if cluster.accelerator == "cpu" else launch.gpu
    return Container(section=section, name=f"rollcall-{name}", gpu=gpu, folders=tuple(map(str, folders)))
