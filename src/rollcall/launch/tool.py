"""Running a target's own tool on this machine: `sbatch`, `sky`, `dstack`, `kubectl`.

A tool that is missing, fails or does not end in time is one sentence with its last lines.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollcall.config.sections import ClusterSection
from rollcall.jobs.paths import resolve_paths
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord, Part
from rollcall.launch.rendered import Command
from rollcall.launch.target import LaunchRequest
from rollcall.redact import redact_end
from rollcall.wait import Wait, say
from rollcall.words import visible

Told = TypeVar("Told")

STDERR = 2  # the file descriptor
TOOL_S = 300.0  # to ask a tool something; `sky` starts a server of its own for the first question
START_S = 3600.0  # clouds take their time to give machines
END_S = 1800.0  # clouds take their time to take machines back, too
ASK_EVERY_S = 2.0
LAST_LINES = 15
LAST_BYTES = 10_000
MOST_BYTES = 64 << 20  # of what a tool answers
LOOK_EVERY_S = 0.2


def check_for_tool(request: LaunchRequest, *, target: str, image_key: str) -> None:
    """What every target refuses whose tool gets the machines, and whose section names the image."""
    if request.launch.container is not None:
        raise LaunchError(f"launch.container is for ssh and slurm; for {target} name the image in {image_key}")
    if request.launch.rendezvous is not None:
        raise LaunchError(
            f"launch.rendezvous is for ssh and slurm; {target} tells its nodes where the head is, so leave it out"
        )
    if request.cluster.num_nodes > 1:  # one node finds a relative path in its own folder
        resolve_paths(request.config, folder=request.cwd, shared=None)


def unlike_slots(asked: object, cluster: ClusterSection, *, key: str) -> tuple[str, ...]:
    """A note, where a number of GPUs such as ``H100:8`` is not the number of slots of each node."""
    found = re.search(r"(?:^|:)(\d+)$", str(asked))
    if cluster.accelerator != "gpu" or found is None or set(cluster.slots_per_node) == {int(found[1])}:
        return ()
    slots = ", ".join(map(str, sorted(set(cluster.slots_per_node))))
    return (
        f"{key}={asked} gives each node {found[1]} GPUs, and the run file has {slots} slots on each; make them the same",
    )


def need_tool(name: str, *, install: str) -> None:
    if shutil.which(name) is None:
        raise LaunchError(f"`{name}` is not on this machine's PATH; {install}, or run this where it is installed")


def ask(
    command: Command,
    *,
    timeout_s: float = TOOL_S,
    may_fail: bool = False,
    means_nothing: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """What the tool prints. ``may_fail``: what it does not know is an empty answer. ``means_nothing``: words with which it fails
    when there is just nothing to tell. ``env``: all its variables; None: those of this process."""
    status, out, err = _captured(command, timeout_s=timeout_s, env=os.environ if env is None else env)
    printed = f"{out}\n{err}"
    if status and (may_fail or (means_nothing is not None and means_nothing in printed)):
        return ""
    if status:
        raise LaunchError(_failed(command, status, printed))
    return out


def ask_json(command: Command, answer: TypeAdapter[Told], *, means_nothing: str | None = None) -> Told | None:
    """What the tool prints as JSON, after lines for people; None: nothing. ``answer``: what of it is needed."""
    text = ask(command, means_nothing=means_nothing)
    begins = re.search(r"^[\[{]", text, re.MULTILINE)
    if begins is None and not text.strip():
        return None
    try:
        found = json.JSONDecoder().raw_decode(text, begins.start() if begins else 0)[0]
    except (ValueError, RecursionError):
        raise LaunchError(f"cannot {command.what}: `{command}` printed no JSON:\n{_last(text)}") from None
    try:
        return answer.validate_python(found)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        why = f"{where}: {error.errors()[0]['msg']}".lstrip(": ")
        raise LaunchError(f"cannot {command.what}: `{command}` printed something else than expected ({why})") from None


def run(
    command: Command, *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = START_S
) -> None:
    """Its output goes to the user as it comes, on stderr: stdout has what a command of Rollcall answers."""
    status = _run(command, timeout_s=timeout_s, env=env, cwd=cwd, stdout=STDERR)
    if status:
        raise LaunchError(_failed(command, status, ""))


def watch(command: Command) -> int:
    """A tool that prints a log, on stdout and for as long as it takes; returns its status."""
    return _run(command, timeout_s=None)


def refuse_others(name: str, *, tool: str, record: LaunchRecord, where: str, id: str = "") -> None:
    """Of something that runs under this name: it is this launch's own only if the record says so."""
    if not any(part.where == where and is_own(part, name=name, id=id) for part in record.parts):
        raise LaunchError(
            f"{tool} has {name!r} already, and this launch has not started it; give another --name, or end that one first"
        )


