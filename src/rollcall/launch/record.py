"""What was launched from this machine: one folder for each launch, with its rendered files and a record.

The record is written before a thing is started and again when its id is known, so that `down` finds all of it, and a launch
that was killed can be finished or cleaned up by the next command. Folders are in ``~/.rollcall/launches``, or in
``$ROLLCALL_LAUNCHES``: on a Slurm cluster that has to be a folder that the nodes see. Several users may share that one, so a
launch's own folder is used only if it belongs to this user, and a record only if it is whole and of that folder.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rollcall.config.yaml import read_small
from rollcall.durable.atomic import write_atomic
from rollcall.durable.lock import take_lock
from rollcall.launch.errors import LaunchError, reason
from rollcall.nodes.state import NAME
from rollcall.redact import remember
from rollcall.wait import say

FOLDER = "ROLLCALL_LAUNCHES"
RECORD = "launch.json"
TOKEN_FILE = "token"
MOST_BYTES = 16 << 20  # of a record
_TOKEN = re.compile("[0-9a-f]{64}")  # it is a word of shell on the hosts
_WHOLE = ConfigDict(extra="forbid", strict=True)
State = Literal["starting", "started", "stopping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that a launch started, or is about to start."""

    __pydantic_config__: ClassVar[ConfigDict] = _WHOLE

    kind: str  # the target's word: node, job, batch job, ...
    where: str  # the host or the tool that knows it
    id: str = ""  # empty: it was about to be started


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    __pydantic_config__: ClassVar[ConfigDict] = _WHOLE

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
        with writing():
            write_atomic(own_folder(self.name) / RECORD, json.dumps(asdict(self), indent=1), private=True)
        return self


_RECORD = TypeAdapter(LaunchRecord)


def launches() -> Path:
    return Path(os.environ.get(FOLDER) or "~/.rollcall/launches").expanduser().absolute()


@contextmanager
def writing() -> Iterator[None]:
    """A disk that is full, or a folder that is not this user's, is one sentence with its path."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{launches()} cannot be written: {reason(error)}; make room there, or set {FOLDER} to another folder"
        ) from None


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


def own_folder(name: str) -> Path:
    """The launch's folder, made if needed. Commands are run from what is in it, so nobody else may write there."""
    folder = launches() / check_name(name)
    with writing():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_foreign(folder)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def _refuse_foreign(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise LaunchError(f"{folder} is a link or a file, and a launch needs a folder of its own; remove it")
    if found.st_uid != os.getuid():
        raise LaunchError(
            f"{folder} belongs to user {found.st_uid}, not to you; give another --name, or set {FOLDER} to a folder of yours"
        )


def launch_token(folder: Path) -> str:
    """Of a launch whose nodes share no folder: made once, kept beside the record, readable only by its owner."""
    path = folder / TOKEN_FILE
    if not path.exists():
        write_atomic(path, secrets.token_hex(32), private=True)
    token = read_small(path, most=1024).decode(errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise LaunchError(
            f"{path} holds no token of a launch; end the launch with `rollcall launch down {folder.name}`"
        )
    remember([token])
    return token


def find_record(name: str) -> LaunchRecord | None:
    path = launches() / check_name(name) / RECORD
    try:
        _refuse_foreign(path.parent)
        record = _RECORD.validate_json(read_small(path, most=MOST_BYTES))
        if record.name != name:
            raise ValueError(f"it is of {record.name!r}")
        datetime.fromisoformat(record.started)
        return record
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise LaunchError(
            f"{path} is not a record of a launch ({_why(error)}); look for what it started by hand, then remove its folder"
        ) from None


def _why(error: ValueError | OSError) -> str:
    if isinstance(error, OSError):
        return reason(error)
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(": ".join((".".join(map(str, one["loc"])), one["msg"])) for one in error.errors()[:3]).lstrip(": ")


def get_record(name: str) -> LaunchRecord:
    record = find_record(name)
    if record is None:
        known = ", ".join(each.name for each in readable_records()) or "none"
        raise LaunchError(f"nothing named {name!r} was launched from this machine; known: {known}")
    return record


def named_record(name: str | None, *, target: str | None = None) -> LaunchRecord:
    """The launch of that name; without one, the only launch from this machine (with ``target``, if one is given)."""
    if name is not None:
        return get_record(name)
    found = [record for record in readable_records() if target in (None, record.target)]
    if not found:
        by = f" with {target}" if target else ""
        raise LaunchError(
            f"nothing was launched{by} from this machine; `rollcall launch {target or 'TARGET'} run.yaml` does"
        )
    if len(found) > 1:
        raise LaunchError(f"there are several launches: {', '.join(each.name for each in found)}; name one of them")
    return found[0]


def all_records() -> list[LaunchRecord]:
    """Of this user, the newest first. Raises at one that cannot be read: what it started is not known."""
    return _newest_first(find_record(name) for name in _own_names())


def readable_records() -> list[LaunchRecord]:
    """The same for those who only look: what cannot be read is named, and left out."""

    def find(name: str) -> LaunchRecord | None:
        try:
            return find_record(name)
        except LaunchError as error:
            say(f"left out: {error}")
            return None

    return _newest_first(map(find, _own_names()))


def _newest_first(records: Iterable[LaunchRecord | None]) -> list[LaunchRecord]:
    return sorted((each for each in records if each is not None), key=lambda record: record.started, reverse=True)


def _own_names() -> list[str]:
    return [path.parent.name for path in sorted(launches().glob(f"*/{RECORD}")) if _is_own(path.parent)]


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another command has ended that launch meanwhile
        return False


def forget(record: LaunchRecord) -> None:
    """After everything it started has ended."""
    shutil.rmtree(record.folder, ignore_errors=True)


@contextmanager
def held(name: str) -> Iterator[None]:
    """One command at a time works on a launch."""
    while True:
        try:
            lock = take_lock(own_folder(name) / "lock")
            break
        except FileNotFoundError:
            continue  # the command that held it has ended the launch, and removed the folder
    if lock is None:
        raise LaunchError(f"another command works on launch {name!r} on this machine; wait for it, or stop it")
    with lock:
        yield
