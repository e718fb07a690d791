"""Trained models as checkpoint parts: each process of a gang writes its own part, and any other gang can read them.

``model/part-*`` contain the weights, ``actor/part-*`` the optimizer's moments and masters, and ``critic/part-*`` everything for the
critic. Tensors have their transformers names, prefixed with the kind of moment (``exp_avg/model.norm.weight``). Scalars per
weight, such as step counts, are in ``optimizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.base.errors import CheckpointError
from rollcall.checkpoint.parts import File, PartTensor
from rollcall.learner.layout import read_part
from rollcall.learner.learner import Body, Critic, Learner
from rollcall.learner.optimizer import Optimizer
from rollcall.model.decoder import module_names
from rollcall.model.load import refuse_other_tensors
from rollcall.model.stored.find import read_manifest
from rollcall.model.stored.safetensors import open_parts, read_header
from rollcall.model.stored.tensors import Stored

OPTIMIZER = "optimizer.json"
MASTER = "master"


def learner_files(learner: Learner, *, config_files: Mapping[str, bytes]) -> Iterator[File]:
    """Yield the policy files that this rank writes. The first rank also writes the ``config_files``."""
    body = learner.body
    if learner.gang.rank >= num_parts(body):
        return
    part = part_name(learner.gang.rank, of=num_parts(body))
    yield File(name=f"model/{part}", kind="weights", content=list(_weights(body)))
    yield File(name=f"actor/{part}", kind="optimizer", content=list(_states(body, learner.optimizer)))
    if learner.gang.rank == 0:
        yield from (File(name=f"model/{name}", kind="model", content=data) for name, data in config_files.items())
        yield _numbers_file("actor", body, learner.optimizer)


def critic_files(critic: Critic) -> Iterator[File]:
    """Yield the critic files that this rank writes. Only a resume needs them."""
    body = critic.body
    if critic.gang.rank >= num_parts(body):
        return
    tensors = [*_weights(body), *_states(body, critic.optimizer)]
    yield File(name=f"critic/{part_name(critic.gang.rank, of=num_parts(body))}", kind="optimizer", content=tensors)
    if critic.gang.rank == 0:
        yield _numbers_file("critic", body, critic.optimizer)


def part_name(number: int, *, of: int) -> str:
    return f"part-{number:05d}-of-{of:05d}.safetensors"


def num_parts(body: Body) -> int:
    """Return the number of ranks that write. Ranks that only have copies do not."""
    split = body.layout(next(iter(body.named))).split
    return split.shard * split.tensor


def mesh_of(body: Body) -> dict[str, int]:
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


def _numbers_file(role: str, body: Body, optimizer: Optimizer) -> File:
    states = {
        name: {key: None if _is_part(value, body.named[name]) else _written(value) for key, value in state.items()}
        for name, state in optimizer.states().items()
    }
    content = {**optimizer.settings_dict(), "has_masters": bool(body.masters(optimizer)), "state": states}
    return File(name=f"{role}/{OPTIMIZER}", kind="optimizer", content=json.dumps(content, indent=1).encode())


def _written(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"value": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return {"value": value}


def _read(written: Mapping[str, Any]) -> Any:
    value = written["value"]
    return torch.tensor(value, dtype=getattr(torch, written["dtype"])) if "dtype" in written else value


# Reading


def is_in_parts(directory: Path, role: str) -> bool:
    return (directory / role / OPTIMIZER).is_file()


class PartsOf(Mapping[str, Tensor]):
    """A rank's own parts of stored tensors, keyed by decoder names and read on demand."""

    def __init__(self, body: Body, stored: Stored, *, prefix: str = "") -> None:
        self._body, self._stored, self._prefix = body, stored, prefix

    def __getitem__(self, name: str) -> Tensor:
        stored = [f"{self._prefix}{module}" for module in module_names(name)]
        if lost := [one for one in stored if one not in self._stored.tensors]:
            raise CheckpointError(
                f"{self._stored.origin} lacks {lost[0]}, so these are not all parts of one save; move the checkpoint away to continue "
                "from an earlier one"
            )
        part = torch.empty(self._body.named[name].shape, dtype=self._stored.tensors[stored[0]].dtype.torch)
        read_part(part, self._body.layout(name), self._stored, prefix=self._prefix)
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._body.named)

    def __len__(self) -> int:
        return len(self._body.named)


def refuse_others(body: Body, stored: Stored) -> None:
    """Refuse stored weights whose names and shapes do not match the model."""
    layouts = {name: body.layout(name) for name in body.named}
    wanted = {part: (rows, *layout.shape[1:]) for name, layout in layouts.items()
              for part, rows in zip(module_names(name), layout.rows, strict=True)}  # fmt: skip
    found = {name: tensor.shape for name, tensor in stored.tensors.items() if "/" not in name}  # moments have a slash
    if "lm_head.weight" not in wanted:  # tied to the embeddings; a stored copy has the same values
        found.pop("lm_head.weight", None)
    refuse_other_tensors(f"checkpoint {stored.origin}", wanted=wanted, found=found)


def load_weights(body: Body, stored: Stored) -> None:
    """Load weights into the existing tensors. A rank reads only its own blocks."""
    for name, local in body.named.items():
        read_part(local, body.layout(name), stored)


def open_role(directory: Path, role: str) -> Stored:
    """Open the tensors in the parts of ``role``. An optimizer may have none."""
    everything, origin = read_manifest(directory).files, str(directory / role)
    files = [file for name, file in everything.items() if Path(name).match(f"{role}/part-*.safetensors")]
    if not any(read_header(file.path)[0] for file in files):
        return Stored(origin=origin, tensors={}, files={}, folder=None)
    return open_parts(files, origin=origin)


def read_optimizer(model: Learner | Critic, directory: Path, role: str, *, weights: Stored) -> None:
    """Load the optimizer's state. ``weights`` are the checkpoint's weights in their stored precision."""
    body, optimizer = model.body, model.optimizer
    numbers = json.loads((directory / role / OPTIMIZER).read_bytes())
    stored = weights if role == "critic" else open_role(directory, role)
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(optimizer.names):
        if entry := numbers["state"].get(name):
            states[index] = {
                key: _read(value) if value is not None else PartsOf(body, stored, prefix=f"{key}/")[name]
                for key, value in entry.items()
            }
    masters: Mapping[str, Tensor] = {}
    if numbers["has_masters"]:
        masters = PartsOf(body, stored, prefix=f"{MASTER}/")
    elif optimizer.uses_masters:  # saved by a run that trained without master weights
        masters = PartsOf(body, weights)
    groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else group
              for group in numbers["param_groups"]]  # fmt: skip
    adamw = {"state": states, "param_groups": groups}
    optimizer.load_state_dict({**numbers, "adamw": adamw, "masters": masters})
