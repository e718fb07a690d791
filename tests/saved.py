"""Checkpoints of gangs, as a run writes them: every rank its part, then the manifest."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiny import make_tokenizer

from rollcall.checkpoint.parts import PartWriter
from rollcall.checkpoint.saving import join_written
from rollcall.checkpoint.store import CheckpointStore, Written
from rollcall.checkpoint.training import ConfigFiles, files_in_parts, write_critic, write_learner
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner


def save(gang: Gang, directory: Path, *, learner: Learner | None = None, critic: Critic | None = None) -> None:
    """All ranks call this. ``directory`` then holds the checkpoint: in parts if one of the models is."""
    if any(model.body.in_parts for model in (learner, critic) if model is not None):
        written = write_parts(directory, learner=learner, critic=critic)
    else:
        written = Written()
        directory.mkdir(exist_ok=True)
        if learner is not None:
            write_learner(learner, make_tokenizer(), directory)
        if critic is not None:
            write_critic(critic, directory)
    everyone = [Written(**one) for one in gang.gather(asdict(written))]
    if gang.rank == 0:
        joined = join_written(everyone)
        manifest = {"step": 1, "score": None, **joined.facts, "files": joined.files}
        (directory / "manifest.json").write_text(json.dumps(manifest))
    gang.gather(None)  # nobody reads before it is there


def write_parts(directory: Path, *, learner: Learner | None, critic: Critic | None) -> Written:
    config_files = ConfigFiles().files(learner, make_tokenizer(), stops=()) if learner is not None else {}
    files, facts = files_in_parts(learner, critic, config_files=config_files)
    writer = PartWriter()
    writer.copy(files, facts=facts)
    writer.start(directory)
    while (written := writer.written()) is None:
        time.sleep(0.01)
    return written


def commit(store: CheckpointStore, step: int, source: Path, **about: Any) -> Path:
    """A checkpoint that was saved to ``source``, as the store's own of that step."""
    manifest = json.loads((source / "manifest.json").read_text())

    def write(folder: Path) -> Written:
        for name in manifest["files"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((source / name).read_bytes())
        facts = {key: value for key, value in manifest.items() if key not in ("step", "score", "files")}
        return Written(files=manifest["files"], facts=facts)

    return store.save(step, write=write, state={"next_draw": 0}, score=None, **about)
