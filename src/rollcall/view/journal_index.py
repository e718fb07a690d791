"""Indexes all groups in a journal, with the values that the page sorts and filters by and the position of each record.

The index is an in-memory SQLite table. Each refresh updates it, for a bounded time, by reading only bytes after a file's ``end``. If a
file got shorter or was replaced, it is read again from the start.
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rollcall.base.append_file import is_count
from rollcall.base.group_record import HEAD_BYTES, NOT_A_GROUP, header_of, header_span, stream_records
from rollcall.base.wait import warn

FOLDER = "journal"
_STEP_FILE = re.compile(r"(\d{6,12})\.groups")


class GroupRow(NamedTuple):
    """A group's row in the table."""

    step: int
    draw: int
    start: int  # offset of its record in the step's file
    header: int  # offset of its JSON header in that file
    header_bytes: int
    prompt: str
    completions: int
    tokens: int
    reward: float  # mean over its completions
    lowest: float
    highest: float
    truncated: int
    failed: int  # number of completions that a reward could not score
    worker: str
    finished_s: float

    @property
    def file(self) -> str:
        return f"{self.step:06d}.groups"


_TABLES = f"""
create table groups ({", ".join(GroupRow._fields)}, primary key (step, draw)) without rowid;
create index by_prompt on groups (prompt, step);
"""
_INTO_GROUPS = f"into groups values ({', '.join('?' * len(GroupRow._fields))})"
SORTS = {
    "newest": "step desc, draw desc",
    "oldest": "step, draw",
    "best": "reward desc, highest desc, step desc, draw desc",
    "worst": "reward, lowest, step desc, draw desc",
    "longest": "tokens desc, step desc, draw desc",
    "spread": "highest - lowest desc, step desc, draw desc",
}
FILTERS = {
    "truncated": "truncated > 0",
    "failed": "failed > 0",
    "zero": "highest = lowest and completions > 1",
    "mixed": "highest > lowest",
}


class Indexed(NamedTuple):
    files: int  # number of files that are completely in the table
    total: int
    groups: int


class _Read(NamedTuple):
    """How much of a file is in the table."""

    mark: tuple[int, int] | None  # modification time and size when the file was read to its end; None if it was not
    inode: int
    head: bytes
    end: int


class Found(NamedTuple):
    """A page of groups, with counts from the same moment."""

    rows: list[GroupRow]
    total: int  # number of groups that match
    groups: int  # number of groups in the table


