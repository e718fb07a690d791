"""Encodes a finished group as one record, and finds the records in a file.

::

    magic (8 bytes) | payload length (u64) | crc32 of payload (u32) | payload
    payload = header length (u32) | JSON header | prompt ids (i4) | token ids (i4) | log-probs (f4) | masks (u1)
              for episodes also: prompts of the episodes and their branches (i4) | branches: token ids, log-probs, masks

All numbers are little-endian, and arrays are raw, so a reader gets exactly the sampled values.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from rollcall.base.append_file import is_count
from rollcall.base.errors import JournalError
from rollcall.base.types import (
    Branch,
    Completion,
    EndReason,
    Episode,
    FinishReason,
    Group,
    Ints,
    Prompt,
    Score,
    Segment,
    ToolCall,
    Turn,
)

# The ASCII header cannot contain bytes above 0x7f, so a false match during a resynchronisation is unlikely. The checksum makes it
# harmless.
MAGIC = b"\x93RCGRP\x01\x9a"
_HEAD = struct.Struct("<8sQI")
HEAD_BYTES = _HEAD.size
_HEADER_LENGTH = struct.Struct("<I")
LARGEST_RECORD = 1 << 30  # in bytes; a corrupt length must not fill a reader's memory

# Errors that can occur when reading an intact record that another program wrote.
NOT_A_GROUP = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RecursionError,
    struct.error,
)


# Fields stored in the header under their own names.
_OF_GROUP = ("step", "draw", "started_s", "finished_s", "worker")
_OF_PROMPT = ("id", "text", "answer", "metadata")
_OF_EPISODE = ("reward", "metrics", "ended", "error", "opening", "attributes")


def encode(group: Group, *, again: bool = False, attempt: int | None = None) -> bytes:
    """Encode one record. ``again``: the group already has a record, and only its scores are new. ``attempt``: the group contains
    only one completion, and this is its index in the whole group."""
    completions = group.completions
    episodes = [one.episode for one in completions if one.episode is not None]
    header = {
        **_plain_fields(group, _OF_GROUP),
        "prompt": {**_plain_fields(group.prompt, _OF_PROMPT), "num_tokens": len(group.prompt.token_ids)},
        "completions": [
            {
                "num_tokens": len(one.token_ids),
                "segments": _segments(one),
                **_plain_fields(one, ("finish", "seed", "text")),
                **({"episode": _episode_header(one.episode)} if one.episode is not None else {}),
            }
            for one in completions
        ],
        # The repr of a float64 parses back to the same float64, so scores stay exact in JSON.
        "scores": [_plain_fields(score, ("value", "parts", "errors", "notes", "is_given")) for score in group.scores],
        **({"scored_again": True} if again else {}),
        **({"attempt": attempt} if attempt is not None else {}),
    }
    try:
        text = json.dumps(header, separators=(",", ":"), default=_plain).encode("ascii")
    except (TypeError, ValueError) as error:
        raise JournalError(
            f"prompt {group.prompt.id!r} cannot be journaled: {error}; keep only text, numbers, lists and maps in its "
            f"columns (its metadata columns: {', '.join(map(repr, group.prompt.metadata)) or 'none'})"
        ) from None
    payload = [
        _HEADER_LENGTH.pack(len(text)),
        text,
        _raw([group.prompt.token_ids], np.int32, "<i4"),
        *_rows(completions),
        _raw([ids for episode in episodes for ids in _prompts(episode)], np.int32, "<i4"),
        *_rows([row for episode in episodes for row in episode.branches]),
    ]
    crc = 0
    for part in payload:
        crc = zlib.crc32(part, crc)
    return b"".join((_HEAD.pack(MAGIC, sum(map(len, payload)), crc), *payload))


def _plain_fields(source: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _segments(row: Completion | Branch) -> list[list[int]]:
    return [[segment.version, segment.num_tokens] for segment in row.segments]


def _episode_header(episode: Episode) -> dict[str, Any]:
    """Return everything in the episode except the arrays."""
    return {
        "num_prompt_tokens": None if episode.prompt_ids is None else len(episode.prompt_ids),
        "turns": [asdict(turn) for turn in episode.turns],
        "branches": [
            {"num_prompt_tokens": len(row.prompt_ids), "num_tokens": len(row.token_ids), "segments": _segments(row)}
            for row in episode.branches
        ],
        **_plain_fields(episode, _OF_EPISODE),
    }


def _prompts(episode: Episode) -> list[Ints]:
    """Return the episode's own prompt, if it has one, and the prompts of its branches."""
    own = [] if episode.prompt_ids is None else [episode.prompt_ids]
    return [*own, *(row.prompt_ids for row in episode.branches)]


