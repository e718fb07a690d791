"""Finished groups on disk, before anything trains on them: what resume, the rollout and update phases and the viewer
read.

One file per step, ``<step:06d>.groups``, of framed records in the order in which groups finished::

    magic (8 bytes) | payload length (u64) | crc32 of payload (u32) | payload
    payload = header length (u32) | JSON header | prompt ids (i4) | token ids (i4) | log-probs (f4) | masks (u1)

All numbers are little-endian and arrays are raw, so what is read is bit for bit what was sampled. ``append`` hands the
record to the operating system before it returns, so killing the process loses no appended group; ``sync`` makes it
safe against power loss too. ``trained.jsonl`` says which draws each step was trained on.

One process writes; any number may read. Nothing here is ever deleted: a half-written tail is moved to ``torn/``.
A write that a full or unwritable disk refuses waits and is tried again (``durable/patience.py``), with the lock free meanwhile, so
that other threads' writes wait for themselves only.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from rollcall.durable.append_file import AppendFile, is_count, lines_end, parse_row
from rollcall.durable.lease import unguarded
from rollcall.durable.patience import persist
from rollcall.errors import JournalError
from rollcall.types import Completion, FinishReason, Group, Prompt, Score, Segment

log = logging.getLogger(__name__)

# Bytes above 0x7f cannot occur in the ASCII header, which makes a false match while resynchronising unlikely; the
# checksum makes it harmless.
MAGIC = b"\x93RCGRP\x01\x9a"
_HEAD = struct.Struct("<8sQI")
_HEADER_LENGTH = struct.Struct("<I")
_STEP_FILE = re.compile(r"(\d{6,})\.groups")
_MAX_OPEN = 8  # steps that rollout fills at the same time; older files are closed and reopened on need


# What reading a record raises whose bytes are as they were written, but not by this program.
_NO_GROUP = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RecursionError,
    struct.error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The fact that a step was trained, and on what."""

    step: int
    draws: tuple[int, ...]  # ascending
    version: int  # weight version that the step produced


