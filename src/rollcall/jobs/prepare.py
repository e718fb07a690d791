"""What a node does before a run: the commands of `prepare:`, and the models that the run file names, into this node's cache."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from rollcall.config import Config
from rollcall.errors import ClusterError
from rollcall.model.fetch import fetch_model
from rollcall.nodes.processes import signal_processes
from rollcall.process_table import Process, descendants
from rollcall.wait import Wait, say

END_S = 5.0  # between SIGTERM and SIGKILL


def prepare_node(config: Config, *, once: bool) -> None:
    """On every node; with ``once`` on the first node also what one node does for all."""
    run_commands(config.prepare.each_node, key="prepare.each_node", timeout_s=config.prepare.timeout_s)
    if config.prepare.fetch_model:
        fetch_models(config)
    if once:
        prepare_once(config)


def prepare_once(config: Config) -> None:
    run_commands(config.prepare.once, key="prepare.once", timeout_s=config.prepare.timeout_s)


def fetch_models(config: Config) -> None:
    """Every model of the run: the policy's, and those of rewards."""
    fetch_model(config.model.path)
    for index, reward in enumerate(config.reward):
        if reward.type == "model":
            fetch_model(reward.path, key=f"reward.{index}.path")


def run_commands(commands: Sequence[str], *, key: str, timeout_s: float) -> None:
    """Each by /bin/sh in the current folder, one after the other; their output is this process's. ``timeout_s``: for all of them."""
    wait = Wait(timeout_s)
    for index, command in enumerate(commands):
        say(f"{key}: {command}")
        status = _run(command, timeout_s=wait.left_s)
        if status is None:
            raise ClusterError(
                f"{key}[{index}] has not ended, and prepare.timeout_s={timeout_s:g} is over: {command}; its own messages are above"
            )
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise ClusterError(f"{key}[{index}] {how}: {command}; its own messages are above")


def _run(command: str, *, timeout_s: float) -> int | None:
    """Its status; None: its time is over, and it was ended with all that it had started."""
    # In the process group of this one, which gets Ctrl-C.
    process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started. They may remove what they began."""
    own = Process.of(process.pid)
    found = [*descendants(process.pid), *([own] if own else [])]
    signal_processes(found, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    signal_processes(found, signal.SIGKILL)
    process.wait()
