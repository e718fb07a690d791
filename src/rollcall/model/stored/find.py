"""Finds the weights and the config at a path by file names."""

from __future__ import annotations

from pathlib import Path

from rollcall.config.yaml import read_small
from rollcall.model.stored.manifest import checkpoints_of, is_checkpoint, newest_checkpoint

LATEST = "latest_checkpointed_iteration.txt"  # written by verl
SHARDS = ("part-*-of-*.safetensors", "model_world_size_*_rank_*.pt", ".metadata")
PROBE = "probe.json"  # in our model directories: what the trained model computed (``checkpoint/probe.py``)
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's; its folder contains adapter weights, not a model
ADAPTER_WEIGHTS = "adapter_model.safetensors"
METADATA = ".metadata"  # in PyTorch's distributed checkpoints


def verl_folder(path: Path) -> Path | None:
    """Return the folder with verl's shards, or None if there are none.

    ``path`` may be that folder, one verl checkpoint (whose ``actor/`` is the policy), or verl's checkpoints folder.
    """
    candidates = [path, path / "actor"]
    if (path / LATEST).is_file():
        step = read_small(path / LATEST, most=1000).decode(errors="replace").strip()
        candidates.append(path / f"global_step_{step}" / "actor")
    return next((one for one in candidates if any(one.glob("model_world_size_*_rank_*.pt"))), None)


def is_model_dir(path: Path) -> bool:
    """Whether transformers can open this directory by itself. A directory with shards is not a model dir, even with a config."""
    sharded = any(any(path.glob(name)) for name in SHARDS)
    return (path / "config.json").is_file() and not sharded


def checkpoint_of(path: Path) -> Path | None:
    """Return the Rollcall checkpoint for ``path``: the path itself, the newest of a run, or the parent of a ``model/`` folder."""
    for folder in (path, path.parent):
        if is_checkpoint(folder) and (folder == path or path.name == "model"):
            return folder
    for folder in (path, path / "checkpoints"):
        if checkpoints_of(folder):
            return newest_checkpoint(folder)
    return None


def adapter_folder(path: Path) -> Path | None:
    """Return the adapter folder: ``path`` itself or the one inside its checkpoint; None if there is none."""
    candidates = [path]
    if not is_model_dir(path) and (checkpoint := checkpoint_of(path)) is not None:
        candidates.append(checkpoint / "model")
    return next((one for one in candidates if (one / ADAPTER_CONFIG).is_file()), None)


def config_folder(path: Path) -> Path | None:
    """Return the folder with config.json and tokenizer for the model at ``path``, or None if there is none."""
    if is_model_dir(path):
        return path
    if (checkpoint := checkpoint_of(path)) is not None:
        found = [checkpoint / "model"]
    elif (folder := verl_folder(path)) is not None:
        found = [folder / "huggingface", folder]
    else:
        found = [path, path / "huggingface", path / "model"]
    return next((folder for folder in found if (folder / "config.json").is_file()), None)
