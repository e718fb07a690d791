"""Tensors in safetensors files: a plain model directory, or the parts of a sharded checkpoint.

A file starts with the length of its header (u64) and the header, which is JSON padded to 8 bytes; the tensor data follows. A part
contains blocks of tensors. For each key in the file, the metadata key ``parts`` gives the tensor name, the block's start and the full
shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import safe_open

from rollcall.config.yaml import read_small
from rollcall.model.stored.files import StoredError, StoredFile, plain_damage, refuse_pipe
from rollcall.model.stored.find import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollcall.model.stored.tensors import DTYPES, OF_SAFETENSORS, DType, Piece, Stored, StoredTensor, name_of, stored_of

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    dtype: DType
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def open_model_dir(folder: Path) -> Stored:
    """Open a model directory as transformers writes it: one file, or several with an index."""
    if (folder / ADAPTER_CONFIG).exists():
        raise StoredError(
            f"{folder} contains an adapter, not a model; add it to its model with `rollcall merge`, and use the result"
        )
    paths, named = weight_files(folder)
    files = [StoredFile(path=path, size=path.stat().st_size) for path in paths]
    stored = open_parts(files, origin=str(folder), folder=folder, kind="model directory", named=named)
    if missing := next((name for name in named or () if name not in stored.tensors), None):
        file = folder / (named or {})[missing]
        raise StoredError(
            f"{file} does not contain {missing}, although {folder / INDEX} says it does; restore the file"
        )
    return stored


def check_weights(folder: Path) -> None:
    """Refuse a model or adapter directory whose weights are missing or truncated. The tensor data is not read."""
    if (folder / ADAPTER_CONFIG).is_file():
        read_header(folder / ADAPTER_WEIGHTS)
    else:
        open_model_dir(folder)


def open_parts(
    files: Sequence[StoredFile],
    *,
    origin: str,
    folder: Path | None = None,
    kind: str = "sharded checkpoint",
    facts: Mapping[str, Any] | None = None,
    named: Mapping[str, str] | None = None,
) -> Stored:
    """Open the tensors whose blocks are in ``files``. A file without the ``parts`` key contains full tensors. ``named`` is the index, if
    there is one. It maps each tensor to the file that it is read from."""
    kinds: dict[str, tuple[DType, tuple[int, ...], StoredFile]] = {}
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        for name, whole, dtype, piece in _blocks(file):
            if named is not None and named.get(name) != file.path.name:
                continue
            first = kinds.setdefault(name, (dtype, whole, file))
            if first[:2] != (dtype, whole):
                raise StoredError(
                    f"{file} says that {name} is {dtype} {list(whole)}, but {first[2]} says that it is {first[0]} {list(first[1])}: the "
                    "files do not belong to the same checkpoint"
                )
            pieces.setdefault(name, []).append(piece)
    tensors = (
        StoredTensor(name=name, dtype=dtype, shape=shape, pieces=tuple(pieces[name]))
        for name, (dtype, shape, _) in kinds.items()
    )
    return stored_of(tensors, files=files, origin=origin, folder=folder, kind=kind, facts=facts)


def _blocks(file: StoredFile) -> Iterable[tuple[str, tuple[int, ...], DType, Piece]]:
    """Yield each block in a part: the tensor's name, full shape and dtype, and the block's location."""
    entries, metadata = read_header(file.path)
    with plain_damage(f"{file}: its metadata does not say which blocks it contains"):
        parts = json.loads(metadata["parts"]) if "parts" in metadata else None
        for key, entry in entries.items():
            about = (
                {"name": key, "start": [0] * len(entry.shape), "shape": entry.shape} if parts is None else parts[key]
            )
            start, whole = (tuple(int(n) for n in about[which]) for which in ("start", "shape"))
            piece = Piece(file=file.path, offset=entry.offset, start=start, shape=entry.shape)
            yield str(about["name"]), whole, entry.dtype, piece


def read_header(path: Path) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Read a file's list of tensors and its metadata. Refuse an incomplete file."""
    entries: dict[str, _Entry] = {}
    refuse_pipe(path)
    with plain_damage(f"{path} is not a complete safetensors file"):
        with path.open("rb") as file:
            offset = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="np") as header:
            for name in header.offset_keys():  # the format does not allow gaps
                about = header.get_slice(name)
                dtype, shape = OF_SAFETENSORS[about.get_dtype()], tuple(about.get_shape())
                entries[name] = _Entry(dtype=dtype, shape=shape, offset=offset)
                offset += prod(shape) * dtype.itemsize
            return entries, header.metadata() or {}


def write_header(
    file: BinaryIO, tensors: Iterable[tuple[str, torch.dtype | DType, Sequence[int]]], *, metadata: Mapping[str, str]
) -> None:
    """Write a header. ``tensors`` contains each tensor's name, dtype and shape, in the order of the data that follows."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        known = DTYPES.get(name_of(dtype))
        if known is None or known.in_safetensors is None:
            raise ValueError(f"tensor {name} is of type {dtype}, which cannot be stored in safetensors")
        end = start + prod(shape) * known.itemsize
        header[name] = {"dtype": known.in_safetensors, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    file.write(len(text).to_bytes(8, "little") + text)


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the weight files and, if there is an index, the file name for each tensor."""
    if (folder / INDEX).is_file():
        with plain_damage(f"{folder / INDEX} is not an index of weights"):
            named: dict[str, str] = json.loads(read_small(folder / INDEX))["weight_map"]
            paths = [folder / name for name in sorted(set(named.values()))]
        if outside := next((path for path in paths if path.parent != folder), None):
            raise StoredError(f"{folder / INDEX} names {outside}, which is not in its folder; restore the file")
        if missing := next((path for path in paths if not path.is_file()), None):
            raise StoredError(f"{missing} does not exist, but {folder / INDEX} names it; restore the file")
        return paths, named
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        if match := re.fullmatch(r".*-(\d+)-of-(\d+)\.safetensors", path.name):
            number, count = match.groups()
            there = len([one for one in paths if one.name.endswith(f"-of-{count}.safetensors")])
            if there != int(count):
                raise StoredError(
                    f"{folder} has only {there} of the {int(count)} files that {path.name} belongs to; restore the missing files"
                )
    return paths, None
