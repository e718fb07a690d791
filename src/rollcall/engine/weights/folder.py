"""Sends weights as files in a folder that the sender and the receivers share. They exchange no messages.

An update consists of a few files in safetensors format, so receivers read one file while the sender writes the next. Each file is
renamed to its final name when it is complete; its metadata contains the update's layout and the file's checksums. Its name contains
the sender's secret and the version, so no receiver reads another sender's files. The files stay until the next update is complete,
so a receiver that is late still finds them.

Who waits for whom: ``send`` does not wait; ``receive`` waits for the files of its version. When both have returned, their caller knows
that every receiver has the update.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from io import FileIO
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from rollcall.base.atomic import TEMPORARY, replacing
from rollcall.base.errors import MissingPeerError
from rollcall.base.wait import Wait
from rollcall.engine.weights.layout import Entry, Layout, Views, view
from rollcall.engine.weights.protocol import BucketSize, Invitation, RefusedUpdateError, refuse_stale
from rollcall.model.checksum import checksum
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.safetensors import read_header, write_header

# Spans are in the same order as in the files, and the checksum of a span is computed while it is in the cache.
BUCKETS = BucketSize(num_bytes=1 << 20, alone_from=0)
PART_BYTES, MOST_PARTS = 32 << 20, 16
LOOK_S = 0.1


class FolderSender:
    def __init__(self, folder: Path, *, name: str, receivers: Sequence[str], timeout_s: float) -> None:
        self._folder = folder.resolve()
        self._invitation = Invitation(
            sender=name,
            carrying="file",
            host="",
            port=0,
            local=str(self._folder),
            secret=secrets.token_hex(8),
            timeout_s=timeout_s,
        )
        self.invitations = dict.fromkeys(receivers, self._invitation)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clear()  # remove the files of a sender that was killed

    def send(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        views = view(tensors)
        written = set[str]()
        for number, (part, buckets) in enumerate(_parts_of(views)):
            sums = json.dumps([checksum(bucket) for bucket in buckets])
            path = _path(self._invitation, version, number)
            with replacing(path, durable=False) as file:
                # Shapes in memory order.
                entries = ((one.name, one.torch_dtype, [one.shape[dim] for dim in one.order]) for one in part.entries)
                write_header(file, entries, metadata={"layout": views.layout.text, "sums": sums})
                for span in (span for bucket in buckets for span in bucket):
                    file.write(span.cpu().numpy().data)
            written.add(path.name)
        self._clear(keep=written)

    def close(self) -> None:
        self._clear()

    def _clear(self, *, keep: Collection[str] = ()) -> None:
        for path in self._folder.iterdir():
            if path.name.removeprefix(TEMPORARY).startswith("weights-") and path.name not in keep:
                path.unlink(missing_ok=True)


class FolderReceiver:
    def __init__(self, *, invitation: Invitation, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self._invitation = invitation
        self._tensors = dict(tensors)
        self._newest: int | None = None

    def receive(self, *, version: int) -> None:
        refuse_stale(version, due=version, newest=self._newest)
        deadline = Wait(self._invitation.timeout_s)
        refusal: RefusedUpdateError | None = None
        for _ in range(2):  # a network share may show a file before it shows all of its bytes
            try:
                self._apply(version, deadline)
            except RefusedUpdateError as error:
                refusal = error
                time.sleep(LOOK_S)
                continue
            self._newest = version
            return
        raise RefusedUpdateError(f"{self.name} refused version {version} twice: {refusal}") from refusal

    def close(self) -> None:
        """Do nothing: no file is open between updates."""

    def _apply(self, version: int, deadline: Wait) -> None:
        """Copy one file after another into the tensors. Then compare the checksums of what arrived with those in the files."""
        due, sums, number = list[int](), list[int](), 0
        views: Views | None = None
        parts: list[tuple[Layout, list[list[Tensor]]]] = []
        while views is None or number < len(parts):
            path = self._find(version, number, deadline)
            try:
                entries, about = read_header(path)
                layout, due_here = about["layout"], json.loads(about["sums"])
            except (StoredError, ValueError, KeyError, TypeError) as error:
                raise RefusedUpdateError(f"{path} is not a weight file ({type(error).__name__}: {error})") from None
            if views is None:
                sent = Layout.parse(layout)
                sent.check(self._tensors)
                views = Views(self._tensors, sent)
                parts = _parts_of(views)
            with path.open("rb", buffering=0) as file:
                file.seek(min(entry.offset for entry in entries.values()))
                sums += [_fill(bucket, file, path=path) for bucket in parts[number][1]]
            due, number = due + due_here, number + 1
        views.write()
        if views.has_copies:
            views.read()  # so that the checksums cover the tensors themselves, not the data that was copied into them
            sums = [checksum(bucket) for bucket in views.buckets(BUCKETS)]
        if sums != due:
            raise RefusedUpdateError(f"the checksums do not match after version {version} was applied")

    def _find(self, version: int, number: int, deadline: Wait) -> Path:
        path, pause_s = _path(self._invitation, version, number), LOOK_S / 16
        # List the folder instead of looking up the name: NFS caches for a while that a name does not exist.
        while not path.parent.is_dir() or path.name not in os.listdir(path.parent):
            if not deadline.again(f"weights: waiting for {path}", after_s=pause_s):
                raise MissingPeerError(
                    f"{self.name} did not find {path} within {deadline.timeout_s:g} s; {self._invitation.sender} should have "
                    "written it; set run.dir to a folder that all nodes share"
                )
            pause_s = min(2 * pause_s, LOOK_S)  # most files come soon, but a network share must not be listed too often
        return path


def _fill(bucket: Sequence[Tensor], file: FileIO, *, path: Path) -> int:
    """Read a bucket. Return its checksum, which is computed while the bucket is in the cache."""
    for span in bucket:
        host = span if span.device.type == "cpu" else torch.empty(len(span), dtype=torch.uint8)
        if file.readinto(host.numpy().data) != len(span):
            raise RefusedUpdateError(f"{path} is truncated")
        if host is not span:
            span.copy_(host)
    return checksum(bucket)


def _parts_of(views: Views) -> list[tuple[Layout, list[list[Tensor]]]]:
    """Return the layout and buckets of each file, in order."""
    least = max(PART_BYTES, views.layout.num_bytes // MOST_PARTS)
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in views.layout.entries:
        if size >= least:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.num_bytes
    buckets = iter(views.buckets(BUCKETS))
    layouts = [Layout(tuple(part)) for part in parts]
    return [(part, list(islice(buckets, len(part.buckets(BUCKETS))))) for part in layouts]


def _path(invitation: Invitation, version: int, number: int) -> Path:
    return Path(invitation.local) / f"weights-{invitation.secret}-{version:08d}-{number:02d}.safetensors"
