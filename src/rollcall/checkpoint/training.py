"""What a checkpoint holds of the models in training: weights as a model directory, optimizer states beside it.

Weights and states are whole, however many ranks have parts of them, so a checkpoint is read by any number of ranks. All
ranks of a gang call these functions; the first one writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollcall.checkpoint.export import export_model
from rollcall.decoder import module_names
from rollcall.learner.learner import Critic, Learner
from rollcall.patience import plain_disk_errors


def write_learner(learner: Learner, tokenizer: Any, directory: Path) -> None:
    state = learner.body.whole_state(learner.optimizer)
    model = learner.whole_model()
    if model is not None:
        export_model(model, tokenizer, directory / "model", dtype=None)
        _save(state, directory / "actor.pt")


def read_learner(learner: Learner, directory: Path) -> None:
    """Into the tensors that are there: engine and graphs keep reading the same addresses. (The engine beside a learner
    that is in parts gets the weights with the next version.)"""
    weights = _Stored(directory / "model")
    learner.body.load(weights)
    _read_state(learner, directory / "actor.pt", weights=weights)
    learner.refresh()


class _Stored(Mapping[str, torch.Tensor]):
    """The weights of a model directory under the decoder's names, each read when it is asked for."""

    def __init__(self, directory: Path):
        self._files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self._files |= dict.fromkeys(safe_open(path, "pt").keys(), path)

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = [safe_open(self._files[part], "pt").get_tensor(part) for part in module_names(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_critic(critic: Critic, directory: Path) -> None:
    first = critic.gang.rank == 0
    weights = {
        name: tensor.detach().cpu().contiguous() if first else None for name, tensor in critic.body.whole_tensors()
    }
    state = critic.body.whole_state(critic.optimizer)
    if first:
        with plain_disk_errors(directory):
            save_file(weights, directory / "critic.safetensors")  # type: ignore[arg-type]
        _save(state, directory / "critic.pt")


def read_critic(critic: Critic, directory: Path) -> None:
    weights = load_file(directory / "critic.safetensors")
    critic.body.load(weights)
    _read_state(critic, directory / "critic.pt", weights=weights)


def _save(state: Any, path: Path) -> None:
    # Through a file of Python's: torch's own says that a write failed, and not why.
    with plain_disk_errors(path), path.open("wb") as file:
        torch.save(state, file)


def _read_state(model: Learner | Critic, path: Path, *, weights: Mapping[str, torch.Tensor]) -> None:
    """Mapped where a rank needs but its part of it. ``weights`` are the checkpoint's, at the precision they have there."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=model.body.in_parts)
    if model.optimizer.uses_masters and not state["masters"]:
        state["masters"] = weights  # written where the weights were trained without: they are what was trained
    model.body.load_state(model.optimizer, state)
