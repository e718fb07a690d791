"""Saves and reads the trained models of a checkpoint. Each process of a gang writes a part, and a gang of any size can read the parts.

``model/`` contains the weights: ``part-*`` if the model is sharded, otherwise a model directory (or an adapter) that transformers (or
peft) can open. ``actor/part-*`` contains the optimizer's moments and master weights; ``critic/part-*`` contains all critic state.
Tensors have their transformers names; moments are prefixed with their kind (``exp_avg/model.norm.weight``). ``optimizer.pt`` contains the
optimizer's settings, and state that does not have the weight's shape, such as step counts. All ranks of a gang must call these functions.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import CheckpointError, NonFiniteError
from rollcall.base.words import ANOTHER_RUN
from rollcall.checkpoint.export import Weights, export_model
from rollcall.checkpoint.parts import File, PartTensor
from rollcall.checkpoint.probe import probe_of
from rollcall.learner.layout import module_shapes, read_part
from rollcall.learner.learner import Body, Critic, Learner
from rollcall.learner.optimizer import Optimizer
from rollcall.model.adapter import Deltas
from rollcall.model.base import refuse_other_model
from rollcall.model.decoder import module_names
from rollcall.model.load import refuse_other_tensors
from rollcall.model.peft_files import adapter_files, read_adapter
from rollcall.model.stored.find import ADAPTER_WEIGHTS, read_manifest
from rollcall.model.stored.safetensors import open_parts, read_header
from rollcall.model.stored.tensors import Stored

OPTIMIZER = "optimizer.pt"
MASTER = "master"


def files_to_save(
    learner: Learner | None, critic: Critic | None, *, config_files: Mapping[str, bytes]
) -> tuple[list[File], dict[str, Any]]:
    """Return the files that this rank writes for a checkpoint, and the first rank's facts for the manifest."""
    files: list[File] = []
    facts: dict[str, Any] = {}
    if learner is not None:
        refuse_non_finite(learner, name="actor")
        body, rank, adapter = learner.body, learner.gang.rank, learner.adapter
        part = _part_name(body)
        if adapter is not None:  # an adapter is small, and is saved as peft would write it
            found = adapter_files(dict(body.whole_tensors()), adapter.section, base=adapter.base)
            kinds = {name: "weights" if name == ADAPTER_WEIGHTS else "model" for name in found}
            files += [File(name=f"model/{name}", kind=kinds[name], content=found[name]) for name in found if rank == 0]
        elif rank < num_parts(body):
            name = part if body.in_parts else "model.safetensors"
            files.append(File(name=f"model/{name}", kind="weights", content=list(_weights(body))))
        if rank < num_parts(body):
            files.append(File(name=f"actor/{part}", kind="optimizer", content=list(_states(body, learner.optimizer))))
        if rank == 0:
            files += [File(name=f"model/{name}", kind="model", content=data) for name, data in config_files.items()]
            files.append(_optimizer_file("actor", body, learner.optimizer))
            facts["mesh"] = _mesh_of(body)
            facts["model"] = {
                "architecture": type(learner.model).__name__,
                "model_type": learner.model.config.model_type,
                "dtype": str(body.dtype).removeprefix("torch."),
                "tie_word_embeddings": "lm_head" not in body.base_names,
            }
    if critic is not None:
        refuse_non_finite(critic, name="critic")
        body, rank = critic.body, critic.gang.rank
        if rank < num_parts(body):
            tensors = [*_weights(body), *_states(body, critic.optimizer)]
            files.append(File(name=f"critic/{_part_name(body)}", kind="optimizer", content=tensors))
        if rank == 0:
            files.append(_optimizer_file("critic", body, critic.optimizer))
            facts["critic_mesh"] = _mesh_of(body)
    return files, facts


def _part_name(body: Body) -> str:
    return f"part-{body.gang.rank:05d}-of-{num_parts(body):05d}.safetensors"


def num_parts(body: Body) -> int:
    """Return the number of ranks that write. Ranks that only replicate others do not write."""
    split = body.layout(next(iter(body.named))).split
    return split.shard * split.tensor