def _plain(value: Any) -> Any:
    """Convert numpy values, which are common in Parquet rows."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _rows(rows: Sequence[Completion | Branch]) -> list[bytes]:
    return [
        _raw([row.token_ids for row in rows], np.int32, "<i4"),
        _raw([row.logprobs for row in rows], np.float32, "<f4"),
        _raw([row.mask for row in rows], np.bool_, "|b1"),
    ]


def _raw(arrays: Sequence[np.ndarray], dtype: type, stored: str) -> bytes:
    for array in arrays:
        assert array.dtype == dtype, f"expected {np.dtype(dtype)}, not {array.dtype}: a cast here could change values"
    return np.concatenate(arrays).astype(stored, copy=False).tobytes() if arrays else b""


class _Arrays:
    """Reads a payload's raw arrays in order."""

    def __init__(self, payload: memoryview, start: int) -> None:
        self._payload, self._offset = payload, start

    def take(self, counts: Sequence[int], dtype: Any, stored: str) -> list[np.ndarray]:
        """Read consecutive arrays with these numbers of entries."""
        # A copy, because a view of the file's bytes would be read-only and keep all of them in memory.
        found = np.frombuffer(self._payload, dtype=stored, count=sum(counts), offset=self._offset).astype(dtype)
        self._offset += found.nbytes
        return np.split(found, np.cumsum(counts)[:-1]) if counts else []

    def rows(self, headers: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """For each header, read the fields that completions and branches have in common."""
        counts = [row["num_tokens"] for row in headers]
        ids, logprobs = self.take(counts, np.int32, "<i4"), self.take(counts, np.float32, "<f4")
        masks = self.take(counts, np.bool_, "|b1")
        for row, own, logprob, mask in zip(headers, ids, logprobs, masks, strict=True):
            segments = tuple(Segment(version=version, num_tokens=count) for version, count in row["segments"])
            yield {"token_ids": own, "logprobs": logprob, "mask": mask, "segments": segments}

    def end(self) -> None:
        assert self._offset == len(self._payload), "record and header differ in length"


def decode(payload: memoryview) -> Group:
    header = header_of(payload)
    prompt, rows = header["prompt"], header["completions"]
    arrays = _Arrays(payload, sum(header_span(payload)))
    (prompt_ids,) = arrays.take([prompt["num_tokens"]], np.int32, "<i4")
    sampled = list(arrays.rows(rows))
    episodes = _episodes([row.get("episode") for row in rows], arrays)
    arrays.end()
    return Group(
        **{name: header[name] for name in _OF_GROUP},
        prompt=Prompt(token_ids=prompt_ids, **{name: prompt[name] for name in _OF_PROMPT}),
        completions=tuple(
            Completion(**own, finish=FinishReason(row["finish"]), seed=row["seed"], text=row["text"], episode=episode)
            for row, own, episode in zip(rows, sampled, episodes, strict=True)
        ),
        scores=tuple(Score(**score) for score in header["scores"]),
    )


def _episodes(headers: Sequence[dict[str, Any] | None], arrays: _Arrays) -> list[Episode | None]:
    """Read the episode of each completion; None for a completion without one."""
    there = [one for one in headers if one is not None]
    counts = [row["num_prompt_tokens"] for one in there for row in (one, *one["branches"])]
    prompts = iter(arrays.take([count for count in counts if count is not None], np.int32, "<i4"))
    rows = arrays.rows([row for one in there for row in one["branches"]])

    def episode(one: dict[str, Any]) -> Episode:
        return Episode(
            prompt_ids=None if one["num_prompt_tokens"] is None else next(prompts),
            turns=tuple(
                Turn(**{**turn, "calls": tuple(ToolCall(**call) for call in turn["calls"])}) for turn in one["turns"]
            ),
            branches=tuple(Branch(prompt_ids=next(prompts), **next(rows)) for _ in one["branches"]),
            **{**{name: one[name] for name in _OF_EPISODE}, "ended": EndReason(one["ended"])},
        )

    return [None if one is None else episode(one) for one in headers]


def records(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield each valid record's offset and payload. Other bytes are skipped."""
    return stream_records(io.BytesIO(data), end=len(data))


def stream_records(file: BinaryIO, *, start: int = 0, end: int) -> Iterator[tuple[int, memoryview]]:
    """Like ``records``, but for the bytes from ``start`` to ``end`` of a file. Keeps only one record in memory at a time, because a
    step with long completions can take gigabytes."""
    while start + HEAD_BYTES <= end:
        file.seek(start)
        magic, length, crc = _HEAD.unpack(file.read(HEAD_BYTES))
        is_record = magic == MAGIC and length <= LARGEST_RECORD and start + HEAD_BYTES + length <= end
        payload = file.read(length) if is_record else b""
        if payload and zlib.crc32(payload) == crc:
            yield start, memoryview(payload)
            start += HEAD_BYTES + length
            continue
        found = _next_magic(file, start=start + 1, end=end)
        if found is None:
            return
        start = found


def _next_magic(file: BinaryIO, *, start: int, end: int) -> int | None:
    file.seek(start)
    kept, at = b"", start
    while at < end and (piece := file.read(min(1 << 20, end - at))):
        data = kept + piece
        if (found := data.find(MAGIC)) >= 0:
            return at - len(kept) + found
        at += len(piece)
        kept = data[-(len(MAGIC) - 1) :]
    return None


def draw_of(payload: memoryview) -> int | None:
    """Return a record's draw, or None if the record is not a group even though its checksum is correct."""
    try:
        draw = header_of(payload)["draw"]
    except NOT_A_GROUP:
        return None
    return draw if is_count(draw) else None


def header_span(payload: memoryview) -> tuple[int, int]:
    """Return the offset of the JSON header in the payload, and its length."""
    (length,) = _HEADER_LENGTH.unpack_from(payload)
    return _HEADER_LENGTH.size, length


def header_of(payload: memoryview) -> dict[str, Any]:
    start, length = header_span(payload)
    return json.loads(bytes(payload[start : start + length]))
