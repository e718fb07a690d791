"""Groups of a journal for the page: one as a whole, and the search through all of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollcall.algo.shaping import group_advantages
from rollcall.config import Config, GroupAlgorithm
from rollcall.durable.append_file import parse_row
from rollcall.durable.group_record import NOT_A_GROUP, decode, stream_records
from rollcall.durable.journal import is_trained_row
from rollcall.observe.transcript import said_in, said_in_row
from rollcall.redact import redact
from rollcall.types import Completion, Floats, Group
from rollcall.view.journal_index import FOLDER, GroupRow, JournalIndex
from rollcall.view.tail import FileTail

SHORT = 280  # characters of a text in a list
LONG = 20_000  # characters of a text in a group


class NoGroupError(LookupError):
    """The journal does not hold this group."""


def read_group(root: Path, index: JournalIndex, *, step: int, draw: int) -> Group:
    """From the table where it is there, else from the step's file: a fresh group is shown before it is indexed."""
    row = index.get(step=step, draw=draw)
    if row is not None:
        for group in _groups_in(root, row.file, start=row.start, most=1):
            if (group.step, group.draw) == (step, draw):
                return group
    for group in _groups_in(root, f"{step:06d}.groups"):
        if group.draw == draw:
            return group
    raise NoGroupError(f"step {step} has no group of draw {draw} in the journal")


def _groups_in(root: Path, name: str, *, start: int = 0, most: int | None = None) -> Iterator[Group]:
    try:
        with (root / FOLDER / name).open("rb") as file:
            end = file.seek(0, 2)
            for number, (_, payload) in enumerate(stream_records(file, start=start, end=end), start=1):
                try:
                    yield decode(payload)
                except NOT_A_GROUP:
                    pass  # a record of another program is passed over, as the journal itself does
                if number == most:
                    return
    except OSError:
        return


def summary_of(row: GroupRow, *, text: str) -> dict[str, Any]:
    return {**asdict(row), "text": text}


def preview(root: Path, row: GroupRow) -> str:
    """How the prompt of a group ends: chat templates begin all alike."""
    data = _header_bytes(root, row)
    try:
        return "" if data is None else _asked(json.loads(data))[-SHORT:]
    except NOT_A_GROUP:
        return ""


def _asked(header: dict[str, Any]) -> str:
    """What the user says, without the chat template around it; where the prompt is empty, what the environment says first."""
    prompt = header["prompt"]
    messages = prompt["metadata"].get("prompt_messages") or ()
    said = [message["content"] for message in messages if message["role"] == "user"]
    openings = (episode.get("opening", "") for row in header["completions"] if (episode := row.get("episode")))
    return str(said[-1] if said else prompt["text"] or next(openings, ""))


def _header_bytes(root: Path, row: GroupRow) -> bytes | None:
    try:
        with (root / FOLDER / row.file).open("rb") as file:
            file.seek(row.header)
            return file.read(row.header_bytes)
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    rows: list[dict[str, Any]]
    cursor: tuple[int, int] | None  # the last group that was looked at; None: all were
    looked_at: int


def search(
    root: Path,
    index: JournalIndex,
    needle: str,
    *,
    only: str | None = None,
    after: tuple[int, int] | None = None,
    limit: int = 50,
    seconds: float = 0.8,
) -> SearchPage:
    """Groups whose prompt, answer, completions or notes hold the text, in any case, the newest first. It stops after ``limit`` of them
    or ``seconds``; ``after`` goes on from there."""
    at, looked_at, rows = after or (1 << 60, 0), 0, []
    until, wanted = time.monotonic() + seconds, needle.casefold()
    # The header is ASCII with escapes, so plain text is found in its bytes without reading it as JSON.
    raw = json.dumps(needle)[1:-1].lower().encode() if needle.isascii() else None
    while piece := index.before(step=at[0], draw=at[1], only=only, limit=500):
        for row in piece:
            at, looked_at = (row.step, row.draw), looked_at + 1
            if (hit := _hit(root, row, wanted, raw)) is not None:
                rows.append(summary_of(row, text=hit))
            if len(rows) >= limit or time.monotonic() > until:
                return SearchPage(rows=rows, cursor=at, looked_at=looked_at)
    return SearchPage(rows=rows, cursor=None, looked_at=looked_at)


