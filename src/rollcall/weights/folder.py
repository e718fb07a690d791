"""Weights left as a file in a folder, where sender and receivers share nothing else: no word passes between them.

The file is that of ``file.py``, with the checksums in its metadata. It is named after its sender's secret and its version,
so what another sender left is never taken. It stays until the next one is there, so a receiver that comes later finds it.

Who waits for whom: ``send`` waits for nobody; ``receive`` waits for the file of its version. Whoever asked both for it
knows by their answers that all have it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from rollcall.errors import MissingPeerError
from rollcall.weights.checksum import checksum
from rollcall.weights.file import BUCKETS, LOOK_S, SUFFIX, read_metadata, write_header
from rollcall.weights.layout import Layout, Views, places
from rollcall.weights.line import Deadline
from rollcall.weights.protocol import Invitation, RefusedUpdateError, Sent, StaleUpdateError, TornUpdateError

MOST_READS = 2


class FolderSender:
    def __init__(self, folder: Path, *, name: str, receivers: Sequence[str], timeout_s: float) -> None:
        self._folder = folder.resolve()
        self._receivers = tuple(receivers)
        self._invitation = Invitation(
            sender=name,
            carrying="file",
            host="",
            port=0,
            local=str(self._folder),
            secret=secrets.token_hex(8),
            timeout_s=timeout_s,
        )
        self._views: Views | None = None
        self._places: tuple[object, ...] = ()
        self._folder.mkdir(parents=True, exist_ok=True)
        _clear(self._folder, keep=None)  # what a sender that was killed has left

    @property
    def invitations(self) -> Mapping[str, Invitation]:
        return dict.fromkeys(self._receivers, self._invitation)

    def send(self, tensors: Mapping[str, Tensor], *, version: int) -> Sequence[Sent]:
        where = places(tensors)
        if self._views is None or where != self._places:
            self._views, self._places = Views(tensors, Layout.of(tensors)), where
        views = self._views
        views.read()
        buckets = views.buckets(BUCKETS)
        path = _path(self._invitation, version)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            sums = [checksum(bucket) for bucket in buckets]
            write_header(file, views.layout, version=version, sums=sums)
            for span in (span for bucket in buckets for span in bucket):
                file.write(span.cpu().numpy().data)
        os.replace(temporary, path)
        _clear(self._folder, keep=path.name)
        return [
            Sent(version=version, num_bytes=views.layout.num_bytes, is_full=True, num_attempts=1, refusals={}),
        ]

    def close(self) -> None:
        _clear(self._folder, keep=None)
        self._views = None


class FolderReceiver:
    def __init__(self, *, invitation: Invitation, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self._invitation = invitation
        self._tensors = dict(tensors)
        self._views: Views | None = None
        self._held: int | None = None
        self._newest: int | None = None

    @property
    def version(self) -> int | None:
        return self._held

    def receive(self, *, version: int) -> None:
        if self._newest is not None and version <= self._newest:
            raise StaleUpdateError(f"version {version} is not newer than the {self._newest} that {self.name} has")
        deadline = Deadline(self._invitation.timeout_s)
        self._held = None
        refusal: TornUpdateError | None = None
        for _ in range(MOST_READS):  # a share may show a file before all of its bytes
            path = self._find(version, deadline)
            try:
                with path.open("rb", buffering=0) as file:
                    self._apply(file, path=path, version=version)  # type: ignore[arg-type]
            except TornUpdateError as error:
                refusal = error
                time.sleep(LOOK_S)
                continue
            self._held = self._newest = version
            return
        raise RefusedUpdateError(f"{self.name} refused version {version} twice: {refusal}") from refusal

    def close(self) -> None:
        self._views = None

    def _find(self, version: int, deadline: Deadline) -> Path:
        path = _path(self._invitation, version)
        # Listed, not asked for by name: NFS remembers for a while that a name is not there.
        while not path.parent.is_dir() or path.name not in os.listdir(path.parent):
            if deadline.has_passed:
                raise MissingPeerError(
                    f"{self.name} sees no {path} after {deadline.timeout_s:g} s, which {self._invitation.sender} should write; "
                    "put run.dir on the folder that all nodes share"
                )
            deadline.tell(f"weights: waiting for {path}")
            time.sleep(LOOK_S)
        return path

    def _apply(self, file: BinaryIO, *, path: Path, version: int) -> None:
        about = read_metadata(file, path=path)
        if about.version != version:
            raise TornUpdateError(f"{path} holds version {about.version}, and version {version} is due")
        if self._views is None or about.layout != self._views.layout.text:
            layout = Layout.parse(about.layout)
            layout.check(self._tensors)
            self._views = Views(self._tensors, layout)
        for span in (span for bucket in self._views.buckets(BUCKETS) for span in bucket):
            host = span if span.device.type == "cpu" else torch.empty(len(span), dtype=torch.uint8)
            if file.readinto(host.numpy().data) != len(span):  # type: ignore[attr-defined]
                raise TornUpdateError(f"{path} is cut short")
            if host is not span:
                span.copy_(host)
        self._views.write()
        self._views.read()  # of the tensors themselves, not of what was copied into them
        sums = [checksum(bucket) for bucket in self._views.buckets(BUCKETS)]
        if sums != about.sums:
            raise TornUpdateError(f"the checksums of {path} differ after it was applied")


def _path(invitation: Invitation, version: int) -> Path:
    return Path(invitation.local) / f"weights-{invitation.secret}-{version:08d}{SUFFIX}"


def _clear(folder: Path, *, keep: str | None) -> None:
    for path in folder.glob(f"weights-*{SUFFIX}*"):
        if path.name != keep:
            path.unlink(missing_ok=True)
