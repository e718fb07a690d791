"""The models that one process trains, with saving and loading.

A checkpoint takes three calls: ``copy_parts``, in which all of a gang's processes take part while the run waits; ``write_parts``, which
starts to write in a thread; and ``parts_written``, which is repeated until it returns a result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rollcall.base.errors import short_of_memory
from rollcall.checkpoint import local
from rollcall.checkpoint.parts import PartWriter
from rollcall.checkpoint.store import Written
from rollcall.checkpoint.training import (
    ConfigFiles,
    export_learner,
    files_to_save,
    read_critic,
    read_learner,
)
from rollcall.learner.learner import Critic, Learner
from rollcall.run.origin import base_of


def _saving(why: str) -> str:
    return (
        f"there is no memory left to save a checkpoint ({why}); it is copied to host memory first. Leave more of it free on this node; on a "
        "card lower rollout.kv_memory_fraction or actor.tokens_per_microbatch. The checkpoints before this one are whole"
    )


class Trained:
    def __init__(
        self, *, tokenizer: Any, stop_token_ids: tuple[int, ...] = (), learner: Learner | None, critic: Critic | None
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.learner = learner
        self.critic = critic
        self._parts = PartWriter()
        self._config_files = ConfigFiles()

    def copy_parts(self) -> None:
        """Copy what will be saved to host memory, so that the models may change afterwards."""
        config_files: Mapping[str, bytes] = {}
        if self.learner is not None:
            config_files = self._config_files.files(self.learner, self.tokenizer, stops=self.stop_token_ids)
        with short_of_memory(_saving):
            files, facts = files_to_save(self.learner, self.critic, config_files=config_files)
            self._parts.copy(files, facts=facts)

    def write_parts(self, directory: Path, run: str | None = None) -> None:
        """Start writing the copy to the checkpoint's folder, or with ``run`` to that run's folder on this node."""
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

    def base(self) -> dict[str, Any]:
        return {} if self.learner is None else base_of(self.learner, self.tokenizer)

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
