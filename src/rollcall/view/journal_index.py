"""A table of all groups of a journal: what they are sorted, filtered and found by, and where their records are.

Made once, by a thread, and then only for files that have grown. It is a SQLite file in the user's cache folder (``_index_path``), or
in memory where there is none. Of a file, the bytes up to ``end`` are in the table. A file that is shorter than that, or another
file of the same name, is read again.

The thread works while somebody looks: each question to the index asks for a refresh, and a refresh that took long is followed by
a longer pause, so that a page beside a run costs little.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollcall.durable.append_file import is_count
from rollcall.durable.group_record import HEAD_BYTES, NOT_A_GROUP, header_of, header_span, stream_records
from rollcall.wait import warn

FOLDER = "journal"
_STEP_FILE = re.compile(r"(\d{6,})\.groups")
_SCHEMA = 4  # another number: the table is made again
_TABLES = """
create table if not exists files (name text primary key, inode integer, changed_ns integer, end integer, head blob);
create table if not exists groups (
    step integer, draw integer, start integer, header integer, header_bytes integer, prompt text, completions integer, tokens integer,
    reward real, lowest real, highest real, truncated integer, failed integer, worker text, finished_s real,
    primary key (step, draw)
) without rowid;
create index if not exists by_prompt on groups (prompt, step);
"""
COLUMNS = (
    "step", "draw", "start", "header", "header_bytes", "prompt", "completions", "tokens", "reward", "lowest", "highest",
    "truncated", "failed", "worker", "finished_s",
)  # fmt: skip
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


class _Known(NamedTuple):
    """A file of the journal as it was read."""

    about: tuple[int, int, int]  # its number, when it was written (ns), its size
    end: int  # of its last record
    head: bytes  # of its first


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group in the table."""

    step: int
    draw: int
    start: int  # of its record in the step's file
    header: int  # offset of its JSON header in that file
    header_bytes: int
    prompt: str
    completions: int
    tokens: int
    reward: float  # mean over its completions
    lowest: float
    highest: float
    truncated: int
    failed: int  # completions that a reward could not score
    worker: str
    finished_s: float

    @property
    def file(self) -> str:
        return f"{self.step:06d}.groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    files: int  # with all their groups in the table
    total: int
    groups: int


class Found(NamedTuple):
    """Counted at one moment, also while the journal is read."""

    rows: list[GroupRow]
    total: int  # that fit
    groups: int  # in the table


