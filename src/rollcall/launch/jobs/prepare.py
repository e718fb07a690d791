"""Prepares a node for a run: runs the commands of `prepare:` and downloads the models of the run file into this node's cache."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait, say
from rollcall.config import Config
from rollcall.model.fetch import fetch_model

END_S = 5.0  # between SIGTERM and SIGKILL


def prepare_node(config: Config, *, once: bool) -> None:
    """``once``: this is the first node, which also does what one node does for all."""
    run_commands(config.prepare.each_node, key="prepare.each_node", timeout_s=config.prepare.timeout_s)
    if config.prepare.fetch_model:
        fetch_model(config.model.path)
        for index, reward in enumerate(config.reward):
            if reward.type == "model":
                fetch_model(reward.path, key=f"reward.{index}.path")
    if once:
        prepare_once(config)


def prepare_once(config: Config) -> None:
    run_commands(config.prepare.once, key="prepare.once", timeout_s=config.prepare.timeout_s)


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
    """Its status; None if its time was over, and it was ended with all that it had started."""
    # In the process group of this one, which gets Ctrl-C.
    process = psutil.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL)
    try:
        return process.wait(timeout_s)
    except psutil.TimeoutExpired:
        return None
    finally:
        if process.is_running():
            started = [*process.children(recursive=True), process]
            for each in started:
                _tell(each.terminate)  # it may remove what it began
            for each in psutil.wait_procs(started, timeout=END_S)[1]:
                _tell(each.kill)
            process.wait()


def _tell(signal: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        signal()
