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
from rollcall.stored.files import StoredError, StoredFile
from rollcall.stored.mesh import Placed, placed
from rollcall.stored.tensors import Piece, Stored, StoredTensor, stored_of
from rollcall.stored.torch_zip import TorchFile, open_torch_file
from rollcall.stored.unpickle import Alike, Thing, View

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """What one process holds of one tensor; ``where`` is None for a plain tensor."""

    file: TorchFile
    rank: int
    view: View
    where: Placed | None

    @property
    def layout(self) -> Any:
        """What all processes must agree on."""
        return ("plain", self.view.shape) if self.where is None else self.where.layout


def open_verl(folder: Path) -> Stored:
    alike = Alike()
    files = [open_torch_file(path, alike=alike) for path in _rank_files(folder)]
    held: dict[str, list[_Local]] = {}
    for rank, file in enumerate(files):
        if file.rank not in (None, rank):
            raise StoredError(
                f"{file.path} is the shard of rank {file.rank}, by what it holds; restore the file of rank {rank}"
            )
        for name, local in _locals(file, rank=rank):
            held.setdefault(name, []).append(local)
    for name, locals_ in held.items():
        if len(locals_) != len(files):
            there = {one.rank for one in locals_}
            lacking = next(file for rank, file in enumerate(files) if rank not in there)
            raise StoredError(
                f"{lacking.path} does not hold {name}, and {locals_[0].file.path} does: the files do not belong to one checkpoint"
            )
    config = next((one for one in (folder / "huggingface", folder) if (one / "config.json").is_file()), None)
    tensors = [_cut(name, locals_) for name, locals_ in held.items()]
    step = next((int(match[1]) for one in folder.parts[::-1] if (match := _STEP.fullmatch(one))), None)
    return stored_of(
        tensors,
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
    said = _said_size(folder / "fsdp_config.json")
    if said is not None and said != size:
        raise StoredError(
            f"{folder / 'fsdp_config.json'} is of a checkpoint with {said} processes, and the shards are of one with {size}: they do not "
            "belong together"
        )
    return [ranks[rank] for rank in range(size)]


def _said_size(path: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        return int(json.loads(read_small(path, most=1 << 20))["world_size"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoredError(
            f"{path} does not say how many processes there were ({error}); restore or remove it"
        ) from None


def _locals(file: TorchFile, *, rank: int) -> Iterable[tuple[str, _Local]]:
    if not isinstance(file.content, dict):
        raise StoredError(f"{file.path} does not hold a state dict; give the model's shards")
    positions: dict[int, Any] = {}
    for name, value in file.content.items():
        if not isinstance(name, str):
            raise StoredError(f"{file.path}: a tensor has no name but a {type(name).__name__}; give the model's shards")
        if isinstance(value, View):
            yield name, _Local(file=file, rank=rank, view=value, where=None)
            continue
        if not isinstance(value, Thing) or value.kind != "DTensor":
            if isinstance(value, int | float | str | type(None)):
                continue  # no tensor, so no weight
            raise StoredError(f"{file.path}: {name} is neither a tensor nor a DTensor; give the model's shards")
        try:
            where = placed(value, rank=rank, numbers=file.numbers, positions=positions)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise StoredError(f"{file.path}: the layout of {name} cannot be read ({error})") from None
        if not isinstance(local := value.fields.get("_local_tensor"), View):
            raise StoredError(f"{file.path}: {name} has no numbers; restore the file")
        yield name, _Local(file=file, rank=rank, view=local, where=where)


def _cut(name: str, locals_: list[_Local]) -> StoredTensor:
    first = locals_[0]
    shape = first.view.shape if first.where is None else first.where.shape
    taken: dict[tuple[int, ...], tuple[_Local, Piece]] = {}
    for one in locals_:
        if one.layout != first.layout or one.view.dtype != first.view.dtype:
            raise _strangers(name, first, one)
        start = (0,) * len(shape)
        if one.where is not None:
            start, wanted = one.where.block()
            if wanted != one.view.shape:
                raise StoredError(
                    f"{one.file.path}: its share of {name} is {list(one.view.shape)}, and rank {one.rank} of its mesh "
                    f"{list(one.where.sizes)} has {list(wanted)}: the file belongs to another checkpoint"
                )
        if 0 in one.view.shape:
            continue
        piece = one.file.piece(one.view, start=start, name=name)
        same, _ = taken.setdefault(start, (one, piece))
        if same is not one:
            _refuse_other_copy(name, same, one)
    return StoredTensor(
        name=name, dtype=first.view.dtype, shape=shape, pieces=tuple(piece for _, piece in taken.values())
    )


def _refuse_other_copy(name: str, first: _Local, other: _Local) -> None:
    """Two processes that hold the same block must hold the same numbers; the files' own checksums say so without a read."""
    if first.where is not None and other.where is not None and not first.where.is_copy_of(other.where):
        raise _strangers(name, first, other)
    sums = [one.file.checksum(one.view) for one in (first, other)]
    if None not in sums and sums[0] != sums[1]:
        raise StoredError(
            f"{first.file.path} and {other.file.path} should hold the same numbers of {name}, and they do not: they do not belong "
            "to one checkpoint"
        )


def _strangers(name: str, first: _Local, other: _Local) -> StoredError:
    def described(one: _Local) -> str:
        cut: Any = (
            "no mesh" if one.where is None else f"mesh {list(one.where.sizes)}, whole shape {list(one.where.shape)}"
        )
        return f"{one.view.dtype} {list(one.view.shape)}, {cut}"

    return StoredError(
        f"{first.file.path} and {other.file.path} do not belong to one checkpoint: {name} is {described(first)} in the first and "
        f"{described(other)} in the second"
    )