class JournalIndex:
    def __init__(self, root: Path, *, path: Path | None = None) -> None:
        self._root = root
        self._path = path if path is not None else _index_path(root)
        self._lock = threading.RLock()  # of the one connection
        self._reading = threading.Lock()  # one thread at a time reads the journal
        self._db = self._open()
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._known: dict[str, _Known] = {}
        self._progress = Indexed(files=0, total=0, groups=self._count())

    def _open(self) -> sqlite3.Connection:
        for attempt in range(2):
            where = str(self._path) if self._path is not None else ":memory:"
            db = sqlite3.connect(where, check_same_thread=False, timeout=30.0)
            try:
                # A cache: after a power loss it may be made again.
                db.executescript("pragma journal_mode = memory; pragma synchronous = off;")
                if db.execute("pragma user_version").fetchone()[0] != _SCHEMA:
                    db.executescript(
                        f"drop table if exists files; drop table if exists groups; pragma user_version = {_SCHEMA};"
                    )
                db.executescript(_TABLES)
                db.execute("select count(*) from files").fetchone()
                return db
            except sqlite3.DatabaseError as error:
                db.close()
                if self._path is None or attempt:
                    raise
                warn(f"{self._path}: {error}; this index is made again")
                self._path.unlink(missing_ok=True)
        raise AssertionError("the second attempt returns or raises")

    def close(self) -> None:
        self._closed = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._db.close()

    def ask(self) -> Indexed:
        """How far the table is; a thread brings it up to date."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="journal index", daemon=True)
                self._thread.start()
        self._asked.set()
        return self._progress

    def _work(self) -> None:
        while not self._closed:
            self._asked.wait()
            self._asked.clear()
            if self._closed:
                return
            began = time.monotonic()
            try:
                self.refresh()
            except (sqlite3.Error, OSError) as error:
                warn(f"the journal of {self._root} cannot be indexed: {error}")
            took = time.monotonic() - began
            until = time.monotonic() + max(1.0, min(took * 20, 30.0))  # it takes at most a twentieth of the time
            while not self._closed and time.monotonic() < until:
                time.sleep(0.1)

    def refresh(self) -> Indexed:
        """Bring the table up to date; returns when it is."""
        with self._reading:
            return self._refresh()

    def _refresh(self) -> Indexed:
        found = {path.name: path for path in (self._root / FOLDER).glob("*.groups") if _STEP_FILE.fullmatch(path.name)}
        if not self._known:
            with self._lock:
                rows = self._db.execute("select name, inode, changed_ns, end, head from files").fetchall()
            # A file that was whole when it was read ended where its last record did.
            self._known = {
                name: _Known((inode, changed_ns, end), end, head) for name, inode, changed_ns, end, head in rows
            }
        for name in self._known.keys() - found.keys():
            self._drop(name)
            del self._known[name]
        seen: dict[str, tuple[int, int, int]] = {}
        for name, path in found.items():
            try:
                about = path.stat()
            except OSError:
                continue
            seen[name] = (about.st_ino, about.st_mtime_ns, about.st_size)
        due = [name for name, about in seen.items() if name not in self._known or self._known[name].about != about]
        # The newest first: that is what people look at while an old journal is read.
        due.sort(key=lambda name: int(name.partition(".")[0]), reverse=True)
        self._progress = Indexed(files=len(seen) - len(due), total=len(seen), groups=self._count())
        committed = time.monotonic()
        for number, name in enumerate(due, start=1):
            if self._closed:
                break
            self._index(name, about=seen[name])
            if number == len(due) or time.monotonic() - committed > 0.5:
                with self._lock:
                    self._db.commit()
                committed = time.monotonic()
                done = len(seen) - len(due) + number
                self._progress = Indexed(files=done, total=len(seen), groups=self._count())
        with self._lock:
            self._db.commit()
        return self._progress

    def _index(self, name: str, *, about: tuple[int, int, int]) -> None:
        (inode, changed_ns, size), before = about, self._known.get(name)
        end, head = 0, b""
        rows, again = [], []
        try:
            with (self._root / FOLDER / name).open("rb") as file:
                head = file.read(HEAD_BYTES)
                # A new file may have the number of one that was removed. Its first record has another checksum.
                if before is not None and before.about[0] == inode and before.head == head:
                    end = before.end if before.end <= size else 0
                if end == 0:
                    self._drop(name)
                for start, payload in stream_records(file, start=end, end=size):
                    row = _row(payload, start=start)
                    end = start + HEAD_BYTES + len(payload)
                    if row is not None:
                        (again if row[1] else rows).append(row[0])
        except FileNotFoundError:
            return  # removed since the folder was listed; the next look drops it
        except OSError as error:
            warn(f"{name} of the journal is not indexed: {error}")
        marks = ", ".join("?" * len(COLUMNS))
        with self._lock:
            # The first record of a draw counts, unless its group was scored again.
            self._db.executemany(f"insert or ignore into groups values ({marks})", rows)
            self._db.executemany(f"insert or replace into groups values ({marks})", again)
            self._db.execute(
                "insert or replace into files values (?, ?, ?, ?, ?)", (name, inode, changed_ns, end, head)
            )
        self._known[name] = _Known(about, end, head)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._db.execute("delete from groups where step = ?", (int(name.partition(".")[0]),))
            self._db.execute("delete from files where name = ?", (name,))

    def _count(self) -> int:
        with self._lock:
            return self._db.execute("select count(*) from groups").fetchone()[0]

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
        """A page of groups."""
        wanted: list[str] = []
        values: list[Any] = []
        if step is not None:
            wanted.append("step = ?")
            values.append(step)
        if prompt is not None:
            wanted.append("prompt = ?")
            values.append(prompt)
        if only:
            wanted.append(FILTERS[only])
        where = f"where {' and '.join(wanted)}" if wanted else ""
        with self._lock:
            total = self._db.execute(f"select count(*) from groups {where}", values).fetchone()[0]
            query = f"select * from groups {where} order by {SORTS[sort]} limit ? offset ?"
            rows = self._db.execute(query, [*values, limit, offset]).fetchall()
            return Found([_as_row(row) for row in rows], total, self._count())

    def get(self, *, step: int, draw: int) -> GroupRow | None:
        with self._lock:
            found = self._db.execute("select * from groups where step = ? and draw = ?", (step, draw)).fetchone()
        return None if found is None else _as_row(found)

    def before(self, *, step: int, draw: int, only: str | None, limit: int) -> list[GroupRow]:
        """The groups before this one, the newest first: what a search goes through piece by piece."""
        more = f"and {FILTERS[only]}" if only else ""
        query = f"select * from groups where (step, draw) < (?, ?) {more} order by step desc, draw desc limit ?"
        with self._lock:
            return [_as_row(row) for row in self._db.execute(query, (step, draw, limit)).fetchall()]

    def steps(self) -> tuple[int, int] | None:
        """The first and the last step that has groups."""
        with self._lock:
            first, last = self._db.execute("select min(step), max(step) from groups").fetchone()
        return None if first is None else (first, last)


def _as_row(values: tuple[Any, ...]) -> GroupRow:
    return GroupRow(**dict(zip(COLUMNS, values, strict=True)))


def _row(payload: memoryview, *, start: int) -> tuple[tuple[Any, ...], bool] | None:
    """A record's values in the order of COLUMNS, and whether its group was scored again; None: it is not a group."""
    try:
        header = header_of(payload)
        at, length = header_span(payload)
        step, draw = header["step"], header["draw"]
        rewards = [float(score["value"]) for score in header["scores"]]
        counts = [row["num_tokens"] for row in header["completions"]]
        if not all(map(is_count, (step, draw, *counts))):
            return None
        row = (
            step,
            draw,
            start,
            start + HEAD_BYTES + at,
            length,
            str(header["prompt"]["id"]).encode("utf-8", "replace").decode(),
            len(counts),
            sum(counts),
            sum(rewards) / len(rewards) if rewards else 0.0,
            min(rewards, default=0.0),
            max(rewards, default=0.0),
            sum(row["finish"] == "length" for row in header["completions"]),
            sum(bool(score["errors"]) for score in header["scores"]),
            str(header["worker"]).encode("utf-8", "replace").decode(),
            float(header["finished_s"]),
        )
        return row, bool(header.get("scored_again"))
    except NOT_A_GROUP:
        return None


def _index_path(run_dir: Path) -> Path | None:
    """The file for the index of this run directory; None: the cache folder cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "rollcall" / "view"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.blake2b(os.fsencode(run_dir), digest_size=12).hexdigest()
        path = folder / f"{name}.sqlite"
        path.touch(mode=0o600)
        return path
    except OSError as error:
        warn(
            f"{folder} cannot be written ({error.strerror}); the index of {run_dir} is kept in memory and made again next time"
        )
        return None
