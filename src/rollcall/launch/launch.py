"""Renders, validates, starts and stops launches."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.base.errors import ClusterError
from rollcall.base.redact import hides, secrets_of_run, shell_hides
from rollcall.base.wait import say
from rollcall.base.words import visible
from rollcall.config import Config
from rollcall.launch.dstack import Dstack
from rollcall.launch.kuberay import Kuberay
from rollcall.launch.record import (
    LaunchError,
    LaunchRecord,
    find_record,
    forget,
    get_record,
    held,
    launches,
    new_record,
    read_lines,
)
from rollcall.launch.rendered import VARIABLE, Rendered
from rollcall.launch.skypilot import Skypilot
from rollcall.launch.slurm import Slurm
from rollcall.launch.ssh.machines import choose_hosts
from rollcall.launch.ssh.target import Ssh
from rollcall.launch.target import LaunchRequest, Target
from rollcall.plan.judge import workable_plan

TARGETS: dict[str, Target] = {each.name: each for each in (Ssh(), Slurm(), Skypilot(), Dstack(), Kuberay())}


def get_target(name: str) -> Target:
    if name not in TARGETS:
        raise LaunchError(f"{name!r} is not a target; use one of {', '.join(TARGETS)}")
    return TARGETS[name]


def make_request(
    config: Config, *, target: str, name: str, cwd: Path, problems: list[str] | None = None
) -> LaunchRequest:
    """Build the request that a target renders. If the run cannot work, raise an error before anything starts. If
    ``problems`` is a list, append the problems that do not prevent rendering to it instead."""
    cluster, launch = config.cluster, config.launch
    if cluster is None:
        raise LaunchError(
            "a launch needs the number of nodes; add a line such as "
            "`cluster: {num_nodes: 2, num_gpus_per_node: 8}` to the run file"
        )
    if launch is None or getattr(launch, target) is None:
        raise LaunchError(
            f"the run file has no `launch.{target}` section; `rollcall launch init {target}` prints one to fill in"
        )
    if cluster.ray_address is not None:
        raise LaunchError(
            f"cluster.ray_address={cluster.ray_address} names a running Ray cluster, but a launch starts its own nodes; "
            "remove the key, or use `rollcall submit` (kuberay can use a running cluster: set `launch.kuberay.ray_cluster`)"
        )
    profile = {} if launch.profile is None else read_profile(cwd / launch.profile.expanduser())
    _refuse_secrets(config, target=target, profile=profile)
    cluster = cluster.model_copy(update={"env": {**profile, **cluster.env}})
    config = config.model_copy(update={"cluster": cluster})
    ssh = launch.ssh if target == "ssh" else None
    request = LaunchRequest(
        name=name,
        config=config,
        cluster=cluster,
        launch=launch,
        hosts=() if ssh is None else choose_hosts(ssh.hosts, count=cluster.num_nodes, name=name, cwd=cwd),
        folder=launches() / name,
        cwd=cwd,
        profile=profile,
    )
    for check in (partial(workable_plan, config, cluster), partial(get_target(target).check, request)):
        try:
            check()
        except (ValueError, ClusterError, LaunchError) as error:
            if problems is None:
                raise
            problems.append(str(error))
    return request


def read_profile(path: Path) -> dict[str, str]:
    """Read the ``NAME=VALUE`` lines of `launch.profile`: network variables for the nodes. A value with spaces needs quotes.
    Variables in a value are not expanded."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_lines(path, key="launch.profile"), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        try:
            *before, last = shlex.split(line)
        except ValueError:
            before, last = [], ""
        name, equals, value = last.partition("=")
        if before not in ([], ["export"]) or not equals or not VARIABLE.fullmatch(name):
            raise LaunchError(
                f"line {number} of launch.profile={path} is {line.strip()!r}; write NAME=VALUE, and put a value "
                "with spaces in quotes"
            )
        found[name] = value
    return found


def _refuse_secrets(config: Config, *, target: str, profile: Mapping[str, str]) -> None:
    """Refuse secrets in variables, and in commands and other strings in the target's section and in `prepare`."""
    raw = config.model_dump(mode="json")
    section, container = raw["launch"][target], raw["launch"]["container"]
    searched = {"prepare": raw["prepare"], f"launch.{target}": {**section, "env": {}}, "launch.container": container}
    names = [
        *secrets_of_run(raw),
        *(name for name, value in {**profile, **section["env"]}.items() if hides(name, value)),
        *(key for place, value in searched.items() for key, text in _texts(value, place) if shell_hides(text)),
    ]
    if names:
        raise LaunchError(
            f"{', '.join(dict.fromkeys(names))}: a rendered file would contain the secret's value; instead, add the variable's name to "
            f"cluster.env_pass and to the target's list of secrets (a command can then use it: `KEY=$KEY`)"
        )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every string in a nested value with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts(each, f"{key}[{index}]")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, f"{key}.{name}")


def start(target: Target, request: LaunchRequest, rendered: Rendered) -> LaunchRecord:
    """Start a launch, or finish what an earlier command with the same name began."""
    with held(request.name):
        record = find_record(request.name)
        if record is None:
            record = new_record(request.name, target=target.name, run_dir="")
        else:
            _refuse(record, target=target, rendered=rendered)
            was = f"was started at {record.started}" if record.state == "started" else "was interrupted while starting"
            say(f"{request.name!r} {was}; checking what is still running")
        record = record.having(run_dir=str(request.config.run.dir)).save()
        try:
            rendered.write(record.folder)
            target.validate(rendered)
            return target.start(request, rendered, record).having(state="started").save()
        except BaseException:
            left = find_record(record.name)
            if left is not None and left.state == "starting" and left.id is None:
                forget(left)
            raise


def _refuse(record: LaunchRecord, *, target: Target, rendered: Rendered) -> None:
    """Refuse a launch that cannot be started or finished under this name."""
    if record.target != target.name:
        raise LaunchError(
            f"{record.name!r} was launched with {record.target}; choose another --name, or end it with "
            f"`rollcall launch down {record.name}`"
        )
    if record.state == "stopping":
        raise LaunchError(
            f"{record.name!r} is being stopped; run `rollcall launch down {record.name}` again to finish stopping it"
        )
    changed = rendered.changed_in(record.folder)
    used = target.in_use(record, changed) if changed and record.id is not None else ()
    if used:
        raise LaunchError(
            f"{record.name!r} is running or about to run with a different {' and '.join(used)}: the run file or Rollcall has changed "
            f"since it was launched. `rollcall launch logs {record.name} --follow` shows the running launch; to apply the change, end "
            f"it first with `rollcall launch down {record.name}`, or choose another --name"
        )


def state_of(record: LaunchRecord) -> str:
    """Return the state that the target's tool reports, or the reason why the state is not known."""
    if record.state != "started":
        return record.state
    try:
        return visible(get_target(record.target).status(record))
    except (LaunchError, ClusterError) as error:
        return f"not known: {visible(str(error)).splitlines()[0]}"


def stop(name: str) -> None:
    get_record(name)  # so that an unknown name leaves no folder behind
    with held(name):
        record = get_record(name)
        get_target(record.target).stop(record)
        forget(record)
