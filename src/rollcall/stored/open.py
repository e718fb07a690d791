"""What a path holds, whatever wrote it: a checkpoint of ours, of verl or of PyTorch, or a model directory."""

from __future__ import annotations

from pathlib import Path

from rollcall.stored.checkpoint import checkpoints_of, is_checkpoint, newest_checkpoint, open_checkpoint
from rollcall.stored.dcp import METADATA, open_dcp
from rollcall.stored.safetensors import open_model_dir
from rollcall.stored.tensors import Stored, StoredError
from rollcall.stored.verl import open_verl, verl_folder

KNOWN = "a checkpoint or run directory of Rollcall, a checkpoint of verl (FSDP) or of PyTorch (DCP), or a model directory with safetensors"


def open_stored(path: Path) -> Stored:
    """The tensors stored at ``path``. Of a run directory or a ``checkpoints/`` folder: the newest whole checkpoint."""
    if not path.is_dir():
        raise StoredError(f"{path} is not a directory; give {KNOWN}")
    if is_checkpoint(path):
        return open_checkpoint(path)
    for folder in (path, path / "checkpoints"):
        if checkpoints_of(folder):
            newest = newest_checkpoint(folder)
            if newest is None:
                raise StoredError(f"{folder} holds no whole checkpoint; give another")
            return open_checkpoint(newest)
    if (folder := verl_folder(path)) is not None:
        return open_verl(folder)
    if (path / METADATA).is_file():
        return open_dcp(path)
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return open_model_dir(path)
    if (path / "model" / "config.json").is_file():  # a run that kept its model and no checkpoint
        return open_model_dir(path / "model")
    raise StoredError(f"{path} holds no weights that can be read; give {KNOWN}")
