"""A run's model, in one place."""

from __future__ import annotations

from pathlib import Path

from rollcall.stored.checkpoint import checkpoints_of, is_checkpoint, newest_checkpoint
from rollcall.stored.tensors import StoredError


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that ``path`` is; of a run directory or its ``checkpoints`` folder, the newest whole one."""
    if is_checkpoint(path):
        return path.absolute()
    for folder in (path, path / "checkpoints"):
        if checkpoints_of(folder) and (newest := newest_checkpoint(folder)) is not None:
            return newest.absolute()
    raise StoredError(f"{path} is neither a checkpoint nor a run directory with one; give one of them")
