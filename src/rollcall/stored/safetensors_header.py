"""The header of a safetensors file: its length as u64, JSON padded to 8 bytes. The bytes of the tensors follow it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, BinaryIO

import torch

STORED_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.uint8: "U8",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip


def write_header(
    file: BinaryIO, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], *, metadata: Mapping[str, str]
) -> None:
    """``tensors``: name, type and shape of each, in the order in which their bytes follow."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        if dtype not in STORED_NAMES:
            raise ValueError(f"tensor {name} is of type {dtype}, which cannot be stored in safetensors")
        end = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": STORED_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    file.write(len(text).to_bytes(8, "little") + text)


def read_metadata(file: BinaryIO) -> Mapping[str, str]:
    """The file's metadata; reading goes on behind the header. ValueError or KeyError if there is none."""
    length = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(length))["__metadata__"]
