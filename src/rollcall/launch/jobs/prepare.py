"""Prepares a node for a run: runs the `prepare:` commands and downloads the run file's models into this node's cache."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress

import psutil

from rollcall.base.errors import ClusterError
from rollcall.base.wait import Wait, say
from rollcall.config import Config
from rollcall.model.fetch import fetch_model

END_S = 5.0  # between SIGTERM and SIGKILL


def prepare_node(config: Config, *, once: bool) -> None:
    """Prepare this node. ``once`` is true on the first node, which also runs `prepare.once` for all nodes."""
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
    """Run the commands with /bin/sh, one after the other, in this process's folder. ``timeout_s`` limits their total time."""
    wait = Wait(timeout_s)
    for index, command in enumerate(commands):
        say(f"{key}: {command}")
        status = _run(command, timeout_s=wait.left_s)
        if status is None:
            raise ClusterError(
                f"{key}[{index}] did not finish within prepare.timeout_s={timeout_s:g}: {command}; its output is above"
            )
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise ClusterError(f"{key}[{index}] {how}: {command}; its output is above")


def _run(command: str, *, timeout_s: float) -> int | None:
    """Return the command's status, or None if it timed out and was killed with all processes that it had started."""
    # Stays in this process group, so it gets Ctrl-C too.
    process = psutil.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL)
    try:
        return process.wait(timeout_s)
    except psutil.TimeoutExpired:
        return None
    finally:
        if process.is_running():
            started = [*process.children(recursive=True), process]
            for each in started:
                with suppress(psutil.NoSuchProcess):
                    each.terminate()  # gives it time to clean up
            for each in psutil.wait_procs(started, timeout=END_S)[1]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
