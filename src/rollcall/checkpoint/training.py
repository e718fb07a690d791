"""What a checkpoint holds of the models in training: weights as a model directory, optimizer states beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollcall.checkpoint.export import export_model
from rollcall.learner.learner import Critic, Learner


def write_learner(learner: Learner, tokenizer: Any, directory: Path) -> None:
    export_model(learner.model, tokenizer, directory / "model", dtype=None)
    torch.save(learner.optimizer.state_dict(), directory / "actor.pt")


def read_learner(learner: Learner, directory: Path) -> None:
    """Into the tensors that are there: engine and graphs keep reading the same addresses."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted((directory / "model").glob("*.safetensors")):
        weights |= load_file(path)
    copy_into(dict(learner.model.named_parameters()), weights)
    learner.optimizer.load_state_dict(torch.load(directory / "actor.pt", map_location="cpu", weights_only=True))


def write_critic(critic: Critic, directory: Path) -> None:
    state = {name: tensor.detach().contiguous() for name, tensor in critic.named_tensors().items()}
    save_file(state, directory / "critic.safetensors")
    torch.save(critic.optimizer.state_dict(), directory / "critic.pt")


def read_critic(critic: Critic, directory: Path) -> None:
    copy_into(critic.named_tensors(), load_file(directory / "critic.safetensors"))
    critic.optimizer.load_state_dict(torch.load(directory / "critic.pt", map_location="cpu", weights_only=True))


@torch.no_grad()
def copy_into(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(weights[name])