def _mesh_of(body: Body) -> dict[str, int]:
    size, split = body.gang.size, body.layout(next(iter(body.named))).split
    return {"processes": size, "replicate": size // num_parts(body), "shard": split.shard, "tensor": split.tensor}


def _weights(body: Body) -> Iterator[PartTensor]:
    for name, part in body.named.items():
        for block in body.layout(name).blocks(own=True):
            yield PartTensor.of(block, part, dtype=body.dtype)


def _states(body: Body, optimizer: Optimizer) -> Iterator[PartTensor]:
    """Yield moments and master weights."""
    masters = body.masters(optimizer)
    for name, state in optimizer.states().items():
        parts = {key: value for key, value in state.items() if _is_part(value, body.named[name])}
        if name in masters:
            parts[MASTER] = masters[name]
        for block in body.layout(name).blocks(own=True):
            for key, value in parts.items():
                yield PartTensor.of(block, value, dtype=value.dtype, prefix=f"{key}/")


def _is_part(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == weight.shape


def _optimizer_file(role: str, body: Body, optimizer: Optimizer) -> File:
    states, in_parts = dict[str, dict[str, Any]](), dict[str, list[str]]()
    for name, state in optimizer.states().items():
        in_parts[name] = [key for key, value in state.items() if _is_part(value, body.named[name])]
        states[name] = {key: value for key, value in state.items() if key not in in_parts[name]}
    buffer = io.BytesIO()
    has_masters = bool(body.masters(optimizer))
    torch.save({**optimizer.settings_dict(), "has_masters": has_masters, "state": states, "in_parts": in_parts}, buffer)
    return File(name=f"{role}/{OPTIMIZER}", kind="optimizer", content=buffer.getvalue())


def refuse_non_finite(model: Learner | Critic, *, name: str) -> None:
    """Raise on all ranks if a weight is not finite, because a run must be able to continue from the checkpoint."""
    if bad := model.body.non_finite():
        first = module_names(bad[0])[0] if name == "actor" else bad[0]
        others = f" and {len(bad) - 1} more of its {len(model.body.named)} tensors" if len(bad) > 1 else ""
        raise NonFiniteError(f"there are NaN or infinite values in the {name}'s {first}{others}")


# Reading


def read_learner(learner: Learner, directory: Path) -> None:
    """Read into the existing tensors, because the engine and CUDA graphs keep their addresses. If the learner is sharded, an engine in
    the same process gets the weights with the next version."""
    body = learner.body
    weights = _read_weights(body, directory, "model") if learner.adapter is None else _read_adapter(learner, directory)
    _read_optimizer(learner, directory, "actor", weights=weights)
    learner.refresh()


def read_critic(critic: Critic, directory: Path) -> None:
    _read_optimizer(critic, directory, "critic", weights=_read_weights(critic.body, directory, "critic"))


class PartsOf(Mapping[str, Tensor]):
    """A rank's own parts of stored tensors, keyed by decoder names and read on demand."""

    def __init__(self, body: Body, stored: Stored, *, prefix: str = "") -> None:
        self._body, self._stored, self._prefix = body, stored, prefix

    def __getitem__(self, name: str) -> Tensor:
        stored = [f"{self._prefix}{module}" for module in module_names(name)]
        if lost := [one for one in stored if one not in self._stored.tensors]:
            advice = "move it away to continue from an earlier one"
            raise CheckpointError(f"{self._stored.origin} lacks {lost[0]}, so this checkpoint is incomplete; {advice}")
        part = torch.empty(self._body.named[name].shape, dtype=self._stored.tensors[stored[0]].dtype.torch)
        read_part(part, self._body.layout(name), self._stored, prefix=self._prefix)
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._body.named)

    def __len__(self) -> int:
        return len(self._body.named)


def open_role(directory: Path, role: str) -> Stored:
    """Open the tensors in the files of ``role``. An optimizer may have no tensors."""
    everything, origin = read_manifest(directory).files, str(directory / role)
    files = [file for name, file in everything.items() if Path(name).match(f"{role}/*.safetensors")]
    if not any(read_header(file.path)[0] for file in files):
        return Stored(origin=origin, tensors={}, files={}, folder=None)
    return open_parts(files, origin=origin)


def _read_weights(body: Body, directory: Path, role: str) -> Mapping[str, Tensor]:
    """Read a rank's own blocks of the weights into ``body``, and also return them in their stored precision. Raises if names or shapes do
    not match the model."""
    stored = open_role(directory, role)
    wanted = module_shapes(body.layout(name) for name in body.named)
    found = {name: tensor.shape for name, tensor in stored.tensors.items() if "/" not in name}  # moments have a slash
    refuse_other_tensors(f"checkpoint {stored.origin}", wanted=wanted, found=found)
    for name, local in body.named.items():
        read_part(local, body.layout(name), stored)
    return PartsOf(body, stored)


def _read_adapter(learner: Learner, directory: Path) -> Mapping[str, Tensor]:
    """Read the adapter. Raises if its rank, its targets or its base model differ."""
    body = learner.body
    assert learner.adapter is not None
    refuse_other_model(
        directory / "model",
        learner.model,
        body.base_tensors(),
        base=learner.adapter.base,
        where=f"checkpoint {directory}",
        advice=f", or start another run with this one: {ANOTHER_RUN}",
    )
    like = {name: torch.empty(shape, device="meta") for name, shape in body.shapes.items()}
    tensors = read_adapter(directory / "model", learner.adapter.section, like, where=f"checkpoint {directory}")
    body.load(tensors)
    return {name: body.cut(name, tensors[name]) for name in body.named}


def _read_optimizer(model: Learner | Critic, directory: Path, role: str, *, weights: Mapping[str, Tensor]) -> None:
    """Load the optimizer's state. ``weights`` are the checkpoint's weights in their stored precision."""
    body, optimizer, stored = model.body, model.optimizer, open_role(directory, role)
    saved = torch.load(directory / role / OPTIMIZER, map_location="cpu", weights_only=True)
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(optimizer.names):
        entry, keys = saved["state"].get(name, {}), saved["in_parts"].get(name, ())
        if entry or keys:
            states[index] = entry | {key: PartsOf(body, stored, prefix=f"{key}/")[name] for key in keys}
    masters: Mapping[str, Tensor] = {}
    if saved["has_masters"]:
        masters = PartsOf(body, stored, prefix=f"{MASTER}/")
    elif optimizer.uses_masters:  # saved by a run that trained without master weights
        masters = weights
    adamw = {"state": states, "param_groups": saved["param_groups"]}
    optimizer.load_state_dict({**saved, "adamw": adamw, "masters": masters})


# The exported model


def export_learner(
    learner: Learner, tokenizer: Any, directory: Path, *, stops: Sequence[int] = (), merged: bool = False
) -> None:
    """Write the model directory, from the gang's first rank. ``stops`` are the stop tokens for its generation config; if it is empty,
    the model's own are used. With an adapter, writes only the adapter, unless ``merged`` adds it to the weights."""
    refuse_non_finite(learner, name="actor")
    probe, body, adapter = probe_of(learner), learner.body, learner.adapter
    if adapter is not None and not merged:
        files = adapter_files(dict(body.whole_tensors()), adapter.section, base=adapter.base)
        if learner.gang.rank == 0:
            export_model(learner.model, tokenizer, directory, stops=stops, probe=probe, adapter=files)
        return
    weights = in_modules(body) if body.in_parts or adapter is not None else None
    try:
        if learner.gang.rank == 0:
            export_model(learner.model, tokenizer, directory, stops=stops, probe=probe, weights=weights)
    finally:
        # Every rank must contribute its parts of all weights, even if the first rank fails to write.
        for _ in weights.values if weights is not None else ():
            continue


def in_modules(body: Body) -> Weights:
    """Return the full weights under their transformers names, with any adapter added. They are assembled one at a time."""
    layouts = {name: body.layout(name) for name in body.base_names}
    kinds = {name: (body.dtype, shape) for name, shape in module_shapes(layouts.values()).items()}

    def values() -> Iterator[tuple[str, Tensor]]:
        adapter = body.adapter
        deltas = None if adapter is None else Deltas(dict(body.whole_tensors()), gain=adapter.section.gain)
        for name, whole in body.base_tensors():
            for module, weight in zip(module_names(name), whole.split(layouts[name].rows), strict=True):
                yield module, weight if deltas is None else deltas.added_to(weight, module)

    return Weights(kinds=kinds, values=values())
