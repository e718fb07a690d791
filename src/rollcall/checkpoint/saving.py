"""Saves and restores what the training processes train, either in this process or through calls to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollcall.base.errors import CheckpointError, ConfigError
from rollcall.checkpoint import local
from rollcall.checkpoint.store import Written
from rollcall.config import Config

Call = Callable[..., list[Any]]  # calls a method on these processes and returns their results


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """``call`` reaches the training processes by their numbers, starting at 0."""

    call: Call
    processes: Sequence[int]
    place: Literal["shared", "local"]
    run_name: str

    def copy(self) -> None:
        """Copy what is to be saved to host memory, so that the models may change while ``write`` runs."""
        self.call(self.processes, "copy_parts")

    def write(self, directory: Path) -> Written:
        directory = directory.resolve()
        run = local.name_of_run(directory.parent, run=self.run_name) if self.place == "local" else None
        self.call(self.processes, "write_parts", directory, run)
        return join_written(self._wait())

    def _wait(self) -> list[Written]:
        """Poll until all parts are written. A process that waited for its disk could not train meanwhile."""
        written: dict[int, Written] = {}
        pause_s = 0.02
        while asked := [process for process in self.processes if process not in written]:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
            answers = zip(asked, self.call(asked, "parts_written"), strict=True)
            written |= {process: answer for process, answer in answers if answer is not None}
        return list(written.values())

    def tidy(self, checkpoints: Path, *, keep: Sequence[str]) -> None:
        """Remove parts on the nodes' own disks that no checkpoint refers to any more."""
        if (checkpoints / local.FOLDER_NAME).exists():
            run = local.name_of_run(checkpoints, run=self.run_name)
            self.call(self.processes, "tidy_parts", run, list(keep))

    def missing(self, directory: Path) -> str:
        """Describe a checkpoint part that no node has; empty if none is missing."""
        files = local.elsewhere(directory)
        here = self.call(self.processes, "parts_here", files) if files else []
        for name in files.keys() - {name for names in here for name in names}:
            facts = files[name]
            return f"{facts['place']} of node {facts['node']} ({facts['host']}) does not exist on any node of this run"
        return ""

    def read(self, directory: Path) -> None:
        directory = directory.resolve()
        self._bring(directory)
        self.call(self.processes, "read_checkpoint", directory)

    def base(self) -> Mapping[str, Any]:
        """Return the identity of the model that the run starts from (``origin.base_of``), from a process that has the policy."""
        return next(filter(None, self.call(self.processes, "base")))

    def _bring(self, directory: Path) -> None:
        """Compare files on the nodes' own disks with their checksums. If a process lacks any of them, copy all of them to the
        run's folder, each from a process that has it."""
        files = local.elsewhere(directory) if (directory / "manifest.json").is_file() else {}
        if not files:
            return
        if why := self.missing(directory):
            raise CheckpointError(f"checkpoint {directory} is not complete: {why}; continue from an earlier one")
        here = self.call(self.processes, "parts_here", files)
        copy = any(len(names) < len(files) for names in here)
        shares: dict[int, dict[str, Mapping[str, Any]]] = {process: {} for process in self.processes}
        for number, (name, facts) in enumerate(files.items()):
            holders = [process for process, names in zip(self.processes, here, strict=True) if name in names]
            shares[holders[number % len(holders)]][name] = facts
        for process, share in shares.items():
            if share:
                self.call([process], "bring_parts", directory, share, copy)


def join_written(everyone: Iterable[Written]) -> Written:
    joined = Written()
    for one in everyone:
        joined.files.update(one.files)
        joined.facts.update(one.facts)
    return joined


def saving_of(config: Config, call: Call, *, processes: Sequence[int], in_parts: bool) -> Saving:
    place = config.checkpoint.place
    if place == "local" and not in_parts:
        raise ConfigError(
            "checkpoint.place=local is for models that are in parts on several processes, and here one process writes the whole "
            "model to run.dir; leave the key out, or set actor.sharding=fsdp"
        )
    return Saving(call=call, processes=processes, place=place, run_name=config.run.name)
