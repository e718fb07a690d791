"""Checkpoints of verl's FSDP trainer: ``model_world_size_W_rank_R.pt`` for each process, config and tokenizer in ``huggingface/``.

Each file is a state dict whose tensors are DTensors: the process's block of each, with the mesh. A tensor that is not a DTensor is
whole in each process: a buffer, or any tensor of a run that shards nothing. Where several processes hold the same block, the
first is read; the others must have the same checksum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.stored.files import StoredError, StoredFile, plain_damage
from rollcall.stored.mesh import Placed, Position, placed, position_of
from rollcall.stored.tensors import Piece, Stored, StoredTensor, stored_of
from rollcall.stored.torch_file import TorchFile, View, open_torch_file, view_of, whole_numbers
from rollcall.stored.unpickle import Name, Thing, attributes

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """The share of one tensor that one process holds; ``where`` is None for a plain tensor."""

    file: TorchFile
    rank: int
    view: View
    where: Placed | None

    @property
    def layout(self) -> Any:
        """The part that all processes must agree on."""
        return self.view.dtype, self.view.shape if self.where is None else self.where.layout

    def __str__(self) -> str:
        cut = "no mesh"
        if self.where is not None:
            cut = f"mesh {list(self.where.position.sizes)}, whole shape {list(self.where.shape)}"
        return f"{self.view.dtype} {list(self.view.shape)}, {cut}"


def open_verl(folder: Path) -> Stored:
    files: list[TorchFile] = []
    held: dict[str, list[_Local]] = {}
    for rank, path in enumerate(_rank_files(folder)):
        file, content = open_torch_file(path)
        files.append(file)
        for name, local in _locals(file, content, rank=rank):
            held.setdefault(name, []).append(local)
    for name, locals_ in held.items():
        if len(locals_) != len(files):
            there = {one.rank for one in locals_}
            lacking = next(file for rank, file in enumerate(files) if rank not in there)
            raise StoredError(
                f"{lacking.path} does not hold {name}, and {locals_[0].file.path} does: the files do not belong to one checkpoint"
            )
    config = next((one for one in (folder / "huggingface", folder) if (one / "config.json").is_file()), None)
    step = next((int(match[1]) for one in folder.parts[::-1] if (match := _STEP.fullmatch(one))), None)
    return stored_of(
        [_joined(name, locals_) for name, locals_ in held.items()],
        files=[
            StoredFile(path=file.path, size=file.path.stat().st_size, records=tuple(file.records.values()))
            for file in files
        ],
        origin=str(folder),
        folder=config,
        kind="verl checkpoint",
        facts={} if step is None else {"step": step},
    )


def _rank_files(folder: Path) -> list[Path]:
    """One file for each process, in the order of their ranks."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := _FILE.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if len(found) > 1:
        raise StoredError(
            f"{folder} holds shards of checkpoints with {' and '.join(str(one) for one in sorted(found))} processes; keep those of one"
        )
    if not found:
        raise StoredError(
            f"{folder}: its shards are not named model_world_size_W_rank_R.pt with two numbers; rename them"
        )
    ((size, ranks),) = found.items()
    num_missing = size - sum(rank < size for rank in ranks)
    if num_missing:
        first = next(rank for rank in range(size) if rank not in ranks)
        name = f"model_world_size_{size}_rank_{first}.pt"
        more = f" and {num_missing - 1} more" if num_missing > 1 else ""
        raise StoredError(
            f"{folder} lacks {name}{more}: it has {len(ranks)} of the {size} shards; copy the others from their nodes"
        )
    if extra := [rank for rank in ranks if rank >= size]:
        raise StoredError(
            f"{ranks[extra[0]]} does not belong to {size} processes; remove it, or give another checkpoint"
        )
    path = folder / "fsdp_config.json"
    if path.is_file():
        with plain_damage(f"{path} does not say how many processes there were", advice="restore or remove it"):
            said = int(json.loads(read_small(path, most=1 << 20))["world_size"])
        if said != size:
            raise StoredError(
                f"{path} is of a checkpoint with {said} processes, and the shards are of one with {size}: they do not belong together"
            )
    return [ranks[rank] for rank in range(size)]


def _locals(file: TorchFile, content: Any, *, rank: int) -> Iterable[tuple[str, _Local]]:
    if not isinstance(content, dict):
        raise StoredError(f"{file.path} does not hold a state dict; give the model's shards")
    positions: dict[int, Position] = {}  # the tensors of a file share its meshes
    for name, value in content.items():
        if not isinstance(name, str):
            raise StoredError(f"{file.path}: a tensor has no name but a {type(name).__name__}; give the model's shards")
        if isinstance(value, int | float | str | type(None)):
            continue  # no tensor, so no weight
        where = None
        with plain_damage(f"{file.path}: the layout of {name} cannot be read"):
            if isinstance(value, Thing) and value.name == "_rebuild_from_type_v2" and value.args[1] == Name("DTensor"):
                _, _, (_, _, shape, *_), state = value.args
                fields = attributes(state)
                spec, value = fields["_spec"].fields, fields["_local_tensor"]
                mesh = spec["mesh"]
                if (own := mesh.fields.get("_rank", rank)) != rank:
                    raise StoredError(
                        f"{file.path} is the shard of rank {own}, by what it holds; restore the file of rank {rank}"
                    )
                if id(mesh) not in positions:
                    positions[id(mesh)] = position_of(mesh.fields, rank=rank, numbers=file.numbers)
                where = placed(spec["placements"], positions[id(mesh)], shape=whole_numbers(shape))
            view = view_of(value)
        if view is None:
            raise StoredError(f"{file.path}: {name} is neither a tensor nor a DTensor; give the model's shards")
        yield name, _Local(file=file, rank=rank, view=view, where=where)


def _joined(name: str, locals_: list[_Local]) -> StoredTensor:
    """The tensor whose blocks the processes hold."""
    first = locals_[0]
    shape = first.view.shape if first.where is None else first.where.shape
    taken: dict[tuple[int, ...], tuple[_Local, Piece]] = {}
    for one in locals_:
        if one.layout != first.layout:
            raise StoredError(
                f"{first.file.path} and {one.file.path} do not belong to one checkpoint: {name} is {first} in the first and {one} in "
                "the second"
            )
        start, wanted = ((0,) * len(shape), shape) if one.where is None else one.where.block()
        if wanted != one.view.shape:
            raise StoredError(
                f"{one.file.path}: its share of {name} is {list(one.view.shape)}, and rank {one.rank} of its mesh has {list(wanted)}: "
                "the file belongs to another checkpoint"
            )
        if 0 in wanted:
            continue
        piece = one.file.piece(one.view, start=start, name=name)
        same, _ = taken.setdefault(start, (one, piece))
        if None not in (sums := [each.file.checksum(each.view) for each in (same, one)]) and sums[0] != sums[1]:
            raise StoredError(
                f"{same.file.path} and {one.file.path} should hold the same numbers of {name}, and they do not: they do not belong "
                "to one checkpoint"
            )
    pieces = tuple(piece for _, piece in taken.values())
    return StoredTensor(name=name, dtype=first.view.dtype, shape=shape, pieces=pieces)
