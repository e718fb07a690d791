"""The interface of every `rollcall launch` target, and the base class for targets whose tool provides the nodes: `sbatch`, `sky`,
`dstack`, `kubectl`.

Such a target renders files for its tool and names the commands that start, show and stop the job. The base class does the rest. It
finds running jobs by name. A job belongs to this launch only if the record contains the job's id.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from rollcall.base.errors import ClusterError
from rollcall.base.redact import redact_end
from rollcall.base.wait import Wait, say
from rollcall.base.words import visible
from rollcall.config import Config
from rollcall.config.launch import DstackSection, LaunchSection, SkypilotSection, SlurmSection, TargetSection
from rollcall.config.run import dump_given
from rollcall.config.sections import ClusterSection
from rollcall.launch.container import Container, container_of
from rollcall.launch.jobs.package import own_modules, resolve_paths
from rollcall.launch.record import LaunchError, LaunchRecord, launch_token
from rollcall.launch.rendered import Rendered, exports, shell_path
from rollcall.nodes.state import TOKEN

RUN_FILE = "run.yaml"
END_S = 1800.0  # clouds are slow to release machines
ASK_EVERY_S = 2.0
IN_IMAGE = "put them on PYTHONPATH in the image"
ASK_S = 300.0  # for an answer: `sky` starts a server when it is first called
_PACKAGES = {"sky": " (pip install skypilot)", "dstack": " (pip install dstack)"}
AnySection = TypeVar("AnySection", bound=TargetSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Everything that a rendering depends on."""

    name: str  # names the launch and its cluster
    config: Config
    cluster: ClusterSection  # config.cluster, which a launch requires
    launch: LaunchSection
    folder: Path  # where the rendered files will be, on this machine
    cwd: Path  # the user's folder, in which relative paths and reward modules are looked up
    profile: Mapping[str, str] = field(default_factory=dict)  # the variables in the file `launch.profile`
    hosts: tuple[str, ...] = ()  # by rank, for ssh

    def section(self, kind: type[AnySection]) -> AnySection:
        return next(section for _, section in self.launch if isinstance(section, kind))

    def container(self, folders: Sequence[Path] = ()) -> Container | None:
        """Return the nodes' container. Its name is different for each user, because a launch removes any old container with that name."""
        owner = hashlib.sha256(f"{os.getuid()} {self.folder}".encode()).hexdigest()[:8]
        return container_of(self.launch, self.cluster, name=f"{self.name}-{owner}", folders=folders)

    @property
    def node_env(self) -> dict[str, str]:
        """The variables that `rollcall node` gets on every target."""
        if self.launch.gpu != "rocm" or self.cluster.accelerator == "cpu":
            return dict(self.profile)
        # Ray assigns AMD GPUs by HIP_VISIBLE_DEVICES and refuses to start if ROCR_VISIBLE_DEVICES is set.
        cards = ",".join(map(str, range(self.cluster.num_gpus_per_node)))
        return {"HIP_VISIBLE_DEVICES": cards, "HSA_NO_SCRATCH_RECLAIM": "1", **self.profile}

    @property
    def run_file(self) -> str:
        """The run file for the nodes, with overrides applied and without its `launch` section."""
        return dump_given(self.config, without={"launch"})

    def node_lines(
        self,
        section: SlurmSection | SkypilotSection | DstackSection,
        *,
        run_file: str,
        more: str,
        head: str | None = None,
        before: Sequence[str] = (),
        container: Container | None = None,
        variables: Sequence[str] = (),
        guard: Callable[[str], str] = str,
    ) -> list[str]:
        """Return the shell lines that every node runs, ending with `rollcall node --run`.

        ``run_file``, ``head`` (the address of rank 0) and ``more`` (options) are shell text, such as ``"$HOME"/run.yaml``; ``before``
        contains the user's own lines; ``variables`` names variables that a container gets in addition to those set here; ``guard``
        escapes lines with quoted values for a tool that reads them before the shell does.
        """
        env = {**self.node_env, **section.env}
        # Activate scripts read unset variables, so they come before `set -u`.
        activated = [] if section.activate is None else [guard(f". {shell_path(section.activate)} || exit 1")]
        lines = [*([] if container else activated), "set -eu", *map(guard, exports(env)), *before]
        command = f"exec rollcall node --run {run_file} --cluster {shlex.quote(self.name)} {more}"
        names = [*env, *variables]
        if head is not None:
            lines += [f"head={head}", 'case $head in *:*) head="[$head]" ;; esac', "export head"]  # [IPv6]
            command += ' --head-address "$head:6399"'  # SkyPilot's own Ray uses 6380 on its machines
            names.append("head")
        if container is None:
            return [*lines, command]
        words = container.run(["sh", "-c", "\n".join([*activated, command])], variables=names)
        return [*lines, *container.before(), *container.exports(names), f"exec {shlex.join(words)}"]

    def even_slots(self, why: str) -> int:
        """Return the number of slots on each node. ``why`` says why all nodes need the same number."""
        sizes = set(self.cluster.slots_per_node)
        if len(sizes) > 1:
            raise LaunchError(
                f"cluster.nodes has nodes of different sizes, but {why}; set num_nodes and num_gpus_per_node instead"
            )
        return sizes.pop()

    def unlike_slots(self, asked: object, *, key: str) -> Iterator[str]:
        """Yield a note if a number of GPUs such as ``H100:8`` differs from the number of slots on each node."""
        found, sizes = re.search(r"(?:^|:)(\d+)$", str(asked)), set(self.cluster.slots_per_node)
        if self.cluster.accelerator == "gpu" and found is not None and sizes != {int(found[1])}:
            slots = ", ".join(map(str, sorted(sizes)))
            yield f"{key}={asked} gives each node {found[1]} GPUs, but the run file has {slots} slots per node; make them equal"

    def left_here(self, *, advice: str) -> Iterator[str]:
        """Yield a note about the run file's modules that are in the user's folder and not sent to the nodes."""
        with suppress(ClusterError):  # a module that is not here may be in the image
            if names := sorted({Path(name).parts[0] for name in own_modules(self.config, folder=self.cwd)}):
                yield f"the run file needs {', '.join(names)}, but this launch sends no modules to the nodes: {advice}"


