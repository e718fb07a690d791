"""The trained models in a checkpoint: weights as a model directory, optimizer states beside it.

Weights and states are always whole, so any number of ranks can read a checkpoint. All ranks of a gang call these
functions; the first one writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollcall.checkpoint.export import export_model
from rollcall.checkpoint.probe import probe_of
from rollcall.durable.patience import plain_disk_errors
from rollcall.errors import NonFiniteError
from rollcall.learner.learner import Critic, Learner
from rollcall.model.decoder import module_names
from rollcall.model.load import refuse_other_tensors


def write_learner(learner: Learner, tokenizer: Any, directory: Path, *, stops: Sequence[int] = ()) -> None:
    """``stops``: the tokens at which the run's completions end, for the model's generation config; empty: the model's own."""
    export_learner(learner, tokenizer, directory / "model", stops=stops)
    state = learner.body.whole_state(learner.optimizer)
    if learner.gang.rank == 0:
        _save(state, directory / "actor.pt")


def export_learner(learner: Learner, tokenizer: Any, directory: Path, *, stops: Sequence[int] = ()) -> None:
    """The model directory alone, from the gang's first rank; ``stops`` as in ``write_learner``."""
    refuse_non_finite(learner, name="actor")
    probe, model = probe_of(learner), learner.whole_model()
    if model is not None:
        export_model(model, tokenizer, directory, dtype=None, stops=stops, probe=probe)


def refuse_non_finite(model: Learner | Critic, *, name: str) -> None:
    """Raise, on all ranks, if the weights have diverged: a run must be able to go on from a checkpoint."""
    if bad := model.body.non_finite():
        first = module_names(bad[0])[0] if name == "actor" else bad[0]
        others = f" and {len(bad) - 1} more of its {len(model.body.named)} tensors" if len(bad) > 1 else ""
        raise NonFiniteError(f"the {name}'s {first}{others} hold NaN or infinite values")


def read_learner(learner: Learner, directory: Path) -> None:
    """Read into the existing tensors: engine and graphs keep reading the same addresses. (If the learner is in parts, the
    engine beside it gets the weights with the next version.)"""
    weights = _Stored(directory / "model")
    weights.refuse_others(learner.body.shapes)
    learner.body.load(weights)
    _read_state(learner, directory / "actor.pt", weights=weights)
    learner.refresh()


class _Stored(Mapping[str, torch.Tensor]):
    """The weights of a model directory under the decoder's names; each is read when it is needed."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self._files |= dict.fromkeys(safe_open(path, "pt").keys(), path)

    def refuse_others(self, wanted: Mapping[str, torch.Size]) -> None:
        """Refuse stored tensors that do not have the names and shapes of ``wanted``."""
        parts = {part: name for name in wanted for part in module_names(name)}
        known = [part for part in parts if part in self._files]
        shapes = {part: safe_open(self._files[part], "pt").get_slice(part).get_shape() for part in known}
        whole = {name: [shapes[part] for part in module_names(name) if part in shapes] for name in wanted}
        fused = {name: [sum(shape[0] for shape in own), *own[0][1:]] for name, own in whole.items() if own}
        missing = [part for part in parts if part not in self._files]
        short = {parts[part] for part in missing}
        refuse_other_tensors(
            f"checkpoint {self._directory}",
            missing=missing,
            # An output head that is tied to the embeddings and stored too holds the same numbers.
            unexpected=[part for part in self._files if part not in parts and part != "lm_head.weight"],
            misshaped={
                name: (fused[name], shape)
                for name, shape in wanted.items()
                if name in fused and name not in short and fused[name] != list(shape)
            },
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = [safe_open(self._files[part], "pt").get_tensor(part) for part in module_names(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_critic(critic: Critic, directory: Path) -> None:
    refuse_non_finite(critic, name="critic")
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
    path = directory / "critic.safetensors"
    weights, wanted = load_file(path), critic.body.shapes
    refuse_other_tensors(
        f"checkpoint {path}",
        missing=wanted.keys() - weights.keys(),
        unexpected=weights.keys() - wanted.keys(),
        misshaped={
            name: (tensor.shape, wanted[name])
            for name, tensor in weights.items()
            if name in wanted and tensor.shape != wanted[name]
        },
    )
    critic.body.load(weights)
    _read_state(critic, directory / "critic.pt", weights=weights)


def _save(state: Any, path: Path) -> None:
    # Through a Python file: torch's own writer says that a write failed, but not why.
    with plain_disk_errors(path), path.open("wb") as file:
        torch.save(state, file)


def _read_state(model: Learner | Critic, path: Path, *, weights: Mapping[str, torch.Tensor]) -> None:
    """Memory-mapped if a rank needs only its part. ``weights`` are the checkpoint's, at their precision there."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=model.body.in_parts)
    if model.optimizer.uses_masters and not state["masters"]:
        state["masters"] = weights  # saved by a run that trained the weights themselves
    model.body.load_state(model.optimizer, state)
