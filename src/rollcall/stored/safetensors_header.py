"""The header of a safetensors file: its length as u64, JSON padded to 8 bytes. The bytes of the tensors follow it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO

from rollcall.stored.dtypes import DTYPES, DType, name_of

if TYPE_CHECKING:
    import torch


def write_header(
    file: BinaryIO, tensors: Iterable[tuple[str, torch.dtype | DType, Sequence[int]]], *, metadata: Mapping[str, str]
) -> None:
    """``tensors``: name, type and shape of each, in the order in which their bytes follow."""
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


def read_metadata(file: BinaryIO) -> Mapping[str, str]:
    """The file's metadata; reading goes on behind the header. ValueError or KeyError if there is none."""
    length = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(length))["__metadata__"]
