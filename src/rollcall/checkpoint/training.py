"""Writes and reads the trained models in a checkpoint.

If every rank has the full model, the first rank writes the weights as a model directory, with the optimizer state next to it. If
the model is sharded, each rank writes its own part (``in_parts.py``). Any number of ranks can read either. All ranks of a gang
must call these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollcall.base.errors import NonFiniteError
from rollcall.base.patience import plain_disk_errors
from rollcall.base.words import ANOTHER_RUN
from rollcall.checkpoint.export import Weights, config_files, export_files, export_model
from rollcall.checkpoint.in_parts import (
    PartsOf,
    critic_files,
    is_in_parts,
    learner_files,
    load_weights,
    mesh_of,
    open_role,
    read_optimizer,
    refuse_others,
)
from rollcall.checkpoint.parts import File
from rollcall.checkpoint.probe import probe_of, with_probe
from rollcall.learner.layout import module_shapes
from rollcall.learner.learner import Body, Critic, Learner
from rollcall.model.adapter import Deltas
from rollcall.model.base import refuse_other_model
from rollcall.model.decoder import module_names
from rollcall.model.load import refuse_other_tensors
from rollcall.model.peft_files import read_adapter, write_adapter
from rollcall.model.stored.safetensors import open_model_dir


class ConfigFiles:
    """A policy's config files as bytes. They are the same for every save of a run, except for the probe."""

    def __init__(self) -> None:
        self._same: dict[str, bytes] | None = None

    def files(self, learner: Learner, tokenizer: Any, *, stops: Sequence[int]) -> dict[str, bytes]:
        """Return the files on the gang's first rank. The other ranks must call this too, but get an empty dict."""
        probe = probe_of(learner)
        if probe is None:
            return {}
        if self._same is None:
            self._same = config_files(learner.model, tokenizer, dtype=learner.body.dtype, stops=stops)
        return with_probe(self._same, probe)


def files_in_parts(
    learner: Learner | None, critic: Critic | None, *, config_files: Mapping[str, bytes]
) -> tuple[list[File], dict[str, Any]]:
    """Return the files that this rank writes for a sharded checkpoint, and the first rank's facts for the manifest."""
    files: list[File] = []
    facts: dict[str, Any] = {}
    if learner is not None:
        refuse_non_finite(learner, name="actor")
        files += learner_files(learner, config_files=config_files)
        if learner.gang.rank == 0:
            facts["mesh"] = mesh_of(learner.body)
            facts["model"] = {
                "architecture": type(learner.model).__name__,
                "model_type": learner.model.config.model_type,
                "dtype": str(learner.body.dtype).removeprefix("torch."),
                "tie_word_embeddings": "lm_head" not in learner.body.named,
            }
    if critic is not None:
        refuse_non_finite(critic, name="critic")
        files += critic_files(critic)
        if critic.gang.rank == 0:
            facts["critic_mesh"] = mesh_of(critic.body)
    return files, facts


def write_learner(learner: Learner, tokenizer: Any, directory: Path, *, stops: Sequence[int] = ()) -> None:
    """Write the policy. ``stops`` are the run's stop tokens for the model's generation config; if empty, use the model's own."""
    export_learner(learner, tokenizer, directory / "model", stops=stops)
    state = learner.body.whole_state(learner.optimizer)
    if learner.gang.rank == 0:
        _save(state, directory / "actor.pt")


def export_learner(
    learner: Learner, tokenizer: Any, directory: Path, *, stops: Sequence[int] = (), merged: bool = False
) -> None:
    """Write the model directory from the gang's first rank. ``stops`` is as in ``write_learner``. With an adapter, only the adapter
    is written, unless it should be ``merged`` into the weights."""
    refuse_non_finite(learner, name="actor")
    probe, body, adapter = probe_of(learner), learner.body, learner.adapter
    if adapter is not None and not merged:
        tensors = dict(body.whole_tensors())
        if learner.gang.rank == 0:
            write = partial(write_adapter, tensors=tensors, section=adapter.section, base=adapter.base)
            export_files(learner.model, tokenizer, directory, write=write, dtype=body.dtype, stops=stops, probe=probe)
        return
    weights = in_modules(body) if body.in_parts or adapter is not None else None
    try:
        if learner.gang.rank == 0:
            export_model(learner.model, tokenizer, directory, stops=stops, probe=probe, weights=weights)
    finally:
        # Every rank must contribute its part of every weight, even if the first rank cannot write.
        for _ in weights.values if weights is not None else ():
            continue


