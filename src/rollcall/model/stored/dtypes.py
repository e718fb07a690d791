"""The dtypes of stored tensors, under torch's names. Does not import torch, which takes seconds and is not needed to copy
tensors between files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DType:
    name: str  # torch's, such as bfloat16
    itemsize: int
    in_safetensors: str | None = None  # its name in safetensors, if the format supports it

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.name

    @property
    def torch(self) -> torch.dtype:
        import torch

        return getattr(torch, self.name)

    def __str__(self) -> str:
        return f"torch.{self.name}"


_ALL = (
    DType("float64", 8, "F64"), DType("float32", 4, "F32"), DType("float16", 2, "F16"), DType("bfloat16", 2, "BF16"),
    DType("float8_e4m3fn", 1, "F8_E4M3"), DType("float8_e5m2", 1, "F8_E5M2"), DType("float8_e4m3fnuz", 1),
    DType("float8_e5m2fnuz", 1), DType("float8_e8m0fnu", 1),
    DType("int64", 8, "I64"), DType("int32", 4, "I32"), DType("int16", 2, "I16"), DType("int8", 1, "I8"),
    DType("uint64", 8, "U64"), DType("uint32", 4, "U32"), DType("uint16", 2, "U16"), DType("uint8", 1, "U8"),
    DType("bool", 1, "BOOL"), DType("complex64", 8, "C64"), DType("complex128", 16),
)  # fmt: skip
DTYPES = {one.name: one for one in _ALL}
OF_SAFETENSORS = {one.in_safetensors: one for one in _ALL if one.in_safetensors is not None}


def name_of(dtype: torch.dtype | DType) -> str:
    """
    >>> name_of(DTYPES["bfloat16"])
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
