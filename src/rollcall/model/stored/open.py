"""Opens the weights at a path, whatever program wrote them: a Rollcall, verl or PyTorch checkpoint, or a model directory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rollcall.model.stored.dcp import open_dcp
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.find import (
    MANIFEST,
    METADATA,
    checkpoint_of,
    checkpoints_of,
    is_model_dir,
    missing_file,
    read_manifest,
    verl_folder,
)
from rollcall.model.stored.safetensors import open_model_dir, open_parts
from rollcall.model.stored.tensors import Stored
from rollcall.model.stored.verl import open_verl

KNOWN = "a checkpoint or run directory of Rollcall, a checkpoint of verl (FSDP) or of PyTorch (DCP), or a model directory with safetensors"
_PART = re.compile(r"model/part-\d+-of-\d+\.safetensors")


def open_checkpoint(checkpoint: Path) -> Stored:
    """Open the model in one checkpoint, sharded or not."""
    manifest = read_manifest(checkpoint)
    of_model = {name: file for name, file in manifest.files.items() if name.startswith("model/")}
    if why := missing_file(of_model.values()):  # the tokenizer must be present too
        raise StoredError(
            f"{checkpoint} is not complete: {why}; restore the file, or copy it from its node with `rollcall gather`"
        )
    facts = {**manifest.facts, "has_critic": any(name.startswith("critic") for name in manifest.files)}
    known = {file.path: file for file in of_model.values()}
    if parts := [file for name, file in of_model.items() if _PART.fullmatch(name)]:
        stored = open_parts(parts, origin=str(checkpoint), folder=checkpoint / "model", facts=facts)
        return replace(stored, files=known)
    if not any(name.endswith(".safetensors") for name in of_model):
        raise StoredError(f"{checkpoint} has no weights; use another checkpoint")
    whole = open_model_dir(checkpoint / "model")
    if unknown := next((path for path in whole.files if path not in known), None):
        raise StoredError(
            f"{unknown} is not in {checkpoint / MANIFEST}: it does not belong to the checkpoint; remove it"
        )
    return replace(whole, origin=str(checkpoint), files=known, kind="checkpoint", facts=facts)


def open_stored(path: Path) -> Stored:
    """Open the tensors stored at ``path``. For a run directory or a ``checkpoints/`` folder, open the newest complete checkpoint."""
    if not path.is_dir():
        there = ", ".join(one.name for one in checkpoints_of(path.parent))
        raise StoredError(
            f"{path} is not a directory; " + (f"its folder contains {there}" if there else f"use {KNOWN}")
        )
    if not is_model_dir(path):
        if (checkpoint := checkpoint_of(path)) is not None:
            return open_checkpoint(checkpoint)
        if checkpoints_of(path) or checkpoints_of(path / "checkpoints"):
            raise StoredError(f"{path} has no complete checkpoint; use another run")
    if (folder := verl_folder(path)) is not None:
        return open_verl(folder)
    if (path / METADATA).is_file():
        return open_dcp(path)
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return open_model_dir(path)
    if (path / "model" / "config.json").is_file():  # a run that kept its model but no checkpoint
        return open_model_dir(path / "model")
    raise StoredError(f"{path} has no weights that Rollcall can read; use {KNOWN}")