def in_modules(body: Body) -> Weights:
    """Return a model's full weights under their transformers names, with any adapter added, assembled one at a time."""
    layouts = {name: body.layout(name) for name in body.base_names}
    kinds = {name: (body.dtype, shape) for name, shape in module_shapes(layouts.values()).items()}

    def values() -> Iterator[tuple[str, Tensor]]:
        deltas = (
            Deltas(dict(body.whole_tensors()), gain=body.adapter.section.gain) if body.adapter is not None else None
        )
        for name, whole in body.base_tensors():
            for module, weight in zip(module_names(name), whole.split(layouts[name].rows), strict=True):
                yield module, weight if deltas is None else deltas.added_to(weight, module)

    return Weights(kinds=kinds, values=values())


def refuse_non_finite(model: Learner | Critic, *, name: str) -> None:
    """Raise on all ranks if the weights have diverged, because a run must be able to continue from a checkpoint."""
    if bad := model.body.non_finite():
        first = module_names(bad[0])[0] if name == "actor" else bad[0]
        others = f" and {len(bad) - 1} more of its {len(model.body.named)} tensors" if len(bad) > 1 else ""
        raise NonFiniteError(f"the {name}'s {first}{others} hold NaN or infinite values")


def read_learner(learner: Learner, directory: Path) -> None:
    """Read into the existing tensors, because engine and graphs keep reading the same addresses. (If the learner is sharded,
    the engine in the same process gets the weights with the next version.)"""
    if learner.adapter is not None:
        _read_adapter(learner, directory)
        return
    in_parts = is_in_parts(directory, "actor")
    weights = open_role(directory, "model") if in_parts else open_model_dir(directory / "model")
    refuse_others(learner.body, weights)
    load_weights(learner.body, weights)
    if in_parts:
        read_optimizer(learner, directory, "actor", weights=weights)
    else:
        _read_state(learner, directory / "actor.pt", weights=PartsOf(learner.body, weights))
    learner.refresh()


def _read_adapter(learner: Learner, directory: Path) -> None:
    """Read the adapter. Refuses one with a different rank, different targets or a different model."""
    assert learner.adapter is not None
    refuse_other_model(
        directory / "model",
        learner.model,
        learner.body.base_tensors(),
        base=learner.adapter.base,
        where=f"checkpoint {directory}",
        advice=f", or begin a run with this one: {ANOTHER_RUN}",
    )
    like = {name: torch.empty(shape, device="meta") for name, shape in learner.body.shapes.items()}
    tensors = read_adapter(directory / "model", learner.adapter.section, like, where=f"checkpoint {directory}")
    learner.body.load(tensors)
    _read_state(learner, directory / "actor.pt", weights=tensors)
    learner.refresh()


def write_critic(critic: Critic, directory: Path) -> None:
    refuse_non_finite(critic, name="critic")
    if critic.gang.rank == 0:
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in critic.body.whole_tensors()}
        with plain_disk_errors(directory):
            save_file(weights, directory / "critic.safetensors")
        _save(critic.optimizer.state_dict(), directory / "critic.pt")


def read_critic(critic: Critic, directory: Path) -> None:
    if is_in_parts(directory, "critic"):
        stored = open_role(directory, "critic")
        refuse_others(critic.body, stored)
        load_weights(critic.body, stored)
        read_optimizer(critic, directory, "critic", weights=stored)
        return
    path, wanted = directory / "critic.safetensors", critic.body.shapes
    weights = load_file(path)  # memory-mapped: with a sharded model, a rank reads only its own part
    refuse_other_tensors(f"checkpoint {path}", wanted=wanted, found={name: one.shape for name, one in weights.items()})
    critic.body.load(weights)
    _read_state(critic, directory / "critic.pt", weights=weights)


def _save(state: Any, path: Path) -> None:
    # Use a Python file: torch's own writer reports that a write failed, but not why.
    with plain_disk_errors(path), path.open("wb") as file:
        torch.save(state, file)


def _read_state(model: Learner | Critic, path: Path, *, weights: Mapping[str, Tensor]) -> None:
    """Read the state, memory-mapped if a rank needs only its part. ``weights`` are the checkpoint's, in their stored precision."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=model.body.in_parts)
    if model.optimizer.uses_masters and not state["masters"]:
        state["masters"] = weights  # saved by a run that trained without master weights
    model.body.load_state(model.optimizer, state)
