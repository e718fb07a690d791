"""What was launched from this machine: one folder for each launch, with its rendered files and a record.

The record is written before a thing is started and again when its id is known, so that `down` finds all of it, and a launch
that was killed can be finished or cleaned up by the next command. Folders are in ``~/.rollcall/launches``, or in
``$ROLLCALL_LAUNCHES``: on a Slurm cluster that has to be a folder that the nodes see.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rollcall.durable.atomic import write_atomic
from rollcall.launch.errors import LaunchError
from rollcall.nodes.state import NAME

FOLDER = "ROLLCALL_LAUNCHES"
RECORD = "launch.json"
State = Literal["starting", "started", "stopping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that a launch started, or is about to start."""

    kind: str  # the target's word: node, job, batch job, ...
    where: str  # the host or the tool that knows it
    id: str = ""  # empty: it was about to be started


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    name: str
    target: str
    state: State
    run_dir: str
    started: str
    by: str  # user@host
    parts: tuple[Part, ...] = ()
    facts: dict[str, str] = field(
        default_factory=dict
    )  # what the target needs to find it again, such as the head's address

    @property
    def folder(self) -> Path:
        return launches() / self.name

    def with_part(self, part: Part) -> LaunchRecord:
        """The record with this part, in place of one of the same kind and place."""
        others = tuple(old for old in self.parts if (old.kind, old.where) != (part.kind, part.where))
        return replace(self, parts=(*others, part))

    def save(self) -> LaunchRecord:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(self.folder / RECORD, json.dumps(asdict(self), indent=1), private=True)
        return self


def launches() -> Path:
    return Path(os.environ.get(FOLDER) or "~/.rollcall/launches").expanduser().absolute()


def new_record(name: str, *, target: str, run_dir: str) -> LaunchRecord:
    return LaunchRecord(
        name=check_name(name),
        target=target,
        state="starting",
        run_dir=run_dir,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        by=f"{getpass.getuser()}@{socket.gethostname()}",
    )


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise LaunchError(
            f"{name!r} cannot be a launch's name; use at most 32 letters, digits, '-' and '_', beginning and ending with a "
            "letter or digit"
        )
    return name


def find_record(name: str) -> LaunchRecord | None:
    path = launches() / check_name(name) / RECORD
    try:
        raw = json.loads(path.read_text())
        parts = tuple(Part(**part) for part in raw.pop("parts"))
        return LaunchRecord(**raw, parts=parts)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LaunchError(
            f"{path} is not a record of a launch ({error}); look for what it started by hand, then remove its folder"
        ) from None


def get_record(name: str) -> LaunchRecord:
    record = find_record(name)
    if record is None:
        known = ", ".join(each.name for each in all_records()) or "none"
        raise LaunchError(f"nothing named {name!r} was launched from this machine; known: {known}")
    return record


def all_records() -> list[LaunchRecord]:
    """The newest first."""
    found = [record for path in sorted(launches().glob(f"*/{RECORD}")) if (record := find_record(path.parent.name))]
    return sorted(found, key=lambda record: record.started, reverse=True)


def forget(record: LaunchRecord) -> None:
    """After everything it started has ended."""
    shutil.rmtree(record.folder, ignore_errors=True)


@contextmanager
def held(name: str) -> Iterator[None]:
    """One command at a time works on a launch."""
    folder = launches() / check_name(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"another command works on launch {name!r} on this machine; wait for it, or stop it"
            ) from None
        yield
