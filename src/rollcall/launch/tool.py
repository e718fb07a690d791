"""Running a target's own tool on this machine: `sbatch`, `sky`, `dstack`, `kubectl`.

A tool that is missing, fails or does not end in time is one sentence with its last lines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcall.launch.errors import LaunchError
from rollcall.launch.record import LaunchRecord
from rollcall.launch.rendered import Command
from rollcall.redact import redact

TOOL_S = 300.0  # to ask a tool something; `sky` starts a server of its own for the first question
START_S = 3600.0  # clouds take their time to give machines
LAST_LINES = 15


def need_tool(name: str, *, install: str) -> None:
    if shutil.which(name) is None:
        raise LaunchError(f"`{name}` is not on this machine's PATH; {install}, or run this where it is installed")


def ask(
    command: Command, *, timeout_s: float = TOOL_S, may_fail: bool = False, means_nothing: str | None = None
) -> str:
    """What the tool prints. ``may_fail``: what it does not know is an empty answer. ``means_nothing``: words with which it fails
    when there is just nothing to tell."""
    ended = _run(command, timeout_s=timeout_s, capture=True)
    printed = f"{ended.stdout}\n{ended.stderr}"
    if ended.returncode and (may_fail or (means_nothing is not None and means_nothing in printed)):
        return ""
    if ended.returncode:
        raise LaunchError(_failed(command, ended.returncode, printed))
    return ended.stdout


def ask_json(command: Command, *, means_nothing: str | None = None) -> Any:
    """What the tool prints as JSON, after lines for people; None: nothing."""
    text = ask(command, means_nothing=means_nothing)
    begins = re.search(r"^[\[{]", text, re.MULTILINE)
    if begins is None and not text.strip():
        return None
    try:
        return json.JSONDecoder().raw_decode(text, begins.start() if begins else 0)[0]
    except ValueError:
        raise LaunchError(_unreadable(command, text)) from None


def run(
    command: Command, *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = START_S
) -> None:
    """Its output goes to the user as it comes."""
    ended = _run(command, timeout_s=timeout_s, capture=False, env=env, cwd=cwd)
    if ended.returncode:
        raise LaunchError(_failed(command, ended.returncode, ""))


def watch(command: Command) -> int:
    """As ``run``, for as long as it takes; returns the tool's status."""
    return _run(command, timeout_s=None, capture=False).returncode


def refuse_others(name: str, *, tool: str, record: LaunchRecord, where: str) -> None:
    """Of something that runs under this name: it is this launch's own only if the record says so."""
    if not any(part.where == where for part in record.parts):
        raise LaunchError(
            f"{tool} has {name!r} already, and this launch has not started it; give another --name, or end that one first"
        )


def _run(
    command: Command,
    *,
    timeout_s: float | None,
    capture: bool,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command.words,
            check=False,
            text=True,
            errors="replace",
            capture_output=capture,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,  # a tool that asks gets no answer, instead of waiting for one
        )
    except FileNotFoundError:
        raise LaunchError(f"cannot {command.what}: `{command.words[0]}` is not on this machine's PATH") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"cannot {command.what}: `{command}` has not ended after {timeout_s:.0f} s") from None


def _unreadable(command: Command, printed: str) -> str:
    return f"cannot {command.what}: `{command}` printed no JSON:\n{_last(printed)}"


def _failed(command: Command, status: int, printed: str) -> str:
    last = _last(printed)
    return f"cannot {command.what}: `{command}` ended with status {status}{':' if last else ''}\n{last}".rstrip()


def _last(printed: str) -> str:
    return "\n".join(f"  {line}" for line in redact(printed).strip().splitlines()[-LAST_LINES:])