class Target(Protocol):
    name: str

    def check(self, request: LaunchRequest) -> None:
        """Refuse keys that this target would ignore and paths that its nodes could not find. A dry run calls this too."""

    @abstractmethod
    def render(self, request: LaunchRequest) -> Rendered:
        """Render the files and commands. Pure: the same request renders the same text; nothing is read or started."""

    def validate(self, rendered: Rendered) -> None:
        """Have the target's own tool check the files, if it can do so without starting anything."""

    @abstractmethod
    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        """Return the files in ``names`` that must not change because a running or queued job uses them."""

    @abstractmethod
    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        """Start the launch or finish an interrupted start; keep what is already running. Save the record before and after each step."""

    @abstractmethod
    def follow(self, record: LaunchRecord) -> int:
        """Print the run's log until the run ends, then return its exit status. The run continues after Ctrl-C."""

    @abstractmethod
    def status(self, record: LaunchRecord) -> str:
        """Return the launch's state in one line, in the words of the target's tool."""

    @abstractmethod
    def logs(self, record: LaunchRecord) -> None:
        """Print the run's log so far."""

    @abstractmethod
    def stop(self, record: LaunchRecord) -> None:
        """Save the record as "stopping", then stop everything that it names and nothing else. Some of it may have ended already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A job or cluster that a tool lists under the launch's name."""

    id: str  # "" if the tool reports none
    state: str  # as the tool describes it
    is_busy: bool  # whether it is running or queued
    stays: bool = False  # whether it stays until it is taken down, even after its run has ended

    @property
    def is_there(self) -> bool:
        return self.is_busy or self.stays


