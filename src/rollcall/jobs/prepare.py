"""What a node does before a run: the commands of `prepare:`, and the models that the run file names, into this node's cache."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from rollcall.config import Config
from rollcall.errors import ClusterError
from rollcall.model.fetch import fetch_model
from rollcall.wait import say


def prepare_node(config: Config, *, once: bool) -> None:
    """On every node; with ``once`` on the first node also what one node does for all."""
    run_commands(config.prepare.each_node, key="prepare.each_node")
    if config.prepare.fetch_model:
        fetch_models(config)
    if once:
        prepare_once(config)


def prepare_once(config: Config) -> None:
    run_commands(config.prepare.once, key="prepare.once")


def fetch_models(config: Config) -> None:
    """Every model of the run: the policy's, and those of rewards."""
    fetch_model(config.model.path)
    for index, reward in enumerate(config.reward):
        if reward.type == "model":
            fetch_model(reward.path, key=f"reward.{index}.path")


def run_commands(commands: Sequence[str], *, key: str) -> None:
    """Each by /bin/sh in the current folder, one after the other; their output is this process's."""
    for index, command in enumerate(commands):
        say(f"{key}: {command}")
        status = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL).returncode
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise ClusterError(f"{key}[{index}] {how}: {command}; its own messages are above")