class _Ledger:
    """Trained steps so far; refuses what would train a draw twice or replay a step differently."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[int, TrainedStep] = {}
        self._step_of: dict[int, int] = {}  # draw -> step

    def check(self, entry: TrainedStep) -> None:
        before = self.entries.get(entry.step)
        if before is not None and before != entry:
            raise JournalError(
                f"{self.path}: step {entry.step} was trained on draws {list(before.draws)} (version {before.version}) "
                f"and is now said to be trained on {list(entry.draws)} (version {entry.version}); a replay must "
                "repeat the step: resume with the run file the run was started with, or start a new run directory"
            )
        if len(set(entry.draws)) < len(entry.draws):
            raise JournalError(f"{self.path}: step {entry.step} lists a draw twice: {list(entry.draws)}")
        for draw in entry.draws:
            if self._step_of.get(draw, entry.step) != entry.step:
                raise JournalError(
                    f"{self.path}: draw {draw} was trained in step {self._step_of[draw]} and is now in step "
                    f"{entry.step}; no prompt may be trained twice: start a new run directory"
                )

    def add(self, entry: TrainedStep) -> None:
        self.check(entry)
        self.entries[entry.step] = entry
        self._step_of.update(dict.fromkeys(entry.draws, entry.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    payloads: list[memoryview]
    good_end: int  # where the next record goes
    damage: list[tuple[int, int]]  # [start, end) of bytes in the middle that are no valid record
    torn: bool  # bytes after good_end are no valid record


class Journal:
    """``guard`` is called before anything is written, and raises where this process may no longer write."""

    def __init__(self, dir: Path, *, guard: Callable[[], None] = unguarded) -> None:
        self.dir = Path(dir)
        self._guard = guard
        self._closed = False
        self._files: dict[int, AppendFile] = {}
        self._trained_file: AppendFile | None = None
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
        """Write a finished group; when this returns, the group outlives the process. ``again``: it is there already, and
        only its scores are new; from now on this record counts."""
        payload = _encode(group, again=again)
        record = b"".join((_HEAD.pack(MAGIC, _total(payload), _crc(payload)), *payload))

        def write() -> None:
            with self._lock:
                self._check_mine()
                self._file(group.step).append(record)

        what = f"the group of draw {group.draw}, step {group.step}"
        persist(write, path=self._path(group.step), what=what, refuse=JournalError)

    def sync(self) -> None:
        """Wait until everything appended so far is on the disk itself. Call it before training on it.

        Another thread may append meanwhile: only what takes no time happens under the lock.
        """
        self._sync(lambda: [*self._files.values(), self._trained_file])
        self._guard()

    def _sync(self, pick: Callable[[], Iterable[AppendFile | None]]) -> None:
        with self._syncing, ExitStack() as kept:  # what another thread is about to have on the disk is not there yet
            with self._lock:
                flushes = [(file.path, file.begin_sync(kept)) for file in pick() if file is not None]
            for path, flush in flushes:
                persist(self._guarded(flush), path=path, what="buffered records to the disk", refuse=JournalError)

    def _guarded(self, write: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            self._guard()
            write()

        return guarded

    def read(self, step: int) -> list[Group]:
        """The step's groups in order of draw; empty if there are none. Damage is reported and skipped."""
        path = self._path(step)
        scan = _scan_groups(_read_bytes(path))
        for start, end in scan.damage:
            log.warning(
                "journal %s: bytes %d to %d are damaged (checksum) and skipped; their groups are generated again",
                path, start, end,
            )  # fmt: skip
        if scan.torn:
            log.warning(
                "journal %s: torn record at offset %d, left by a process killed while writing; reading stops there",
                path, scan.good_end,
            )  # fmt: skip
        groups: dict[int, Group] = {}
        for payload in scan.payloads:
            try:
                group = _decode(payload)
            except _NO_GROUP as error:
                log.warning(
                    "journal %s: a record is no group (%s: %.80s) and is skipped; it is generated again",
                    path, type(error).__name__, error,
                )  # fmt: skip
                continue
            if group.draw in groups and not _header(payload).get("scored_again"):
                log.warning(
                    "journal %s: draw %d is recorded more than once; the first record is used", path, group.draw
                )
                continue
            groups[group.draw] = group
        return [groups[draw] for draw in sorted(groups)]

    def steps(self) -> list[int]:
        """Steps that have a file, ascending."""
        matches = (_STEP_FILE.fullmatch(entry.name) for entry in self.dir.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def mark_trained(self, step: int, *, draws: Iterable[int], version: int) -> None:
        """Record durably that ``step`` was trained on ``draws``. A replay may say the same again, nothing else."""
        entry = TrainedStep(step=step, draws=tuple(sorted(int(draw) for draw in draws)), version=version)
        line = json.dumps({"step": step, "draws": entry.draws, "version": version}) + "\n"
        with self._lock:
            if self._ledger is None:
                self._ledger = self._read_trained()
            self._ledger.check(entry)
        persist(
            lambda: self._append_trained(line.encode()),
            path=self._trained_path,
            what=f"that step {step} was trained",
            refuse=JournalError,
        )
        self._sync(lambda: [self._trained_file])
        with self._lock:
            self._ledger.add(entry)

    def _append_trained(self, line: bytes) -> None:
        with self._lock:
            self._check_mine()
            if self._trained_file is None:
                self._trained_file = AppendFile(self._trained_path, good_end=lines_end)
            self._trained_file.append(line)

    def trained(self) -> dict[int, TrainedStep]:
        """Step -> what it was trained on, for every step ever trained, replays counted once."""
        return self._read_trained().entries

    def _read_trained(self) -> _Ledger:
        data = _read_bytes(self._trained_path)
        end = lines_end(data)
        if end < len(data):
            log.warning("journal %s: torn line at offset %d; reading stops there", self._trained_path, end)
        ledger = _Ledger(self._trained_path)
        for number, line in enumerate(data[:end].splitlines(), start=1):
            row = parse_row(line)
            if row is None or not is_trained_row(row):
                raise JournalError(
                    f"{self._trained_path}, line {number} is not a trained step: {line[:80]!r}; "
                    "restore the file, or remove that line if the step it stood for is trained again"
                )
            ledger.add(TrainedStep(step=row["step"], draws=tuple(row["draws"]), version=row["version"]))
        return ledger

    def close(self) -> None:
        with self._lock:
            self._closed = True  # a write that still waits for the disk in another thread must not open files again
            for file in (*self._files.values(), self._trained_file):
                if file is not None:
                    file.close()
            self._files.clear()
            self._trained_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_mine(self) -> None:
        if self._closed:
            raise JournalError(f"{self.dir}: this journal is closed")
        self._guard()

    @property
    def _trained_path(self) -> Path:
        return self.dir / "trained.jsonl"

    def _path(self, step: int) -> Path:
        return self.dir / f"{step:06d}.groups"

    def _file(self, step: int) -> AppendFile:
        if step not in self._files:
            while len(self._files) >= _MAX_OPEN:
                oldest = min(self._files)
                self._files[oldest].sync()
                self._files.pop(oldest).close()
            self._files[step] = AppendFile(self._path(step), good_end=lambda data: _scan_groups(data).good_end)
        return self._files[step]


def _encode(group: Group, *, again: bool = False) -> list[bytes]:
    completions = group.completions
    header = {
        "step": int(group.step),
        "draw": int(group.draw),
        "started_s": float(group.started_s),
        "finished_s": float(group.finished_s),
        "worker": group.worker,
        "prompt": {
            "id": group.prompt.id,
            "text": group.prompt.text,
            "answer": group.prompt.answer,
            "metadata": group.prompt.metadata,
            "num_tokens": len(group.prompt.token_ids),
        },
        "completions": [
            {
                "num_tokens": len(completion.token_ids),
                "segments": [[int(segment.version), int(segment.num_tokens)] for segment in completion.segments],
                "finish": completion.finish.value,
                "seed": int(completion.seed),
                "text": completion.text,
            }
            for completion in completions
        ],
        # repr of a float64 reads back as the same float64, so JSON keeps scores exact.
        "scores": [
            {
                "value": float(score.value),
                "parts": {name: float(part) for name, part in score.parts.items()},
                "errors": score.errors,
            }
            for score in group.scores
        ],
        **({"scored_again": True} if again else {}),
    }
    try:
        text = json.dumps(header, separators=(",", ":"), default=_plain).encode("ascii")
    except (TypeError, ValueError) as error:
        raise JournalError(
            f"prompt {group.prompt.id!r} cannot be journaled: {error}; keep only text, numbers, lists and maps in its "
            f"columns (it has {', '.join(map(repr, group.prompt.metadata)) or 'no metadata'})"
        ) from None
    return [
        _HEADER_LENGTH.pack(len(text)),
        text,
        _raw([group.prompt.token_ids], np.int32, "<i4"),
        _raw([completion.token_ids for completion in completions], np.int32, "<i4"),
        _raw([completion.logprobs for completion in completions], np.float32, "<f4"),
        _raw([completion.mask for completion in completions], np.bool_, "|b1"),
    ]


def _plain(value: Any) -> Any:
    """Columns of a Parquet row are often numpy."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _raw(arrays: Sequence[np.ndarray], dtype: type, stored: str) -> bytes:
    for array in arrays:
        assert array.dtype == dtype, f"expected {np.dtype(dtype)}, not {array.dtype}: a cast here could change values"
    return np.concatenate(arrays).astype(stored, copy=False).tobytes() if arrays else b""


def _decode(payload: memoryview) -> Group:
    (length,) = _HEADER_LENGTH.unpack_from(payload)
    start, header = _HEADER_LENGTH.size, _header(payload)
    prompt, rows = header["prompt"], header["completions"]
    counts = [row["num_tokens"] for row in rows]
    arrays, offset = [], start + length
    total = sum(counts)
    for stored, native, count in (
        ("<i4", np.int32, prompt["num_tokens"]), ("<i4", np.int32, total), ("<f4", np.float32, total),
        ("|b1", np.bool_, total),
    ):  # fmt: skip
        # A copy, because a view of the file's bytes would be read-only and keep the whole file alive.
        arrays.append(np.frombuffer(payload, dtype=stored, count=count, offset=offset).astype(native))
        offset += arrays[-1].nbytes
    assert offset == len(payload), "record and header differ in length"
    cuts = np.cumsum(counts)[:-1]
    prompt_ids, (ids, logprobs, masks) = arrays[0], (np.split(array, cuts) for array in arrays[1:])
    return Group(
        step=header["step"],
        draw=header["draw"],
        prompt=Prompt(
            id=prompt["id"],
            token_ids=prompt_ids,
            text=prompt["text"],
            answer=prompt["answer"],
            metadata=prompt["metadata"],
        ),
        completions=tuple(
            Completion(
                token_ids=ids[index],
                logprobs=logprobs[index],
                mask=masks[index],
                segments=tuple(Segment(version=version, num_tokens=count) for version, count in row["segments"]),
                finish=FinishReason(row["finish"]),
                seed=row["seed"],
                text=row["text"],
            )
            for index, row in enumerate(rows)
        ),
        scores=tuple(Score(**score) for score in header["scores"]),
        started_s=header["started_s"],
        finished_s=header["finished_s"],
        worker=header["worker"],
    )


def _scan_groups(data: bytes) -> _Scan:
    """Find the valid records. Bytes that are none are damage if a valid record follows, else a torn tail."""
    payloads, damage, end = [], [], 0
    for start, payload in _records(data):
        if start > end:
            damage.append((end, start))
        payloads.append(payload)
        end = start + _HEAD.size + len(payload)
    return _Scan(payloads=payloads, good_end=end, damage=damage, torn=end < len(data))


def _records(data: bytes) -> Iterator[tuple[int, memoryview]]:
    view, start = memoryview(data), 0
    while 0 <= start <= len(data) - _HEAD.size:
        magic, length, crc = _HEAD.unpack_from(data, start)
        payload = view[start + _HEAD.size : start + _HEAD.size + length]
        if magic == MAGIC and len(payload) == length and zlib.crc32(payload) == crc:
            yield start, payload
            start += _HEAD.size + length
        else:
            start = data.find(MAGIC, start + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A step's file as it lies on the disk, with nothing put right."""

    path: Path
    step: int
    draws: tuple[int, ...]  # of all whole records, in order, repeats included, but for groups that were scored again
    whole: bytes  # the whole records alone
    num_bad_bytes: int  # torn or damaged


def inspect(dir: Path) -> list[StepFile]:
    """The journal's files in order of step; for reports and repairs."""
    found = []
    for path in sorted(dir.iterdir()) if dir.is_dir() else []:
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            data = _read_bytes(path)
            read = [(start, payload, _draw_of(payload)) for start, payload in _records(data)]
            records = [(start, payload, draw) for start, payload, draw in read if draw is not None]
            whole = b"".join(data[start : start + _HEAD.size + len(payload)] for start, payload, _ in records)
            found.append(
                StepFile(
                    path=path,
                    step=int(match.group(1)),
                    draws=tuple(draw for _, payload, draw in records if not _header(payload).get("scored_again")),
                    whole=whole,
                    num_bad_bytes=len(data) - len(whole),
                )
            )
    return sorted(found, key=lambda file: file.step)


def is_trained_row(row: dict[str, Any]) -> bool:
    """Whether a line of ``trained.jsonl`` says what it has to."""
    draws = row.get("draws")
    return (
        is_count(row.get("step"))
        and is_count(row.get("version"))
        and isinstance(draws, list)
        and all(map(is_count, draws))
    )


def _draw_of(payload: memoryview) -> int | None:
    """None: the record is no group's, whatever its checksum says."""
    try:
        draw = _header(payload)["draw"]
    except _NO_GROUP:
        return None
    return draw if is_count(draw) else None


def _header(payload: memoryview) -> dict[str, Any]:
    (length,) = _HEADER_LENGTH.unpack_from(payload)
    return json.loads(bytes(payload[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length]))


def _total(parts: list[bytes]) -> int:
    return sum(len(part) for part in parts)


def _crc(parts: list[bytes]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise JournalError(
            f"{path} cannot be read: {error.strerror}; check the file's permissions and the disk"
        ) from error