class ToolTarget(Target):
    title: ClassVar[str]  # the tool's name in messages
    look: ClassVar[str]  # the command that lists the user's jobs
    image_key: ClassVar[str] = ""  # the key that names the image
    place_words: ClassVar[str] = ""  # "kubectl's context": the cluster or project that the tool talks to
    place_advice: ClassVar[str] = ""  # {} stands for the place's name

    @abstractmethod
    def find(self, record: LaunchRecord) -> list[Seen]:
        """Return everything that the tool lists under the launch's name, newest first."""

    @abstractmethod
    def end(self, record: LaunchRecord, ids: Sequence[str]) -> None:
        """Have the tool stop the jobs or clusters with these ids."""

    @abstractmethod
    def log_command(self, record: LaunchRecord, *, follow: bool) -> tuple[str, ...]:
        """Return the command that prints the log."""

    def tool_name(self, name: str) -> str:
        """Return the launch's name in a form that the tool accepts."""
        return name

    def kind(self, request: LaunchRequest) -> str:
        """Return the job's kind or namespace, if it is needed to find the job again."""
        return ""

    def place(self) -> str:
        """Return the cluster or project that the tool currently uses."""
        return ""

    def begin(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> str:
        """Start the job and return its id, or "" if the tool does not print one."""
        command, token = rendered.commands[0], launch_token(request.folder)
        run(*command.words, what=command.what, env={TOKEN: token}, cwd=request.cwd)
        return ""

    def check(self, request: LaunchRequest) -> None:
        if request.launch.container is not None:
            raise LaunchError(
                f"launch.container works only with ssh and slurm; for {self.name}, set the image in {self.image_key}"
            )
        if request.launch.rendezvous is not None:
            raise LaunchError(
                f"launch.rendezvous works only with ssh and slurm; {self.name} gives its nodes the head's address, so remove the key"
            )
        if request.cluster.num_nodes > 1:  # a single node finds a relative path in its own folder
            resolve_paths(request.config, folder=request.cwd, shared=None)

    def in_use(self, record: LaunchRecord, names: Sequence[str]) -> Sequence[str]:
        self.require_started(record)
        return names if any(each.is_busy for each in self.own(record)) else ()

    def start(self, request: LaunchRequest, rendered: Rendered, record: LaunchRecord) -> LaunchRecord:
        self.refuse_elsewhere(record)
        kind, was = self.kind(request), record.facts.get("kind")
        if record.id is not None and was != kind and any(each.is_there for each in self.own(record)):
            raise LaunchError(
                f"{record.name!r} was launched with {was!r}, not {kind!r}; end it with `rollcall launch down {record.name}` first, "
                "or choose another --name"
            )
        record = record.knowing(kind=kind, place=self.place())
        there = [each for each in self.seen(record) if each.is_there]
        if any(record.id is None or not self.is_own(record, each) for each in there):
            raise LaunchError(
                f"{self.title} already has {self.tool_name(record.name)!r}, which this launch did not start; choose another --name, "
                "or end that one first"
            )
        if busy := next((each for each in there if each.is_busy), None):
            say(f"{self.tool_name(record.name)!r} is already running: {busy.state}")
            id = busy.id
        else:
            record = record.having(id="").save()
            id = self.begin(request, rendered, record) or next((each.id for each in self.seen(record)), "")
        return record.having(id=id or self.tool_name(record.name)).save()

    def status(self, record: LaunchRecord) -> str:
        self.require_started(record)
        newest = next(iter(self.own(record)), None)
        return f"{self.title} does not list it" if newest is None else visible(newest.state)

    def logs(self, record: LaunchRecord) -> None:
        self.require_started(record)
        _run(self.log_command(record, follow=False), "print the log", timeout_s=None)

    def follow(self, record: LaunchRecord) -> int:
        self.require_started(record)
        return _run(self.log_command(record, follow=True), "follow the log", timeout_s=None)

    def stop(self, record: LaunchRecord) -> None:
        if record.id is None:
            return
        self.refuse_elsewhere(record)
        record = record.having(state="stopping").save()
        name = self.tool_name(record.name)
        there = [each for each in self.seen(record) if each.is_there]
        ids = [each.id for each in there if self.is_own(record, each)]
        if ids:
            self.end(record, ids)
            wait = Wait(END_S)  # a tool reports a stop before the machines are gone
            while any(each.id in ids and each.is_there for each in self.seen(record)):
                if not wait.again(f"waiting for {self.title} to end {name!r}", after_s=ASK_EVERY_S):
                    raise LaunchError(
                        f"{self.title} was asked to end {name!r}, which still exists after {wait.timeout_s:g} s; see `{self.look}`, then "
                        "run this again"
                    )
        if len(ids) < len(there):
            say(f"{self.title} has another {name!r}, which this launch did not start; it is left running")

    def require_started(self, record: LaunchRecord) -> None:
        if record.id is None:
            raise LaunchError(
                f"{record.name!r} has not started anything yet; run the same `rollcall launch` command again"
            )
        self.refuse_elsewhere(record)

    def own(self, record: LaunchRecord) -> list[Seen]:
        """Return the jobs or clusters that this launch started."""
        return [each for each in self.seen(record) if self.is_own(record, each)]

    def is_own(self, record: LaunchRecord, seen: Seen) -> bool:
        """Compare the ids. If the record has no id yet, the name is enough, because it was free just before this launch started."""
        return record.id in ("", self.tool_name(record.name), seen.id)

    def seen(self, record: LaunchRecord) -> list[Seen]:
        try:
            return self.find(record)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise LaunchError(
                f"{self.title} printed something unexpected ({type(error).__name__}: {error}); see `{self.look}`"
            ) from None

    def refuse_elsewhere(self, record: LaunchRecord) -> None:
        """Refuse a different cluster or project: the launch is not listed there, so it would seem to have ended."""
        then = record.facts.get("place")
        if then and (now := self.place()) not in ("", then):
            raise LaunchError(
                f"{record.name!r} was launched in {self.place_words} {then!r}, but the current one is {now!r}; {self.place_advice.format(then)}"
            )


# Running the tools' commands


def ask(*words: str, what: str, fine: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return the tool's stdout. If the tool fails and its output contains ``fine``, return ""; ``fine=""`` accepts any failure."""
    # Use files, because a server that the tool leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = _run(words, what, stdout=out, stderr=err, env=env, timeout_s=ASK_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if status and (fine is None or fine not in "\n".join(texts)):
        raise LaunchError(
            f"cannot {what}: `{shlex.join(words)}` ended with status {status}:\n{_last(chr(10).join(texts))}".rstrip()
        )
    return "" if status else texts[0]


def ask_json(*words: str, what: str, fine: str | None = None) -> Any:
    """Parse the JSON that the tool prints after any human-readable lines, or return None if it prints nothing."""
    text = ask(*words, what=what, fine=fine)
    begins = re.search(r"^[\[{]", text, re.MULTILINE)
    if begins is None and not text.strip():
        return None
    try:
        return json.JSONDecoder().raw_decode(text, begins.start() if begins else 0)[0]
    except ValueError:
        raise LaunchError(f"cannot {what}: `{shlex.join(words)}` printed no JSON:\n{_last(text)}") from None


def run(*words: str, what: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a tool and pass its output on to stderr (2) as it comes; stdout is for the Rollcall command's own answer."""
    # Clouds are slow.
    if status := _run(words, what, stdout=2, env={**os.environ, **(env or {})}, cwd=cwd, timeout_s=3600.0):
        raise LaunchError(f"cannot {what}: `{shlex.join(words)}` ended with status {status}")


def _run(words: Sequence[str], what: str, *, timeout_s: float | None, **how: Any) -> int:
    try:
        # A tool that prompts for input fails instead of waiting for an answer.
        return subprocess.run(words, timeout=timeout_s, stdin=subprocess.DEVNULL, **how).returncode
    except FileNotFoundError:
        raise LaunchError(
            f"cannot {what}: `{words[0]}` is not on this machine's PATH; install it{_PACKAGES.get(words[0], '')}, or run this where "
            "it is installed"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"cannot {what}: `{shlex.join(words)}` did not finish within {timeout_s:.0f} s") from None


def _last(printed: str) -> str:
    return "\n".join(f"  {line}" for line in visible(redact_end(printed, 10_000)).strip().split("\n")[-15:])
