"""PyTorch distributed checkpoints (DCP): ``.metadata`` says which block of which tensor is where in the ``.distcp`` files.

Each block is a file of ``torch.save`` inside the larger file. The metadata is a pickle and is read like every other
(``unpickle.py``). A checkpoint often holds more than the model: the tensors under ``model`` (or ``state_dict``) are the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.stored.dtypes import DType
from rollcall.stored.files import CheckedRange, StoredError, StoredFile
from rollcall.stored.find import METADATA
from rollcall.stored.tensors import Piece, Stored, StoredTensor, stored_of
from rollcall.stored.torch_zip import open_torch_file
from rollcall.stored.unpickle import MOST_BYTES, Thing, View, unpickle

MODEL_KEYS = ("model", "state_dict", "model_state_dict")


def open_dcp(folder: Path) -> Stored:
    path = folder / METADATA
    try:
        data = read_small(path, most=MOST_BYTES)
    except ValueError as error:
        raise StoredError(f"{path} cannot be read: {error}") from None
    metadata = unpickle(data, what=str(path))
    try:
        described: Mapping[str, Thing] = metadata.fields["state_dict_metadata"]
        names = _model_names(described, metadata.fields.get("planner_data") or {}, path=path)
        places = {
            (index.fields["fqn"], _whole(index.fields.get("offset") or ())): info
            for index, info in metadata.fields["storage_data"].items()
        }
        records: dict[Path, list[CheckedRange]] = {}
        tensors = [_tensor(folder, key, name, described[key], places, records) for key, name in names.items()]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, StoredError):
            raise
        raise StoredError(f"{path} is not the metadata of a checkpoint ({type(error).__name__}: {error})") from None
    return stored_of(
        tensors,
        files=[
            StoredFile(path=file, size=file.stat().st_size, records=tuple(found)) for file, found in records.items()
        ],
        origin=str(folder),
        folder=next((one for one in (folder, folder / "huggingface") if (one / "config.json").is_file()), None),
        kind="PyTorch distributed checkpoint",
    )


def _whole(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)


def _model_names(described: Mapping[str, Thing], paths: Mapping[str, Any], *, path: Path) -> dict[str, str]:
    """The keys of the model's tensors, with their names in the model."""
    tensors = [key for key, about in described.items() if about.kind == "TensorStorageMetadata"]
    routes = {key: tuple(paths.get(key) or (key,)) for key in tensors}
    if not all(isinstance(step, str | int) for route in routes.values() for step in route):
        raise ValueError("a tensor has no name")
    if all(len(route) == 1 for route in routes.values()):
        return {key: str(route[0]) for key, route in routes.items()}
    prefixes = {
        route[: depth + 1]
        for route in routes.values()
        for depth, step in enumerate(route[:-1])
        if step in MODEL_KEYS and not any(earlier in MODEL_KEYS for earlier in route[:depth])
    }
    if len(prefixes) != 1:
        groups = ", ".join(sorted({str(route[0]) for route in routes.values()})[:8])
        raise StoredError(
            f"{path}: it is not clear which tensors are the model's; there are {groups}. They must be under one key {' or '.join(MODEL_KEYS)}"
        )
    (prefix,) = prefixes
    return {
        key: ".".join(str(step) for step in route[len(prefix) :])
        for key, route in routes.items()
        if route[: len(prefix)] == prefix
    }


def _tensor(
    folder: Path,
    key: str,
    name: str,
    about: Thing,
    places: Mapping[tuple[str, tuple[int, ...]], Thing],
    records: dict[Path, list[CheckedRange]],
) -> StoredTensor:
    properties = about.fields["properties"]
    dtype = properties.args[0] if properties.args else properties.fields["dtype"]
    if not isinstance(dtype, DType):
        raise ValueError(f"{key} has no type")
    pieces = [piece for chunk in about.fields["chunks"] for piece in _piece(folder, key, chunk, dtype, places, records)]
    return StoredTensor(name=name, dtype=dtype, shape=_whole(about.fields["size"]), pieces=tuple(pieces))


def _piece(
    folder: Path,
    key: str,
    chunk: Thing,
    dtype: DType,
    places: Mapping[tuple[str, tuple[int, ...]], Thing],
    records: dict[Path, list[CheckedRange]],
) -> Iterable[Piece]:
    start, shape = _whole(chunk.fields["offsets"]), _whole(chunk.fields["sizes"])
    if 0 in shape:
        return
    info = places.get((key, start))
    if info is None:
        raise StoredError(f"{folder / METADATA} does not say where {key} at {list(start)} is; restore the file")
    file = folder / str(info.fields["relative_path"])
    if file.parent != folder or file.name == "..":
        raise StoredError(f"{folder / METADATA} names {file}, which is not in its folder; restore the file")
    if info.fields.get("transform_descriptors"):
        raise StoredError(f"{file}: {key} is stored compressed or encrypted, which is not read; save it without")
    inner = open_torch_file(file, offset=int(info.fields["offset"]), length=int(info.fields["length"]))
    view = inner.content
    if not isinstance(view, View) or view.shape != shape or view.dtype != dtype:
        raise StoredError(
            f"{inner.what} does not hold the block of {key} that {folder / METADATA} describes: the files do not belong together"
        )
    records.setdefault(file, []).extend(inner.records.values())
    yield inner.piece(view, start=start, name=key)
