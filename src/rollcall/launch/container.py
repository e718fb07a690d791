"""A node's command inside a container: the words that the runtime takes, and the lines of shell that provide the image.

Only named variables get in; their values come from the environment of the command, never from its words. The network is the
host's: Ray's ports are the node's own.
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
    folders: tuple[str, ...] = ()  # of the launch, mounted with the user's

    @property
    def is_daemon(self) -> bool:
        """Whether the runtime keeps containers by name. apptainer's are plain processes of the node."""
        return self.section.runtime in ("docker", "podman")

    def before(self) -> list[str]:
        """Lines of shell that build a missing image and remove an old container of this name."""
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
        """``words`` in a new container; with ``detach`` it keeps running when this command returns."""
        section, mounts = self.section, mounts_of(self.section, self.folders)
        if not self.is_daemon:
            gpus = {"cuda": ["--nv"], "rocm": ["--rocm"]}.get(self.gpu, [])
            binds = [word for mount in mounts for word in ("--bind", mount)]
            return ["apptainer", "exec", "--cleanenv", *gpus, *binds, section.image, *words]
        start = [section.runtime, "run", "--name", self.name, "--network", "host", "--shm-size", section.shm, "--init"]
        if section.runtime == "docker":  # podman's containers have the limits of its caller, which a user cannot raise
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
        """A shell in it that reads its script from stdin, while the node runs there too."""
        if self.is_daemon:
            return [self.section.runtime, "exec", "--interactive", self.name, "bash", "-s"]
        return self.run(["bash", "-s"], variables=())

    def exports(self, variables: Iterable[str]) -> list[str]:
        """Lines of shell that hand variables to a runtime which takes them from the environment under another name."""
        if self.is_daemon:
            return []
        return [f'[ -z "${{{name}+set}}" ] || export APPTAINERENV_{name}="${name}"' for name in variables]

    def stop(self) -> list[str] | None:
        """The words that end it. apptainer's ends with its command."""
        return [self.section.runtime, "rm", "--force", self.name] if self.is_daemon else None


def mounts_of(section: ContainerSection, folders: Iterable[str | Path]) -> list[str]:
    """The user's mounts, and folders of the launch, as PLACE:INSIDE."""
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in section.mounts]
    return [*given, *(f"{folder}:{folder}" for folder in folders)]


def container_of(
    launch: LaunchSection, cluster: ClusterSection, *, name: str, folders: Sequence[Path] = ()
) -> Container | None:
    section = launch.container
    if section is None:
        return None
    if section.runtime == "enroot":
        raise LaunchError(
            "launch.container.runtime=enroot needs Slurm with pyxis; use docker, podman or apptainer here"
        )
    gpu = "none" if cluster.accelerator == "cpu" else launch.gpu
    return Container(section=section, name=f"rollcall-{name}", gpu=gpu, folders=tuple(map(str, folders)))
