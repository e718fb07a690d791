"""Finds the weights and the config of a path by the names of files."""

from __future__ import annotations

from pathlib import Path

from rollcall.config.yaml import read_small
from rollcall.model.stored.manifest import checkpoints_of, is_checkpoint, newest_checkpoint

LATEST = "latest_checkpointed_iteration.txt"  # of verl
SHARDS = ("part-*-of-*.safetensors", "model_world_size_*_rank_*.pt", ".metadata")
PROBE = "probe.json"  # in a model directory of ours: what the trained model computed (``checkpoint/probe.py``)
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT: its folder has the weights of an adapter, not of a model
ADAPTER_WEIGHTS = "adapter_model.safetensors"
METADATA = ".metadata"  # of PyTorch's distributed checkpoints


def verl_folder(path: Path) -> Path | None:
    """The folder with the shards that ``path`` is or leads to; None if there are none.

    Leads to: verl's folder of checkpoints, or one checkpoint, whose ``actor/`` is the policy.
    """
    candidates = [path, path / "actor"]
    if (path / LATEST).is_file():
        step = read_small(path / LATEST, most=1000).decode(errors="replace").strip()
        candidates.append(path / f"global_step_{step}" / "actor")
    return next((one for one in candidates if any(one.glob("model_world_size_*_rank_*.pt"))), None)


def is_model_dir(path: Path) -> bool:
    """A directory that transformers opens by itself; shards of any kind are not one, even with a config."""
    sharded = any(any(path.glob(name)) for name in SHARDS)
    return (path / "config.json").is_file() and not sharded


def checkpoint_of(path: Path) -> Path | None:
    """The checkpoint of ours that ``path`` is or leads to: of a run the newest, of the folder ``model/`` in one its own."""
    for folder in (path, path.parent):
        if is_checkpoint(folder) and (folder == path or path.name == "model"):
            return folder
    for folder in (path, path / "checkpoints"):
        if checkpoints_of(folder):
            return newest_checkpoint(folder)
    return None


def adapter_folder(path: Path) -> Path | None:
    """The folder with the adapter that ``path`` is, or that the checkpoint it leads to holds; None if there is none."""
    candidates = [path]
    if not is_model_dir(path) and (checkpoint := checkpoint_of(path)) is not None:
        candidates.append(checkpoint / "model")
    return next((one for one in candidates if (one / ADAPTER_CONFIG).is_file()), None)


def config_folder(path: Path) -> Path | None:
    """The folder with config.json and tokenizer of the model at ``path``; None if there is none."""
    if is_model_dir(path):
        return path
    if (checkpoint := checkpoint_of(path)) is not None:
        found = [checkpoint / "model"]
    elif (folder := verl_folder(path)) is not None:
        found = [folder / "huggingface", folder]
    else:
        found = [path, path / "huggingface", path / "model"]
    return next((folder for folder in found if (folder / "config.json").is_file()), None)
