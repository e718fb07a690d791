"""A set of stored tensors: which bytes in which files make up each tensor, and how to read a block of it.

torch takes seconds to import and is not needed to copy tensors between files, so it is imported only where a tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall.model.stored.files import StoredError, StoredFile, read_fully

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 64 << 20  # at most this much of a tensor is in host memory at once


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A contiguous byte range in a file: a block of a tensor, in row-major order."""

    file: Path
    offset: int  # bytes
    start: tuple[int, ...]  # where the block begins in the full tensor
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # each element is in exactly one piece


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A set of stored tensors. ``files`` contains every file with a piece, and any other files that have a recorded checksum."""

    origin: str  # the path it was opened from, for messages
    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, StoredFile]
    folder: Path | None  # contains config.json and tokenizer, if the weights came with them
    kind: str = "model directory"  # the kind of source, for messages
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the writer recorded about the run: step, score, ...

    @property
    def types(self) -> dict[str, DType]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(
        self, name: str, *, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Read the block of a tensor that begins at ``start`` and has ``shape``, by default the full tensor."""
        tensor = self.tensors[name]
        start = (0,) * len(tensor.shape) if start is None else tuple(start)
        shape = tensor.shape if shape is None else tuple(shape)
        bounds = zip(start, shape, tensor.shape, strict=True)
        assert all(a >= 0 and n >= 0 and a + n <= whole for a, n, whole in bounds), f"{name} has no such block"
        import torch

        block = torch.empty(shape, dtype=tensor.dtype.torch)
        for piece in tensor.pieces:
            _read_overlap(piece, block, start=start)
        return block

    def runs(
        self, name: str, *, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Like ``read``, but yield runs of rows, each with the index of its first row in the block."""
        tensor = self.tensors[name]
        first, *columns = [0] * len(tensor.shape) if start is None else start
        rows, *rest = tensor.shape if shape is None else shape
        # Stored rows are read with all their columns, even if the block needs only some of them.
        step = max(1, PIECE_BYTES * tensor.shape[0] // max(prod(tensor.shape) * tensor.dtype.itemsize, 1))
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            yield begin, self.read(name, start=(first + begin, *columns), shape=(count, *rest))

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors are equal byte for byte, so that NaN equals itself."""
        import torch

        first, second = self.tensors[name], self.tensors[other]
        if first.pieces == second.pieces:
            return True
        return (first.shape, first.dtype) == (second.shape, second.dtype) and all(
            torch.equal(one.view(torch.uint8), two.view(torch.uint8))
            for (_, one), (_, two) in zip(self.runs(name), self.runs(other), strict=True)
        )


def _read_overlap(piece: Piece, block: torch.Tensor, *, start: tuple[int, ...]) -> None:
    """Fill the part of ``block`` that ``piece`` contains. ``block`` begins at ``start`` in the tensor."""
    low = [max(a, b) for a, b in zip(piece.start, start, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(piece.start, piece.shape, start, block.shape, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    target = block[tuple(slice(a - b, c - b) for a, b, c in zip(low, start, high, strict=True))]
    first = low[0] - piece.start[0] if low else 0
    rows = high[0] - low[0] if low else 1
    row = prod(piece.shape[1:]) * block.dtype.itemsize
    inner = tuple(slice(a - b, c - b) for a, b, c in zip(low[1:], piece.start[1:], high[1:], strict=True))
    import torch

    rows_read = target
    if any(one != slice(0, n) for one, n in zip(inner, piece.shape[1:], strict=True)) or not target.is_contiguous():
        # Read all columns of the rows in question, with one read instead of one per row.
        rows_read = torch.empty((rows, *piece.shape[1:]), dtype=block.dtype)
    view = rows_read.reshape(-1).view(torch.uint8).numpy().data
    with piece.file.open("rb", buffering=0) as file:
        read_fully(file.fileno(), view, piece.offset + first * row, file=piece.file)
    if rows_read is not target:
        target.copy_(rows_read[(slice(None), *inner)])


def refuse_gaps(tensor: StoredTensor, *, origin: str) -> None:
    """Refuse pieces that do not cover their tensor exactly once."""
    if not tensor.pieces and prod(tensor.shape):
        raise StoredError(f"{origin}: no file contains {tensor.name}; a file is missing")
    for piece in tensor.pieces:
        rank_fits = len(piece.start) == len(piece.shape) == len(tensor.shape)
        bounds = zip(piece.start, piece.shape, tensor.shape, strict=False)
        if not rank_fits or any(a < 0 or n < 0 or a + n > whole for a, n, whole in bounds):
            raise StoredError(
                f"{piece.file}: its block of {tensor.name} has shape {list(piece.shape)} at {list(piece.start)}, which is outside "
                f"the tensor's {list(tensor.shape)}, so the file belongs to another model or checkpoint"
            )
    if twice := _overlapping(tensor.pieces):
        first, second = twice
        raise StoredError(
            f"{first.file} and {second.file} contain the same block of {tensor.name}, so they do not belong to the same model or "
            "checkpoint"
        )
    held, whole = sum(piece.num_elements for piece in tensor.pieces), prod(tensor.shape)
    if held != whole:
        files = ", ".join(sorted({str(piece.file) for piece in tensor.pieces})[:3])
        raise StoredError(
            f"{origin}: the files contain only {held:,} of the {whole:,} elements of {tensor.name} ({files}, ...): a file is missing "
            "or belongs to another model or checkpoint"
        )


def _overlapping(pieces: Iterable[Piece]) -> tuple[Piece, Piece] | None:
    """Return two pieces that share an element, or None if there are none."""
    some = sorted((piece for piece in pieces if piece.num_elements), key=lambda piece: piece.start)
    if len(some) < 2:
        return None
    cut = [dim for dim in range(len(some[0].shape)) if len({(one.start[dim], one.shape[dim]) for one in some}) > 1]
    # Usually, the tensor is split along a single dimension. Then it is enough to compare neighbours.
    pairs = zip(some, some[1:], strict=False) if len(cut) == 1 else combinations(some, 2)
    for a, b in pairs:
        if all(p < q + m and q < p + n for p, n, q, m in zip(a.start, a.shape, b.start, b.shape, strict=True)):
            return a, b
    return None


def other_tensors(*, wanted: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> str:
    """Describe how the found tensors differ from the model's in names and shapes. Return an empty string if they match.

    >>> other_tensors(wanted={"norm": (7,), "head": (7,)}, found={"head": (9,)})
    '1 tensor is missing (norm); 1 tensor is of a different shape (head is [9], not [7])'
    """
    misshaped = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    faults = (
        (wanted.keys() - found.keys(), "missing"),
        (found.keys() - wanted.keys(), "not part of the model"),
        (misshaped, "of a different shape"),
    )
    return "; ".join(first_tensors(names, fault) for names, fault in faults if names)


def first_tensors(names: Collection[str], fault: str) -> str:
    """
    >>> first_tensors(["d", "a", "c", "b"], "missing")
    '4 tensors are missing (a, b, c, ...)'
    """
    shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f"{'1 tensor is' if len(names) == 1 else f'{len(names):,} tensors are'} {fault} ({shown})"


def refuse_whole_numbers(types: Mapping[str, DType], names: Iterable[str], *, origin: str) -> None:
    """Refuse weights that are not floating-point (int8, bool, complex). Such tensors are quantised, damaged or not weights at all, but
    would be cast without an error.

    >>> refuse_whole_numbers({"norm": DTYPES["int8"], "step": DTYPES["int64"]}, ["norm"], origin="model.path=m")
    Traceback (most recent call last):
    rollcall.model.stored.files.StoredError: model.path=m stores norm as int8; weights must be floating-point numbers: save ...
    """
    if strange := [name for name in names if name in types and not types[name].is_floating_point]:
        more = f" (and {len(strange) - 1:,} more tensors)" if len(strange) > 1 else ""
        raise StoredError(
            f"{origin} stores {strange[0]} as {types[strange[0]].name}{more}; weights must be floating-point numbers: save the model in "
            "float32, bfloat16 or float16"
        )


def stored_of(
    tensors: Iterable[StoredTensor],
    *,
    files: Iterable[StoredFile],
    origin: str,
    folder: Path | None,
    kind: str,
    facts: Mapping[str, Any] | None = None,
) -> Stored:
    """Build the set. Check that the pieces cover every tensor exactly. Readers must check that pieces lie inside their files."""
    by_path = {file.path: file for file in files}
    by_name = {tensor.name: tensor for tensor in tensors}
    if not by_name:
        raise StoredError(f"{origin} has no tensors; use a directory with a model's weights")
    for tensor in by_name.values():
        refuse_gaps(tensor, origin=origin)
    return Stored(origin=origin, tensors=by_name, files=by_path, folder=folder, kind=kind, facts=dict(facts or {}))
