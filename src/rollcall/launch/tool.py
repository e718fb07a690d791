"""Running a target's own tool on this machine: `sbatch`, `sky`, `dstack`, `kubectl`.

A tool that is missing, fails or does not end in time is one sentence with its last lines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rollcall.launch.errors import LaunchError
from rollcall.launch.rendered import Command
from rollcall.redact import redact

TOOL_S = 60.0  # to ask a tool something
START_S = 3600.0  # clouds take their time to give machines
LAST_LINES = 15


def need_tool(name: str, *, install: str) -> None:
    if shutil.which(name) is None:
        raise LaunchError(f"`{name}` is not on this machine's PATH; {install}, or run this where it is installed")


def ask(command: Command, *, timeout_s: float = TOOL_S, may_fail: bool = False) -> str:
    """What the tool prints. ``may_fail``: what it does not know is an empty answer."""
    ended = _run(command, timeout_s=timeout_s, capture=True)
    if ended.returncode and not may_fail:
        raise LaunchError(_failed(command, ended.returncode, f"{ended.stdout}\n{ended.stderr}"))
    return "" if ended.returncode else ended.stdout


def run(
    command: Command, *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = START_S
) -> None:
    """Its output goes to the user as it comes."""
    ended = _run(command, timeout_s=timeout_s, capture=False, env=env, cwd=cwd)
    if ended.returncode:
        raise LaunchError(_failed(command, ended.returncode, ""))


def watch(command: Command) -> int:
    """As ``run``, for as long as it takes; returns the tool's status."""
    return subprocess.run(command.words, check=False).returncode


def _run(
    command: Command,
    *,
    timeout_s: float,
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


def _failed(command: Command, status: int, printed: str) -> str:
    last = "\n".join(f"  {line}" for line in redact(printed).strip().splitlines()[-LAST_LINES:])
    return f"cannot {command.what}: `{command}` ended with status {status}{':' if last else ''}\n{last}".rstrip()
