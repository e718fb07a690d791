"""Facts about a stored file that are known before it is read. Does not import torch, because `rollcall plan` uses this module too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StoredError(ValueError):
    """Stored weights cannot be used. The message names the file and says what to do."""


@contextmanager
def plain_damage(sentence: str, *, advice: str = "restore the file") -> Iterator[None]:
    """Turn any error that a damaged or malicious file causes in the block into a StoredError of one sentence."""
    try:
        yield
    except StoredError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged JSON, zip archives and pickles can raise anything
        raise StoredError(f"{sentence} ({type(error).__name__}: {error}); {advice}") from None


def refuse_pipe(path: Path) -> None:
    """Refuse a pipe or a device, because opening it could block forever."""
    if path.exists() and not path.is_file():
        raise StoredError(f"{path} is not a regular file; replace it with the file itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRange:
    """A byte range in a file with its own CRC-32, as in a zip archive."""

    offset: int
    size: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A stored file and what its writer recorded about it."""

    path: Path
    size: int
    blake2b: str | None = None  # of the whole file, 16 bytes in hex, if recorded
    node: str | None = None  # where it was written, if recorded
    host: str | None = None  # that node's name
    records: tuple[CheckedRange, ...] = ()

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.node, self.host)))
        return f"{self.path} (written on node {where})" if where else str(self.path)


def new_checksum() -> Any:
    """Create the hash that manifests use for a checkpoint file. Feed it the bytes in order."""
    return hashlib.blake2b(digest_size=16)


def file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_checksum).hexdigest()


def read_fully(fd: int, data: memoryview, offset: int, *, file: object) -> None:
    """Fill ``data`` with the bytes at ``offset``."""
    while data:
        if not (num := os.preadv(fd, [data], offset)):
            raise StoredError(f"{file} ends at byte {offset:,}, inside a tensor: it is truncated; restore the file")
        data, offset = data[num:], offset + num
