"""Keeps a folder for each launch from this machine, with its rendered files and a record.

The record is written before anything starts, and again when the launch's id is known. So `down` finds a launch that was killed,
and the next command can finish it or clean it up. Folders are in ``~/.rollcall/launches`` or in ``$ROLLCALL_LAUNCHES``, which on a
Slurm cluster must be a folder that the nodes can see.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from rollcall.base.atomic import take_lock, write_atomic
from rollcall.base.errors import in_one_line
from rollcall.base.redact import remember
from rollcall.base.wait import say
from rollcall.nodes.state import NAME

FOLDER = "ROLLCALL_LAUNCHES"
RECORD = "launch.json"
TOKEN_FILE = "token"


class LaunchError(RuntimeError):
    """A launch failed or was refused; the message says what happened, on which host, and what to do."""


def reason(error: Exception) -> str:
    """Return why a file cannot be read, for a message that names the file."""
    return (isinstance(error, OSError) and error.strerror) or in_one_line(error)


def read_lines(path: Path, *, key: str) -> list[str]:
    """Read a text file that the run file names under ``key``."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"{key}={path} cannot be read: {reason(error)}") from None


class LaunchRecord(BaseModel):
    model_config = ConfigDict(frozen=True)  # ignores keys from other versions, so that their launches can be stopped

    name: str
    target: str
    state: Literal["starting", "started", "stopping"]
    run_dir: str
    started: AwareDatetime
    id: str | None = None  # the tool's id for the job or cluster; "" from just before the start until the id is known
    facts: dict[str, Any] = {}  # what the target needs to find the launch again, such as hosts

    @property
    def folder(self) -> Path:
        return launches() / self.name

    def having(self, **changes: Any) -> LaunchRecord:
        return self.model_copy(update=changes)

    def knowing(self, **facts: Any) -> LaunchRecord:
        return self.having(facts={**self.facts, **facts})

    def save(self) -> LaunchRecord:
        write_atomic(own_folder(self.name) / RECORD, self.model_dump_json(indent=1), private=True)
        return self


def launches() -> Path:
    return Path(os.environ.get(FOLDER) or "~/.rollcall/launches").expanduser().absolute()


def new_record(name: str, *, target: str, run_dir: str) -> LaunchRecord:
    now = datetime.now(UTC).replace(microsecond=0)
    return LaunchRecord(name=check_name(name), target=target, state="starting", run_dir=run_dir, started=now)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise LaunchError(
            f"{name!r} cannot be a launch's name; use at most 32 letters, digits, '-' and '_', beginning and ending with a "
            "letter or digit"
        )
    return name


def default_name(run: str) -> str:
    """Return the run's name without the characters that a cluster's name cannot contain.

    >>> default_name("my first run!")
    'my-first-run'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run)[:32].strip("-_") or "run"


def own_folder(name: str) -> Path:
    """Create the launch's folder if needed. Only its owner can read it, because a run file may contain private values."""
    folder = launches() / check_name(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def launch_token(folder: Path) -> str:
    """Return the launch's token; the first call creates it."""
    path = folder / TOKEN_FILE
    if not path.exists():
        write_atomic(path, secrets.token_hex(32), private=True)
    token = path.read_text().strip()
    remember([token])
    return token


def find_record(name: str) -> LaunchRecord | None:
    path = launches() / check_name(name) / RECORD
    try:
        return LaunchRecord.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise LaunchError(
            f"{path} is not a valid launch record ({reason(error)}); manually stop what this launch started, then remove its folder"
        ) from None


def get_record(name: str) -> LaunchRecord:
    record = find_record(name)
    if record is None:
        known = ", ".join(each.name for each in all_records(strict=False)) or "none"
        raise LaunchError(f"no launch named {name!r} was started from this machine; its launches are: {known}")
    return record


def named_record(name: str | None, *, target: str | None = None) -> LaunchRecord:
    """Return the launch named ``name``. Without a name, return the only launch from this machine (with ``target``, if given)."""
    if name is not None:
        return get_record(name)
    found = [record for record in all_records(strict=False) if target in (None, record.target)]
    if not found:
        by = f" with {target}" if target else ""
        raise LaunchError(
            f"nothing was launched{by} from this machine; `rollcall launch {target or 'TARGET'} run.yaml` launches a run"
        )
    if len(found) > 1:
        raise LaunchError(f"there are several launches: {', '.join(each.name for each in found)}; name one of them")
    return found[0]


def all_records(*, strict: bool = True) -> list[LaunchRecord]:
    """Return all launches, newest first. An unreadable record raises an error, because it is unknown what that launch started;
    without ``strict`` it is reported and skipped."""
    found = []
    for path in launches().glob(f"*/{RECORD}"):
        try:
            found.append(find_record(path.parent.name))
        except LaunchError as error:
            if strict:
                raise
            say(f"skipped: {error}")
    return sorted((each for each in found if each is not None), key=lambda record: record.started, reverse=True)


def forget(record: LaunchRecord) -> None:
    """Remove a launch's folder after everything that it started has ended."""
    shutil.rmtree(record.folder, ignore_errors=True)


def held(name: str) -> IO[bytes]:
    """Lock a launch until the returned file is closed, so that only one command at a time works on it."""
    while True:
        with suppress(FileNotFoundError):  # the command that held the lock ended the launch and removed its folder
            lock = take_lock(own_folder(name) / "lock")
            break
    if lock is None:
        raise LaunchError(
            f"another command is working on launch {name!r} on this machine; wait until it has finished, or stop it"
        )
    return lock
