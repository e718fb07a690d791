"""Weights through files in a folder that all hosts share.

The files are in safetensors' format, a few tensors each, so that receivers read one while the next is being written. Each is
written under another name and renamed when complete, with its version in the metadata. Once all receivers have them, they
are removed: nothing is left of a run, and a receiver that comes later is sent its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rollcall.weights.carrier import Bucket
from rollcall.weights.checksum import checksum
from rollcall.weights.layout import BucketSize, Entry, Layout
from rollcall.weights.line import Deadline, Line
from rollcall.weights.protocol import StaleUpdateError, TornUpdateError

# Spans follow each other as in the files, and each is summed while it is in the cache.
BUCKETS = BucketSize(num_bytes=1 << 20, alone_from=0)
PART_BYTES, MOST_PARTS = 32 << 20, 16
SUFFIX = ".safetensors"
LOOK_S = 0.1
SEEN_S = 30.0
DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "uint8": "U8", "int8": "I8", "int16": "I16",
    "int32": "I32", "int64": "I64", "bool": "BOOL",
}  # fmt: skip


class FileOutlet:
    bucket_size = BUCKETS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: Mapping[str, Line] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.close()  # what a sender that was killed has left

    def open(
        self,
        lines: Mapping[str, Line],
        hellos: Mapping[str, Mapping[str, Any]],
        *,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        self._lines = lines

    def put(self, buckets: Sequence[Bucket], *, version: int, layout: Layout, deadline: Deadline) -> list[int]:
        sums, rest = [], iter(buckets)
        for number, part in enumerate(parts_of(layout)):
            path = self._folder / f"weights-{version:08d}-{number:02d}{SUFFIX}"
            temporary = path.with_name(path.name + ".tmp")
            with temporary.open("wb") as file:
                write_header(file, part, version=version)
                for bucket in islice(rest, len(part.buckets(BUCKETS))):
                    for span in bucket:
                        file.write(span.cpu().numpy().data)
                    sums.append(checksum(bucket))
            os.replace(temporary, path)
            for line in self._lines.values():
                line.tell({"path": str(path.resolve())}, deadline)
        return sums

    def done(self, version: int) -> None:
        self.close()

    def close(self) -> None:
        for path in self._folder.glob(f"weights-*{SUFFIX}*"):
            path.unlink(missing_ok=True)


class FileInlet:
    bucket_size = BUCKETS

    def __init__(self) -> None:
        self._line: Line | None = None

    def open(self, line: Line, *, device: torch.device, deadline: Deadline) -> None:
        self._line = line

    def take(self, buckets: Sequence[Bucket], *, version: int, layout: Layout, deadline: Deadline) -> list[int]:
        assert self._line is not None, "open comes first"
        sums, rest = [], iter(buckets)
        refusal: StaleUpdateError | TornUpdateError | None = None
        for part in parts_of(layout):  # the sender tells of all, also where one was refused
            path = Path(self._line.hear(deadline)["path"])
            mine = islice(rest, len(part.buckets(BUCKETS)))
            try:
                if refusal is None:
                    sums += self._read(path, mine, version=version, deadline=deadline)
            except (StaleUpdateError, TornUpdateError) as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return sums

    def _read(self, path: Path, buckets: Iterable[Bucket], *, version: int, deadline: Deadline) -> list[int]:
        assert self._line is not None
        sums = []
        with _open(path, self._line, deadline) as file:
            found = read_metadata(file, path=path).version
            if found != version:
                raise StaleUpdateError(f"{path} holds version {found}, and version {version} is due")
            for bucket in buckets:
                for span in bucket:
                    host = span if span.device.type == "cpu" else torch.empty(len(span), dtype=torch.uint8)
                    if file.readinto(host.numpy().data) != len(span):  # type: ignore[attr-defined]
                        raise TornUpdateError(f"{path} is cut short")
                    if host is not span:
                        span.copy_(host)
                sums.append(checksum(bucket))
        return sums

    def close(self) -> None:
        return


def parts_of(layout: Layout) -> list[Layout]:
    """The tensors of each file, in their order."""
    least = max(PART_BYTES, layout.num_bytes // MOST_PARTS)
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in layout.entries:
        if size >= least:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.num_bytes
    return [Layout(tuple(part)) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMetadata:
    version: int
    layout: str
    sums: list[int] | None  # of the buckets; None: they come over a line


def read_metadata(file: BinaryIO, *, path: Path) -> FileMetadata:
    """What a file's header says of it; the header is read past."""
    try:
        length = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(length))["__metadata__"]
        sums = json.loads(found["sums"]) if "sums" in found else None
        return FileMetadata(version=int(found["version"]), layout=found["layout"], sums=sums)
    except (ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise TornUpdateError(f"{path} is no file of weights ({type(error).__name__}: {error})") from None


def write_header(file: BinaryIO, layout: Layout, *, version: int, sums: Sequence[int] | None = None) -> None:
    about = {"version": str(version), "layout": layout.text}
    tensors: dict[str, Any] = {"__metadata__": about if sums is None else {**about, "sums": json.dumps(sums)}}
    start = 0
    for entry in layout.entries:
        tensors[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": [entry.shape[dim] for dim in entry.order],
            "data_offsets": [start, start + entry.num_bytes],
        }
        start += entry.num_bytes
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    file.write(len(text).to_bytes(8, "little") + text)


def _open(path: Path, line: Line, deadline: Deadline) -> BinaryIO:
    """A shared folder may show a new file a little later; a sender that is gone has taken it away."""
    until = time.monotonic() + min(SEEN_S, deadline.left_s / 2)  # so that there is time to say that it is not there
    while True:
        try:
            return path.open("rb", buffering=0)  # type: ignore[return-value]
        except FileNotFoundError:
            if line.is_closed():
                raise line.gone(None) from None
            if time.monotonic() >= until:
                raise TornUpdateError(
                    f"{path} is not to be seen here; put run.dir on a folder that all nodes share"
                ) from None
            deadline.tell(f"weights: waiting for {path}")
            time.sleep(LOOK_S)
