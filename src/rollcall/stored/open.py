"""What a path holds, whatever wrote it: a checkpoint of ours, of verl or of PyTorch, or a model directory."""

from __future__ import annotations

from pathlib import Path

from rollcall.stored.checkpoint import open_checkpoint
from rollcall.stored.dcp import open_dcp
from rollcall.stored.files import StoredError
from rollcall.stored.find import METADATA, checkpoint_of, is_model_dir, verl_folder
from rollcall.stored.manifest import checkpoints_of
from rollcall.stored.safetensors import open_model_dir
from rollcall.stored.tensors import Stored
from rollcall.stored.verl import open_verl

KNOWN = "a checkpoint or run directory of Rollcall, a checkpoint of verl (FSDP) or of PyTorch (DCP), or a model directory with safetensors"


def open_stored(path: Path) -> Stored:
    """The tensors stored at ``path``. Of a run directory or a ``checkpoints/`` folder: the newest whole checkpoint."""
    if not path.is_dir():
        there = ", ".join(one.name for one in checkpoints_of(path.parent))
        raise StoredError(
            f"{path} is not a directory; " + (f"there are {there} beside it" if there else f"give {KNOWN}")
        )
    if not is_model_dir(path):
        if (checkpoint := checkpoint_of(path)) is not None:
            return open_checkpoint(checkpoint)
        if checkpoints_of(path) or checkpoints_of(path / "checkpoints"):
            raise StoredError(f"{path} holds no whole checkpoint; give another")
    if (folder := verl_folder(path)) is not None:
        return open_verl(folder)
    if (path / METADATA).is_file():
        return open_dcp(path)
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return open_model_dir(path)
    if (path / "model" / "config.json").is_file():  # a run that kept its model and no checkpoint
        return open_model_dir(path / "model")
    raise StoredError(f"{path} holds no weights that can be read; give {KNOWN}")
