"""Stores finished groups on disk before training uses them. A resumed run, the phases and the viewer read them from there.

There is one file per step, ``<step:06d>.groups``, with records (``group_record.py``) in the order in which the groups finished.
``append`` passes the record to the operating system before it returns, so a kill loses no appended group; ``sync`` also protects against
power loss. ``trained.jsonl`` says which draws each step was trained on. ``<step:06d>.attempts`` contains attempts
from groups whose other attempts were still running; only a resume reads it.

Only one process writes; any number may read. The journal never deletes anything: a half-written tail is moved to ``torn/``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.base.append_file import AppendFile, is_count, lines_end, parse_row
from rollcall.base.errors import JournalError
from rollcall.base.group_record import HEAD_BYTES, NOT_A_GROUP, decode, draw_of, encode, header_of, records
from rollcall.base.patience import persist
from rollcall.base.types import Group
from rollcall.base.wait import warn

GROUPS, ATTEMPTS = "groups", "attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A trained step and its groups."""

    step: int
    draws: tuple[int, ...]  # ascending
    version: int  # weight version that the step produced


class _Ledger:
    """The steps trained so far. Raises JournalError for an entry that trains a draw twice or replays a step differently."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[int, TrainedStep] = {}
        self._step_of: dict[int, int] = {}  # draw -> step

    def check(self, entry: TrainedStep) -> None:
        before = self.entries.get(entry.step)
        if before is not None and before != entry:
            raise JournalError(
                f"{self.path}: step {entry.step} was trained on draws {list(before.draws)} (version {before.version}), but now it "
                f"was trained on draws {list(entry.draws)} (version {entry.version}); a replay must repeat the step exactly: resume with "
                "the original run file, or choose another run.dir"
            )
        if len(set(entry.draws)) < len(entry.draws):
            raise JournalError(f"{self.path}: step {entry.step} lists a draw twice: {list(entry.draws)}")
        for draw in entry.draws:
            if self._step_of.get(draw, entry.step) != entry.step:
                raise JournalError(
                    f"{self.path}: draw {draw} was already trained in step {self._step_of[draw]}, but step {entry.step} contains it "
                    "again; no prompt may be trained twice: choose another run.dir"
                )

    def add(self, entry: TrainedStep) -> None:
        self.check(entry)
        self.entries[entry.step] = entry
        self._step_of.update(dict.fromkeys(entry.draws, entry.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    payloads: list[memoryview]
    good_end: int  # offset for the next record
    damage: list[tuple[int, int]]  # [start, end) of invalid bytes between valid records


class Journal(AbstractContextManager["Journal"]):
    """The journal of a run. ``guard`` is called before each write, and raises if this process must no longer write."""

    def __init__(self, dir: Path, *, guard: Callable[[], None] = lambda: None) -> None:
        self.dir = Path(dir)
        self._guard = guard
        self._closed = False
        self._files: dict[Path, AppendFile] = {}
        self._ledger: _Ledger | None = None
        self._lock = threading.RLock()
        self._syncing = threading.Lock()
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(
                f"{self.dir}: cannot write the journal folder: {error.strerror}; free space or make the folder writable, or "
                "choose another run.dir"
            ) from error

    def append(self, group: Group, *, again: bool = False) -> None:
        """Write a finished group. Once this returns, the group survives even if the process is killed. ``again``: the group already has a
        record, only its scores are new, and the new record replaces the old one."""
        what = f"the group of draw {group.draw}, step {group.step}"
        self._append(self._path(group.step), encode(group, again=again), what=what)

    def append_attempts(self, attempts: Iterable[tuple[int, Group]]) -> None:
        """Write attempts of unfinished groups, with one write per step. Each given group contains a single completion, and
        comes with the completion's index in the whole group."""
        records: dict[int, list[bytes]] = {}
        for place, group in attempts:
            records.setdefault(group.step, []).append(encode(group, attempt=place))
        for step, found in records.items():
            self._append(self._path(step, ATTEMPTS), b"".join(found), what=f"{len(found)} attempts of step {step}")

    def read_attempts(self, step: int) -> dict[int, dict[int, Group]]:
        """Return draw -> index in the group -> the attempt, as a group of one completion. Skips damaged attempts, which will be
        generated again."""
        found: dict[int, dict[int, Group]] = {}
        for payload in _scan_groups(_read_bytes(self._path(step, ATTEMPTS))).payloads:
            try:
                attempt, group = header_of(payload)["attempt"], decode(payload)
            except NOT_A_GROUP:
                continue
            found.setdefault(group.draw, {}).setdefault(attempt, group)
        return found

    def _append(self, path: Path, record: bytes, *, what: str) -> None:
        def write() -> None:
            with self._lock:
                if self._closed:
                    raise JournalError(f"{self.dir}: this journal is closed")
                self._guard()
                self._file(path).append(record)

        persist(write, path=path, what=what, refuse=JournalError)

    def sync(self) -> None:
        """Wait until everything appended so far is on the physical disk. Call this before training on the groups.

        Other threads may append meanwhile, because nothing slow happens while the lock is held.
        """
        self._sync()
        self._guard()

    def _sync(self, only: Path | None = None) -> None:
        with self._syncing, ExitStack() as kept:  # wait for records that another thread is syncing
            with self._lock:
                wanted = [file for path, file in self._files.items() if only in (None, path)]
                flushes = [(file.path, file.begin_sync(kept)) for file in wanted]
            for path, flush in flushes:

                def guarded(flush: Callable[[], None] = flush) -> None:
                    self._guard()
                    flush()

                persist(guarded, path=path, what="the buffered records", refuse=JournalError)

    def read(self, step: int) -> list[Group]:
        """Read the step's groups in draw order. Stops at a torn tail, which the next ``append`` moves aside and reports. Skips and
        reports damage in the middle."""
        path = self._path(step)
        scan = _scan_groups(_read_bytes(path))
        for start, end in scan.damage:
            warn(
                f"journal {path}: bytes {start} to {end} are damaged (wrong checksum) and are skipped; their groups will be "
                "generated again"
            )
        groups: dict[int, Group] = {}
        for payload in scan.payloads:
            try:
                group = decode(payload)
            except NOT_A_GROUP as error:
                warn(
                    f"journal {path}: a record is not a group ({type(error).__name__}: {str(error):.80}) and is skipped; the "
                    "group will be generated again"
                )
                continue
            if group.draw in groups and not header_of(payload).get("scored_again"):
                warn(f"journal {path}: draw {group.draw} is recorded more than once; the first record is used")
                continue
            groups[group.draw] = group
        return [groups[draw] for draw in sorted(groups)]

    def steps(self) -> list[int]:
        """Return the steps that have a file, in ascending order."""
        return [step for step, _ in _step_files(self.dir)]

    def mark_trained(self, step: int, *, draws: Iterable[int], version: int) -> None:
        """Record durably that ``step`` was trained on ``draws``. A replay may only record the same draws again."""
        entry = TrainedStep(step=step, draws=tuple(sorted(int(draw) for draw in draws)), version=version)
        line = json.dumps({"step": step, "draws": entry.draws, "version": version}) + "\n"
        with self._lock:
            if self._ledger is None:
                self._ledger = self._read_trained()
            self._ledger.check(entry)
        self._append(self._trained_path, line.encode(), what=f"the record that step {step} was trained")
        self._sync(self._trained_path)
        with self._lock:
            self._ledger.add(entry)

    def trained(self) -> dict[int, TrainedStep]:
        """Return every step that was trained at any time, and the draws that it was trained on. A replayed step appears once."""
        return self._read_trained().entries

    def _read_trained(self) -> _Ledger:
        """Read the file up to a torn line, which the next ``mark_trained`` moves aside and reports."""
        data = _read_bytes(self._trained_path)
        ledger = _Ledger(self._trained_path)
        for number, line in enumerate(data[: lines_end(data)].splitlines(), start=1):
            row = parse_row(line)
            if row is None or not is_trained_row(row):
                raise JournalError(
                    f"{self._trained_path}, line {number} is not a trained step: {line[:80]!r}; "
                    "restore the file, or delete this line if its step will be trained again"
                )
            ledger.add(TrainedStep(step=row["step"], draws=tuple(row["draws"]), version=row["version"]))
        return ledger

    def close(self) -> None:
        with self._lock:
            self._closed = True  # a write in another thread that is still waiting for the disk must not reopen files
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _trained_path(self) -> Path:
        return self.dir / "trained.jsonl"

    def _path(self, step: int, kind: str = GROUPS) -> Path:
        return self.dir / f"{step:06d}.{kind}"

    def _file(self, path: Path) -> AppendFile:
        if path not in self._files:
            while len(self._files) >= 16:  # open files; a closed one is reopened when it is needed
                oldest = min(self._files)
                self._files[oldest].sync()
                self._files.pop(oldest).close()
            good_end = lines_end if path == self._trained_path else lambda data: _scan_groups(data).good_end
            self._files[path] = AppendFile(path, good_end=good_end)
        return self._files[path]


