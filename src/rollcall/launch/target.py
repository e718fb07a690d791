"""What every target of `rollcall launch` does. A target is one file in this room and one entry in ``launch.py``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from rollcall.config import Config
from rollcall.config.launch import LaunchSection, TargetSection
from rollcall.config.run import dump_given
from rollcall.config.sections import ClusterSection
from rollcall.launch.record import LaunchRecord
from rollcall.launch.rendered import Rendered, RenderedFile

RUN_FILE = "run.yaml"
AnySection = TypeVar("AnySection", bound=TargetSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """All that a rendering depends on."""

    name: str  # of the launch, and of its cluster
    config: Config
    cluster: ClusterSection  # config.cluster: a launch needs one
    launch: LaunchSection
    folder: Path  # where the rendered files will be, on this machine
    cwd: Path  # where the user is: relative paths and modules of rewards are found from here
    profile: Mapping[str, str] = field(default_factory=dict)  # the variables that the file `launch.profile` has
    hosts: tuple[str, ...] = ()  # by rank, where the target has to be told

    def section(self, kind: type[AnySection]) -> AnySection:
        """The target's own; ``make_request`` refuses a run file without it."""
        return next(section for _, section in self.launch if isinstance(section, kind))

    @property
    def container_name(self) -> str:
        """Users of one machine share its containers, and an old one of the name is removed: theirs has another."""
        return f"{self.name}-{hashlib.sha256(f'{os.getuid()} {self.folder}'.encode()).hexdigest()[:8]}"

    @property
    def node_env(self) -> dict[str, str]:
        """For `rollcall node` on every target."""
        if self.launch.gpu != "rocm" or self.cluster.accelerator == "cpu":
            return dict(self.profile)
        # Ray hands out AMD cards by HIP_VISIBLE_DEVICES, and refuses to start where ROCR_VISIBLE_DEVICES is set.
        visible = ",".join(str(index) for index in range(self.cluster.num_gpus_per_node))
        return {"HIP_VISIBLE_DEVICES": visible, "HSA_NO_SCRATCH_RECLAIM": "1", **self.profile}

    @property
    def run_file(self) -> RenderedFile:
        """The run file for the nodes: overrides included, without the section that says where nodes come from."""
        return RenderedFile(name=RUN_FILE, text=dump_given(self.config, without={"launch"}))


class Target(Protocol):
    name: str

    def check(self, request: LaunchRequest) -> None:
        """Refuse what this target would not heed, or its nodes could not find. Before rendering, so also in a dry run."""
        ...

    def render(self, request: LaunchRequest) -> Rendered:
        """Files and commands. Pure: the same request gives the same text, and nothing is read or started."""
        ...

    def validate(self, rendered: Rendered, folder: Path) -> str:
        """Let the target's own tool read the files in ``folder``. Returns a line for the user; raises ``LaunchError`` with the
        tool's words when it refuses them."""
        ...

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        """Those of the rendered files with which something runs now, or waits to run: they cannot change under it."""
        ...

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        """Start it, or finish a start that was cut off: what runs already is taken as it is. Saves the record before and
        after each thing it starts."""
        ...

    def follow(self, record: LaunchRecord) -> int:
        """Print the run's log until the run ends; returns its exit status. Ctrl-C leaves the run going."""
        ...

    def status(self, record: LaunchRecord) -> str:
        """One line with the state of the launch, in the words of the target's tool."""
        ...

    def logs(self, record: LaunchRecord) -> None:
        """Print what there is of the run's log."""
        ...

    def stop(self, record: LaunchRecord) -> None:
        """End everything the record names, and nothing else. What has ended already is fine."""
        ...
