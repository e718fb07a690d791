"""Saves and restores the trained models: the controller's ``Saving`` calls ``Trained`` in each training process, or in this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollcall.base.errors import CheckpointError, ConfigError, short_of_memory
from rollcall.checkpoint import local
from rollcall.checkpoint.export import config_files
from rollcall.checkpoint.parts import PartWriter
from rollcall.checkpoint.probe import probe_of, with_probe
from rollcall.checkpoint.store import Written
from rollcall.checkpoint.training import export_learner, files_to_save, read_critic, read_learner
from rollcall.config import Config
from rollcall.learner.learner import Critic, Learner

Call = Callable[..., list[Any]]  # calls a method in these processes and returns their results


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The controller's side of a save. ``processes`` are the numbers by which ``call`` identifies the training processes."""

    call: Call
    processes: Sequence[int]
    place: Literal["shared", "local"]
    run_name: str

    def copy(self) -> None:
        """Copy the models' state to host memory, so that the models may change while ``write`` runs."""
        self.call(self.processes, "copy_parts")

    def write(self, directory: Path) -> Written:
        directory = directory.resolve()
        run = local.name_of_run(directory.parent, run=self.run_name) if self.place == "local" else None
        self.call(self.processes, "write_parts", directory, run)
        return join_written(self._wait())

    def _wait(self) -> list[Written]:
        """Poll until all parts are written. A process that blocked until then could not train in the meantime."""
        written: dict[int, Written] = {}
        pause_s = 0.02
        while asked := [process for process in self.processes if process not in written]:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
            answers = zip(asked, self.call(asked, "parts_written"), strict=True)
            written |= {process: answer for process, answer in answers if answer is not None}
        return list(written.values())

    def tidy(self, checkpoints: Path, *, keep: Sequence[str]) -> None:
        """Remove parts on the nodes' own disks that no checkpoint refers to any longer."""
        if (checkpoints / local.FOLDER_NAME).exists():
            self.call(self.processes, "tidy_parts", local.name_of_run(checkpoints, run=self.run_name), list(keep))

    def missing(self, directory: Path) -> str:
        """Describe a checkpoint part that no node has. Empty if no part is missing."""
        files = local.elsewhere(directory)
        here = self.call(self.processes, "parts_here", files) if files else []
        for name in files.keys() - {name for names in here for name in names}:
            facts = files[name]
            return f"{facts['place']} of node {facts['node']} ({facts['host']}) does not exist on any node of this run"
        return ""

    def read(self, directory: Path) -> None:
        """Load a checkpoint, after verifying the checksums of its files on the nodes' own disks. If a process lacks any of these, all of
        them are copied to the run's folder, each from a process that has it."""
        directory = directory.resolve()
        if why := self.missing(directory):
            raise CheckpointError(f"checkpoint {directory} is incomplete: {why}; continue from an earlier one")
        files = local.elsewhere(directory)
        here = self.call(self.processes, "parts_here", files) if files else []
        copy = any(len(names) < len(files) for names in here)
        shares: dict[int, dict[str, Mapping[str, Any]]] = {}
        for number, (name, facts) in enumerate(files.items()):
            holders = [process for process, names in zip(self.processes, here, strict=True) if name in names]
            shares.setdefault(holders[number % len(holders)], {})[name] = facts
        for process, share in shares.items():
            self.call([process], "bring_parts", directory, share, copy)
        self.call(self.processes, "read_checkpoint", directory)

    def base(self) -> Mapping[str, Any]:
        """Ask a process with the policy for the identity of the model that the run starts from (``origin.base_of``)."""
        return next(filter(None, self.call(self.processes, "base")))


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
            "checkpoint.place=local needs a model that is sharded over several processes, but here one process writes the whole "
            "model to run.dir; remove the key, or set actor.sharding=fsdp"
        )
    return Saving(call=call, processes=processes, place=place, run_name=config.run.name)


# In each process


def _saving(why: str) -> str:
    return (
        f"there is not enough memory to save a checkpoint ({why}): it is copied to host memory before it is written. Free memory on "
        "this node; on a GPU, lower rollout.kv_memory_fraction or actor.tokens_per_microbatch. Earlier checkpoints are intact"
    )


class Trained:
    """Saves and loads the models that one process trains.

    A checkpoint takes three calls: ``copy_parts``, in which all processes of a gang take part while the run waits; ``write_parts``, which
    starts a thread that writes; and ``parts_written``, which the caller repeats until it returns a result.
    """

    def __init__(
        self, *, tokenizer: Any, stop_token_ids: tuple[int, ...] = (), learner: Learner | None, critic: Critic | None
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.learner = learner
        self.critic = critic
        self._parts = PartWriter()
        self._config_files: dict[str, bytes] | None = None  # without the probe, the same for every save of a run

    def copy_parts(self) -> None:
        """Copy the models' state to host memory. Afterwards the models may change."""
        found = self.config_files()
        with short_of_memory(_saving):
            files, facts = files_to_save(self.learner, self.critic, config_files=found)
            self._parts.copy(files, facts=facts)

    def config_files(self) -> dict[str, bytes]:
        """Return the policy's config files on the gang's first rank. All ranks must call this; the others get an empty result."""
        learner = self.learner
        if learner is None or (probe := probe_of(learner)) is None:
            return {}
        if self._config_files is None:
            dtype, stops = learner.body.dtype, self.stop_token_ids
            self._config_files = config_files(learner.model, self.tokenizer, dtype=dtype, stops=stops)
        return with_probe(self._config_files, probe)

    def write_parts(self, directory: Path, run: str | None = None) -> None:
        """Start writing the copy to the checkpoint's folder, or, if ``run`` is given, to that run's folder on this node."""
        place = None if run is None else local.folder_of(run) / directory.name.removeprefix(".tmp-")
        self._parts.start(directory, place=place)

    def parts_written(self) -> Written | None:
        """Return the result of the write, or None if it is still running."""
        return self._parts.written()

    def parts_here(self, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
        return local.present(files)

    def bring_parts(self, directory: Path, files: Mapping[str, Mapping[str, Any]], copy: bool) -> None:
        local.bring(directory, files, copy=copy)

    def tidy_parts(self, run: str, keep: Collection[str]) -> None:
        local.tidy(run, keep=keep)

    def read_checkpoint(self, directory: Path) -> None:
        if self.learner is not None:
            read_learner(self.learner, directory)
        if self.critic is not None:
            read_critic(self.critic, directory)

    def export(self, directory: Path) -> None:
        assert self.learner is not None
        adapter = self.learner.adapter
        merged = adapter is not None and adapter.section.export == "merged"
        export_learner(self.learner, self.tokenizer, directory, stops=self.stop_token_ids, merged=merged)