def _hit(root: Path, row: GroupRow, wanted: str, raw: bytes | None) -> str | None:
    """The text around the first place where a group holds it; None: it does not."""
    data = _header_bytes(root, row)
    if data is None or (raw is not None and raw not in data.lower()):
        return None
    try:
        header = json.loads(data)
        prompt = header["prompt"]
        texts = [prompt["id"], _asked(header), prompt["text"], prompt["answer"]]
        texts += [completion["text"] for completion in header["completions"]]
        episodes = [completion["episode"] for completion in header["completions"] if completion.get("episode")]
        texts += [text for episode in episodes for _, text in said_in_row(episode)]
        texts += [note for score in header["scores"] for note in score.get("notes", {}).values()]
        for text in map(str, texts):
            if (place := text.casefold().find(wanted)) >= 0:
                return text[max(place - SHORT // 3, 0) : place + SHORT]
    except NOT_A_GROUP:
        return None
    return None


def show_group(group: Group, *, config: Config | None, trained_in: int | None) -> dict[str, Any]:
    """A group as JSON; long texts are cut, and ``said_of`` has the whole."""
    advantages = advantages_of(group, config)
    prompt, asked = group.prompt, _prompt_text(group)
    own = (one.prompt_ids(prompt.token_ids) for one in group.completions if not prompt.text)
    return {
        "step": group.step,
        "draw": group.draw,
        "trained_in": trained_in,
        "worker": group.worker,
        "started_s": group.started_s,
        "finished_s": group.finished_s,
        "prompt": {
            "id": prompt.id,
            "said": _cut([("", asked)]),
            "length": len(asked),
            "answer": prompt.answer[:LONG],
            "tokens": len(next(own, prompt.token_ids)),
            "metadata": _brief(prompt.metadata),
        },
        "completions": [
            _show_completion(completion, number=number, group=group)
            | {"advantage": None if advantages is None else float(advantages[number])}
            for number, completion in enumerate(group.completions)
        ],
        "advantages": "" if advantages is not None else _no_advantages(config),
    }


def advantages_of(group: Group, config: Config | None) -> Floats | None:
    """One for each completion; None: they depend on more than the group, or the run file cannot be read."""
    if config is None:
        return None
    most = config.rollout.max_response_tokens
    return group_advantages(group, config.algorithm, max_response_tokens=most, environment=config.environment)


def _no_advantages(config: Config | None) -> str:
    if config is None:
        return "the run file cannot be read, so the algorithm is not known"
    if isinstance(config.algorithm, GroupAlgorithm) and config.algorithm.advantage == "turn":
        return "with advantage: turn each turn of an attempt has an advantage of its own, and they are not stored"
    return f"with {config.algorithm.name} and these settings an advantage depends on more than the group, and is not stored"


def _show_completion(completion: Completion, *, number: int, group: Group) -> dict[str, Any]:
    score = group.scores[number]
    chosen = completion.logprobs[completion.mask]
    said = said_of(group, completion=number)
    return {
        "said": _cut(said),
        "length": sum(len(text) for _, text in said),
        "tokens": len(completion.token_ids),
        "finish": completion.finish.value,
        "reward": score.value,
        "parts": score.parts,
        "errors": {name: redact(str(why)[:8000])[:2000] for name, why in score.errors.items()},
        "notes": {name: redact(str(note)[:LONG]) for name, note in score.notes.items()},
        "logprob": float(chosen.mean()) if len(chosen) else None,
        "versions": sorted({segment.version for segment in completion.segments}),
        "masked": int(np.count_nonzero(~completion.mask)),
    }


def said_of(group: Group, *, completion: int | None) -> list[tuple[str, str]]:
    """Who said what in a completion, without what stands in the prompt's place; or the prompt, said by nobody."""
    asked = _prompt_text(group)
    if completion is None:
        return [("", asked)]
    if not 0 <= completion < len(group.completions):
        raise NoGroupError(f"the group has {len(group.completions)} completions, and no number {completion}")
    said = said_in(group.completions[completion])
    return said[1:] if not group.prompt.text and said[0] == ("environment", asked) else said


def _prompt_text(group: Group) -> str:
    """Where the prompt is empty, what the environment says first, if that is the same in all attempts."""
    openings = {one.episode.opening for one in group.completions if one.episode is not None}
    return group.prompt.text or (openings.pop() if len(openings) == 1 else "")


def _cut(said: list[tuple[str, str]]) -> list[tuple[str, str]]:
    shown, left = [], LONG
    for who, text in said:
        if left > 0:
            shown.append((who, text[:left]))
        left -= len(text)
    return shown


def _brief(metadata: dict[str, Any]) -> dict[str, str]:
    """The row's other columns, each as a short text; the messages are the prompt again."""
    kept = {name: value for name, value in metadata.items() if name not in ("prompt_messages", "prompt_text")}
    return {str(name)[:100]: json.dumps(value)[:1000] for name, value in list(kept.items())[:30]}


class TrainedDraws:
    """Which step trained on which draw: ``journal/trained.jsonl``, read where it has grown."""

    def __init__(self, root: Path, *, read_s: float) -> None:
        self._file = FileTail(root / FOLDER / "trained.jsonl", read_s=read_s)
        self._lock = threading.Lock()
        self._step_of: dict[int, int] = {}

    def step_of(self, draw: int) -> int | None:
        """None: no step has trained on it yet."""
        with self._lock:
            for again, lines in self._file.pieces():
                if again:
                    self._step_of = {}
                for row in map(parse_row, lines):
                    if row is not None and is_trained_row(row):
                        self._step_of.update(dict.fromkeys(row["draws"], row["step"]))
            return self._step_of.get(draw)