class JournalIndex:
    """The index of one journal. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._lock = threading.RLock()  # guards the database connection
        self._reading = threading.Lock()  # one thread at a time reads the journal
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.executescript(_TABLES)
        self._files: dict[str, _Read] = {}
        self._pause_until = 0.0
        self._progress = Indexed(files=0, total=0, groups=0)

    def refresh(self, *, seconds: float = math.inf) -> Indexed:
        """Update the table for at most this many seconds. Returns its progress."""
        if not self._reading.acquire(timeout=-1 if seconds == math.inf else seconds):
            return self._progress  # another thread is reading
        try:
            began = time.monotonic()
            if began >= self._pause_until or seconds == math.inf:
                self._progress = self._read(until=began + seconds)
                took_s = time.monotonic() - began
                if self._progress.files == self._progress.total:  # listing a folder with many files takes a while too
                    self._pause_until = time.monotonic() + min(took_s * 20, 30.0)
        except OSError as error:
            warn(f"the journal in {self._folder} cannot be indexed: {error}")
        finally:
            self._reading.release()
        return self._progress

    def _read(self, *, until: float) -> Indexed:
        paths = {path.name: path for path in self._folder.glob("*.groups") if _STEP_FILE.fullmatch(path.name)}
        for name in self._files.keys() - paths.keys():
            self._drop(name)
        due: list[str] = []
        for name, path in paths.items():
            with suppress(FileNotFoundError):
                about, known = path.stat(), self._files.get(name)
                if known is None or known.mark != (about.st_mtime_ns, about.st_size):
                    due.append(name)
        # Newest first, because users look at new groups while an old journal is being read.
        due.sort(key=lambda name: int(name.partition(".")[0]), reverse=True)
        left = len(due)
        for name in due:
            left -= self._index(name, until=until)
            if time.monotonic() >= until:
                break
        return Indexed(files=len(paths) - left, total=len(paths), groups=self._count())

    def _index(self, name: str, *, until: float) -> bool:
        """Index a file. Returns whether the whole file is in the table."""
        rows: list[GroupRow] = []
        again: list[GroupRow] = []
        try:
            with (self._folder / name).open("rb") as file:
                about = os.fstat(file.fileno())
                head = file.read(HEAD_BYTES)
                before, end = self._files.get(name), 0
                # A new file with this name may have the old file's inode or its first record, but not both.
                if before and (before.inode, before.head) == (about.st_ino, head) and before.end <= about.st_size:
                    end = before.end
                else:
                    self._drop(name)
                is_whole = True
                for start, payload in stream_records(file, start=end, end=about.st_size):
                    end = start + HEAD_BYTES + len(payload)
                    if (found := _row(payload, start=start)) is not None:
                        (again if found[1] else rows).append(found[0])
                    if time.monotonic() >= until:
                        is_whole = False
                        break
        except FileNotFoundError:
            return True  # removed since the folder was listed; the next refresh drops it
        except OSError as error:
            warn(f"the journal's file {name} cannot be indexed: {error}")
            return True
        mark = (about.st_mtime_ns, about.st_size) if is_whole else None
        with self._lock:
            # The first record of a draw counts, unless its group was scored again.
            self._db.executemany(f"insert or ignore {_INTO_GROUPS}", rows)
            self._db.executemany(f"insert or replace {_INTO_GROUPS}", again)
            self._files[name] = _Read(mark, about.st_ino, head, end)
        return is_whole

    def _drop(self, name: str) -> None:
        with self._lock:
            self._db.execute("delete from groups where step = ?", (int(name.partition(".")[0]),))
            self._files.pop(name, None)

    def _count(self) -> int:
        return self._rows("select count(*) from groups")[0][0]

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def find(
        self,
        *,
        step: int | None = None,
        prompt: str | None = None,
        only: str | None = None,
        sort: str = "newest",
        limit: int = 50,
        offset: int = 0,
    ) -> Found:
        """Return a page of groups."""
        wanted = {"step = ?": step, "prompt = ?": prompt}
        wanted = {test: value for test, value in wanted.items() if value is not None}
        tests = [*wanted, *([FILTERS[only]] if only else [])]
        where = f"where {' and '.join(tests)}" if tests else ""
        with self._lock:
            ((total,),) = self._rows(f"select count(*) from groups {where}", tuple(wanted.values()))
            query = f"select * from groups {where} order by {SORTS[sort]} limit ? offset ?"
            rows = self._rows(query, (*wanted.values(), limit, offset))
            return Found([GroupRow(*row) for row in rows], total, self._count())

    def get(self, *, step: int, draw: int) -> GroupRow | None:
        found = self._rows("select * from groups where step = ? and draw = ?", (step, draw))
        return GroupRow(*found[0]) if found else None

    def before(self, *, step: int, draw: int, only: str | None, limit: int) -> list[GroupRow]:
        """Return up to ``limit`` groups before this one, newest first, so that a search can proceed in pieces."""
        more = f"and {FILTERS[only]}" if only else ""
        query = f"select * from groups where (step, draw) < (?, ?) {more} order by step desc, draw desc limit ?"
        return [GroupRow(*row) for row in self._rows(query, (step, draw, limit))]

    def steps(self) -> tuple[int, int] | None:
        """Return the first and the last step that have groups."""
        ((first, last),) = self._rows("select min(step), max(step) from groups")
        return None if first is None else (first, last)


def _row(payload: memoryview, *, start: int) -> tuple[GroupRow, bool] | None:
    """Return a record's row and whether its group was scored again, or None if the record is not a group."""
    try:
        header = header_of(payload)
        at, length = header_span(payload)
        rewards = [float(score["value"]) for score in header["scores"]] or [0.0]
        counts = [row["num_tokens"] for row in header["completions"]]
        if not all(map(is_count, (header["step"], header["draw"], *counts))):
            return None
        row = GroupRow(
            step=header["step"],
            draw=header["draw"],
            start=start,
            header=start + HEAD_BYTES + at,
            header_bytes=length,
            prompt=str(header["prompt"]["id"]).encode("utf-8", "replace").decode(),
            completions=len(counts),
            tokens=sum(counts),
            reward=sum(rewards) / len(rewards),
            lowest=min(rewards),
            highest=max(rewards),
            truncated=sum(row["finish"] == "length" for row in header["completions"]),
            failed=sum(bool(score["errors"]) for score in header["scores"]),
            worker=str(header["worker"]).encode("utf-8", "replace").decode(),
            finished_s=float(header["finished_s"]),
        )
        return row, bool(header.get("scored_again"))
    except NOT_A_GROUP:
        return None
