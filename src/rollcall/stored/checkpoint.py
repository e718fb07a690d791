"""The model of one of our own checkpoints, whole or sharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollcall.stored.files import StoredError
from rollcall.stored.manifest import MANIFEST, missing_file, read_manifest
from rollcall.stored.safetensors import open_model_dir, open_parts
from rollcall.stored.tensors import Stored


def open_checkpoint(checkpoint: Path) -> Stored:
    """The model of one checkpoint, whole or sharded."""
    manifest = read_manifest(checkpoint)
    of_model = {name: file for name, file in manifest.files.items() if name.startswith("model/")}
    if why := missing_file(of_model.values()):  # a tokenizer belongs to it too
        raise StoredError(
            f"{checkpoint} is not complete: {why}; restore the file, or bring it from its node with `rollcall gather`"
        )
    facts = {**manifest.facts, "has_critic": any(name.startswith("critic") for name in manifest.files)}
    files = list(manifest.weights.values())
    known = {file.path: file for file in of_model.values()}
    if manifest.is_sharded:
        parts = open_parts(files, origin=str(checkpoint), folder=checkpoint / "model", facts=facts)
        return replace(parts, files=known)
    if not files:
        raise StoredError(f"{checkpoint} holds no weights; give another checkpoint")
    whole = open_model_dir(checkpoint / "model")
    if unknown := next((path for path in whole.files if path not in known), None):
        raise StoredError(
            f"{unknown} is not in {checkpoint / MANIFEST}: it does not belong to the checkpoint; remove it"
        )
    return replace(whole, origin=str(checkpoint), files=known, kind="checkpoint", facts=facts)
