"""PyTorch distributed checkpoints (DCP): ``.metadata`` says where each block of each tensor is in the ``.distcp`` files.

Each block is a ``torch.save`` file inside the larger file. The metadata is a pickle and is read like any other pickle
(``torch_file.py``). A checkpoint often contains more than the model; only the tensors under ``model`` (or ``state_dict``) count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcall.config.yaml import read_small
from rollcall.model.stored.files import CheckedRange, StoredError, StoredFile, plain_damage
from rollcall.model.stored.find import METADATA, config_folder
from rollcall.model.stored.tensors import Stored, StoredTensor, stored_of
from rollcall.model.stored.torch_file import Stub, dtype_of, is_named, open_torch_file, unpickle, whole_numbers

MODEL_KEYS = ("model", "state_dict", "model_state_dict")


def open_dcp(folder: Path) -> Stored:
    path = folder / METADATA
    with plain_damage(f"{path} cannot be read"):
        data = read_small(path, most=1 << 29)
    metadata = unpickle(data, what=str(path))
    records: dict[Path, list[CheckedRange]] = {}
    with plain_damage(f"{path} is not the metadata of a checkpoint"):
        described: Mapping[str, Stub] = metadata.fields["state_dict_metadata"]
        names = _model_names(described, metadata.fields.get("planner_data") or {}, path=path)
        places = {
            (index.fields["fqn"], whole_numbers(index.fields.get("offset") or ())): info.fields
            for index, info in metadata.fields["storage_data"].items()
        }
        tensors = [_tensor(folder, key, name, described[key].fields, places, records) for key, name in names.items()]
    return stored_of(
        tensors,
        files=[
            StoredFile(path=file, size=file.stat().st_size, records=tuple(found)) for file, found in records.items()
        ],
        origin=str(folder),
        folder=config_folder(folder),
        kind="PyTorch distributed checkpoint",
    )


def _model_names(described: Mapping[str, Stub], paths: Mapping[str, Any], *, path: Path) -> dict[str, str]:
    """Map the checkpoint keys of the model's tensors to their names in the model."""
    tensors = [key for key, about in described.items() if is_named(about, "TensorStorageMetadata")]
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
            f"{path}: it is not clear which tensors belong to the model; the checkpoint contains {groups}. Put the model's tensors under "
            f"one key: {' or '.join(MODEL_KEYS)}"
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
    about: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]],
    records: dict[Path, list[CheckedRange]],
) -> StoredTensor:
    properties = about["properties"]
    dtype = dtype_of(properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"])
    if dtype is None:
        raise ValueError(f"{key} has no type")
    pieces = []
    for chunk in about["chunks"]:
        start, shape = whole_numbers(chunk.fields["offsets"]), whole_numbers(chunk.fields["sizes"])
        if 0 in shape:
            continue
        info = places.get((key, start))
        if info is None:
            raise StoredError(
                f"{folder / METADATA} does not say where the block of {key} at {list(start)} is; restore the file"
            )
        file = folder / str(info["relative_path"])
        if file.parent != folder or file.name == "..":
            raise StoredError(f"{folder / METADATA} names {file}, which is not in its folder; restore the file")
        if info.get("transform_descriptors"):
            raise StoredError(
                f"{file}: {key} is stored compressed or encrypted, which is not supported; save it as plain data"
            )
        inner, content = open_torch_file(file, offset=int(info["offset"]), length=int(info["length"]))
        tensor = inner.tensor(content, name=key)
        if tensor is None or (tensor.shape, tensor.dtype) != (shape, dtype):
            raise StoredError(
                f"{inner.what} does not contain the block of {key} that {folder / METADATA} describes: the files do not "
                "belong to the same checkpoint"
            )
        records.setdefault(file, []).extend(inner.records.values())
        pieces.append(tensor.piece(start=start))
    return StoredTensor(name=name, dtype=dtype, shape=whole_numbers(about["size"]), pieces=tuple(pieces))
