"""A node's command inside a container: the words that the runtime takes, and the lines of shell that make the image be there.

Only variables that are named get in; their values come from the environment of the command, never from its words. The network is
the host's: Ray's ports are the node's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollcall.config.launch import ContainerSection, LaunchSection
from rollcall.config.sections import ClusterSection
from rollcall.launch.errors import LaunchError

PREFIX = "rollcall-"
ROCM_DEVICES = ("/dev/kfd", "/dev/dri")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    section: ContainerSection
    name: str
    gpu: str  # cuda, rocm, or none
    folders: tuple[str, ...] = ()  # of the launch itself, beside the user's mounts

    @property
    def is_daemon(self) -> bool:
        """Whether the runtime keeps containers by name. apptainer's are plain processes of the node."""
        return self.section.runtime in ("docker", "podman")

    @property
    def has_daemon_of_node(self) -> bool:
        """Whether its processes are children of a daemon, outside of what limits the command that starts them."""
        return self.section.runtime == "docker"

    def before(self) -> list[str]:
        """Lines of shell: build a missing image, remove an old container of this name."""
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
        """``words`` in a new container. ``detach``: it goes on when this command returns."""
        if self.is_daemon:
            options = ["--detach"] if detach else ["--rm"]
            inside = [word for name in variables for word in ("--env", name)]
            return [*self._start(), *options, *inside, self.section.image, *words]
        return [*self._apptainer(), self.section.image, *words]

    def shell(self) -> list[str]:
        """A shell in it that reads its script from stdin, while the node runs there too."""
        if self.is_daemon:
            return [self.section.runtime, "exec", "--interactive", self.name, "bash", "-s"]
        return self.run(["bash", "-s"], variables=())

    def exports(self, variables: Iterable[str]) -> list[str]:
        """Lines of shell that hand named variables to a runtime which takes them from the environment under another name."""
        if self.is_daemon:
            return []
        return [f'[ -z "${{{name}+set}}" ] || export APPTAINERENV_{name}="${name}"' for name in variables]

    def stop(self) -> list[str] | None:
        """Words that end it; None: it ends with its command."""
        return [self.section.runtime, "rm", "--force", self.name] if self.is_daemon else None

    def _start(self) -> list[str]:
        section = self.section
        words = [section.runtime, "run", "--name", self.name, "--network", "host", "--shm-size", section.shm]
        words.append("--init")
        if section.runtime == "docker":  # podman's containers have the limits of its caller, which a user cannot raise
            words += ["--ulimit", "memlock=-1:-1"]
        for mount in mounts_of(self.section, self.folders):
            words += ["--volume", mount]
        for device in (*(ROCM_DEVICES if self.gpu == "rocm" else ()), *section.devices):
            words += ["--device", device]
        if self.gpu == "rocm":
            words += ["--group-add", "video", "--security-opt", "seccomp=unconfined"]
        elif self.gpu == "cuda":
            words += ["--gpus", "all"] if section.runtime == "docker" else ["--device", "nvidia.com/gpu=all"]
        return words

    def _apptainer(self) -> list[str]:
        words = ["apptainer", "exec", "--cleanenv", *{"cuda": ["--nv"], "rocm": ["--rocm"]}.get(self.gpu, [])]
        for mount in mounts_of(self.section, self.folders):
            words += ["--bind", mount]
        return words


def mounts_of(section: ContainerSection, folders: Iterable[str | Path]) -> list[str]:
    """The user's mounts, and folders of the launch, as PLACE:INSIDE."""
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in section.mounts]
    return [*given, *(f"{folder}:{folder}" for folder in folders)]


def container_of(
    launch: LaunchSection, cluster: ClusterSection, *, name: str, folders: Sequence[Path] = ()
) -> Container | None:
    """None: the nodes run without one."""
    section = launch.container
    if section is None:
        return None
    if section.runtime == "enroot":
        raise LaunchError(
            "launch.container.runtime=enroot needs Slurm with pyxis; use docker, podman or apptainer here"
        )
    gpu = "none" if cluster.accelerator == "cpu" else launch.gpu
    return Container(section=section, name=f"{PREFIX}{name}", gpu=gpu, folders=tuple(map(str, folders)))