def is_own(part: Part, *, name: str, id: str) -> bool:
    """Whether what the tool calls ``id`` is this part. Before its id is known, and where the tool gives none, a part goes by its
    name: when it was about to be started, nothing had that name."""
    return part.id in ("", name, id)


def wait_until_ended(name: str, *, tool: str, runs: Callable[[], bool], look: str) -> None:
    """Tools that were told to end something say so before its machines are gone. ``look``: how a user sees what is left."""
    wait = Wait(END_S)
    while runs():
        if not wait.again(f"waiting for {tool} to end {name!r}", after_s=ASK_EVERY_S):
            raise LaunchError(
                f"{tool} was told to end {name!r} and has not after {END_S:g} s; see `{look}`, then run this again"
            )


def leave_others(name: str, *, tool: str) -> None:
    say(f"{tool} has another {name!r}, which this launch has not started: it is left alone")


def _run(
    command: Command,
    *,
    timeout_s: float | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | None = None,
) -> int:
    try:
        return subprocess.run(
            command.words,
            check=False,
            stdout=stdout,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,  # a tool that asks gets no answer, instead of waiting for one
        ).returncode
    except FileNotFoundError:
        raise LaunchError(_missing(command)) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(_late(command, timeout_s)) from None


def _captured(command: Command, *, timeout_s: float, env: Mapping[str, str]) -> tuple[int, str, str]:
    """Its status, and what it printed on stdout and stderr. One that prints without an end is ended."""
    try:
        process = subprocess.Popen(
            command.words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError:
        raise LaunchError(_missing(command)) from None
    assert process.stdout is not None and process.stderr is not None
    parts: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    give_up = time.monotonic() + timeout_s
    try:
        with selectors.DefaultSelector() as selector:
            for pipe in parts:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(LOOK_EVERY_S)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    parts[key.fileobj] += data
                    if not data:
                        selector.unregister(key.fileobj)
                if sum(map(len, parts.values())) > MOST_BYTES:
                    raise LaunchError(f"cannot {command.what}: `{command}` prints more than {MOST_BYTES >> 20} MiB")
                if time.monotonic() > give_up:
                    raise LaunchError(_late(command, timeout_s))
                if not ready and process.poll() is not None:
                    break  # what it has started in the background holds the pipe
        try:
            process.wait(max(give_up - time.monotonic(), LOOK_EVERY_S))
        except subprocess.TimeoutExpired:
            raise LaunchError(_late(command, timeout_s)) from None
    finally:
        process.kill()
        process.wait()
        for pipe in parts:
            pipe.close()
    out, err = (bytes(part).decode(errors="replace") for part in parts.values())
    return process.returncode, out, err


def _missing(command: Command) -> str:
    return f"cannot {command.what}: `{command.words[0]}` is not on this machine's PATH"


def _late(command: Command, timeout_s: float | None) -> str:
    return f"cannot {command.what}: `{command}` has not ended after {timeout_s:.0f} s"


def _failed(command: Command, status: int, printed: str) -> str:
    last = _last(printed)
    return f"cannot {command.what}: `{command}` ended with status {status}{':' if last else ''}\n{last}".rstrip()


def _last(printed: str) -> str:
    return "\n".join(f"  {line}" for line in visible(redact_end(printed, LAST_BYTES)).strip().split("\n")[-LAST_LINES:])