def _scan_groups(data: bytes) -> _Scan:
    """Find the valid records. Other bytes are damage if a valid record follows them, and otherwise a torn tail."""
    payloads, damage, end = [], [], 0
    for start, payload in records(data):
        if start > end:
            damage.append((end, start))
        payloads.append(payload)
        end = start + HEAD_BYTES + len(payload)
    return _Scan(payloads=payloads, good_end=end, damage=damage)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A step's groups or attempts as they are on disk, without repairs."""

    path: Path
    step: int
    draws: tuple[int, ...]  # of all complete records except those of groups scored again, in order and with repeats
    places: tuple[tuple[int, int], ...]  # of attempts: draw and index in the group, with repeats
    num_bad_bytes: int  # torn or damaged


def inspect(dir: Path, kind: str = GROUPS) -> list[StepFile]:
    """Return the journal's files of this kind in step order, for reports and repairs."""
    found = []
    for step, path in _step_files(dir, kind):
        data = _read_bytes(path)
        payloads = [payload for _, payload in records(data) if draw_of(payload) is not None]
        headers = [header_of(payload) for payload in payloads]
        found.append(
            StepFile(
                path=path,
                step=step,
                draws=tuple(header["draw"] for header in headers if not header.get("scored_again")),
                places=tuple((one["draw"], one["attempt"]) for one in headers if is_count(one.get("attempt"))),
                num_bad_bytes=len(data) - sum(HEAD_BYTES + len(payload) for payload in payloads),
            )
        )
    return found


def whole_records(path: Path) -> bytes:
    """Return a journal file's content without torn or damaged bytes."""
    data = _read_bytes(path)
    kept = ((start, payload) for start, payload in records(data) if draw_of(payload) is not None)
    return b"".join(data[start : start + HEAD_BYTES + len(payload)] for start, payload in kept)


def _step_files(dir: Path, kind: str = GROUPS) -> list[tuple[int, Path]]:
    """Return the files of one kind with their steps, in step order."""
    return sorted((int(path.stem), path) for path in dir.glob(f"*.{kind}") if re.fullmatch(r"\d{6,}", path.stem))


def is_trained_row(row: dict[str, Any]) -> bool:
    """Whether a line of ``trained.jsonl`` is complete."""
    draws = row.get("draws")
    return isinstance(draws, list) and all(map(is_count, [row.get("step"), row.get("version"), *draws]))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise JournalError(
            f"{path} cannot be read: {error.strerror}; check the file's permissions and the disk"
        ) from error
