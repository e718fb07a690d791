"""Prepares samples for the page: groups in the journal, a search over them, single completions token by token, and the held-out
completions that each evaluation writes to ``samples/val-STEP.jsonl``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollcall.algo.shaping import group_advantages
from rollcall.base.append_file import parse_row
from rollcall.base.group_record import NOT_A_GROUP, decode, stream_records
from rollcall.base.redact import redact
from rollcall.base.types import Completion, Floats, Group
from rollcall.config import Config, GroupAlgorithm
from rollcall.observe.samples import TOKEN_SCORES, asked, file_name, said_in, said_in_row, scores_in
from rollcall.view.curves import short
from rollcall.view.growing import TrainedDraws
from rollcall.view.journal_index import FOLDER, GroupRow, JournalIndex

SHORT = 280  # characters of each text in a list
LONG = 20_000  # characters of each text in a group


class NoGroupError(LookupError):
    """The journal does not contain this group."""


# Groups in a list


def preview(root: Path, row: GroupRow) -> str:
    """Return the end of a group's prompt, because prompts with the same chat template start with the same text."""
    data = _header_bytes(root, row)
    try:
        return "" if data is None else _asked(json.loads(data))[-SHORT:]
    except NOT_A_GROUP:
        return ""


def _asked(header: dict[str, Any]) -> str:
    """Return the user's message without the chat template. If the prompt is empty, return the environment's first message."""
    prompt = header["prompt"]
    openings = (episode.get("opening", "") for row in header["completions"] if (episode := row.get("episode")))
    return asked(prompt["text"], prompt["metadata"]) or next(openings, "")


def _header_bytes(root: Path, row: GroupRow) -> bytes | None:
    try:
        with (root / FOLDER / row.file).open("rb") as file:
            file.seek(row.header)
            return file.read(row.header_bytes)
    except OSError:
        return None


class SearchPage(NamedTuple):
    rows: list[dict[str, Any]]
    cursor: tuple[int, int] | None  # the last group that was searched; None if all were
    looked_at: int


def search(
    root: Path, index: JournalIndex, needle: str, *, only: str | None, after: tuple[int, int], limit: int
) -> SearchPage:
    """Find groups whose prompt, answer, completions or notes contain the text, ignoring case, newest first. Stops after ``limit``
    matches or 0.8 s; pass the returned cursor as ``after`` to continue."""
    at, looked_at, rows = after, 0, []
    until, wanted = time.monotonic() + 0.8, needle.casefold()
    # The header is ASCII with escapes, so ASCII text can be found in its bytes without parsing JSON.
    raw = json.dumps(needle)[1:-1].lower().encode() if needle.isascii() else None
    while piece := index.before(step=at[0], draw=at[1], only=only, limit=500):
        for row in piece:
            at, looked_at = (row.step, row.draw), looked_at + 1
            if (hit := _hit(root, row, wanted, raw)) is not None:
                rows.append({**row._asdict(), "text": hit})
            if len(rows) >= limit or time.monotonic() > until:
                return SearchPage(rows, at, looked_at)
    return SearchPage(rows, None, looked_at)


def _hit(root: Path, row: GroupRow, wanted: str, raw: bytes | None) -> str | None:
    """Return the text around the first match in a group, or None if there is no match."""
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


# One group


def read_group(root: Path, index: JournalIndex, *, step: int, draw: int) -> Group:
    """Read a group at its indexed position. If it is not indexed yet, search the step's file."""
    row = index.get(step=step, draw=draw)
    for start in [*([] if row is None else [row.start]), 0]:
        for group in _groups_in(root / FOLDER / f"{step:06d}.groups", start=start):
            if (group.step, group.draw) == (step, draw):
                return group
            if start:
                break
    raise NoGroupError(f"step {step} of the journal contains no group of draw {draw}")


def _groups_in(path: Path, *, start: int) -> Iterator[Group]:
    with suppress(OSError), path.open("rb") as file:
        for _, payload in stream_records(file, start=start, end=path.stat().st_size):
            with suppress(*NOT_A_GROUP):  # skip a record from another program, as the journal does
                yield decode(payload)


def show_group(group: Group, *, config: Config | None, trained_in: int | None) -> dict[str, Any]:
    """Return a group as JSON. Shortens long texts; ``said_of`` returns them in full."""
    advantages = advantages_of(group, config)
    prompt, shown = group.prompt, _prompt_text(group)
    own = (one.prompt_ids(prompt.token_ids) for one in group.completions if not prompt.text)
    columns = {name: value for name, value in prompt.metadata.items() if name not in ("prompt_messages", "prompt_text")}
    return {
        "step": group.step,
        "draw": group.draw,
        "trained_in": trained_in,
        "worker": group.worker,
        "started_s": group.started_s,
        "finished_s": group.finished_s,
        "prompt": {
            "id": prompt.id,
            "said": _cut([("", shown)]),
            "length": len(shown),
            "answer": prompt.answer[:LONG],
            "tokens": len(next(own, prompt.token_ids)),
            "metadata": {str(name)[:100]: json.dumps(value)[:1000] for name, value in list(columns.items())[:30]},
        },
        "completions": [
            _show_completion(completion, number=number, group=group)
            | {"advantage": None if advantages is None else float(advantages[number])}
            for number, completion in enumerate(group.completions)
        ],
        "advantages": "" if advantages is not None else _no_advantages(config),
    }


def advantages_of(group: Group, config: Config | None) -> Floats | None:
    """Return each completion's advantage. None if it depends on more than the group, or if the run file cannot be read."""
    if config is None:
        return None
    most = config.rollout.max_response_tokens
    return group_advantages(group, config.algorithm, max_response_tokens=most, environment=config.environment)


def _no_advantages(config: Config | None) -> str:
    if config is None:
        return "the run file cannot be read, so the algorithm is unknown"
    if isinstance(config.algorithm, GroupAlgorithm) and config.algorithm.advantage == "turn":
        return "with algorithm.advantage=turn, each turn of an attempt has its own advantage, and these are not stored"
    return f"with {config.algorithm.name} and these settings, an advantage depends on more than the group and is not stored"


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
    """Return a completion's messages with their speakers, without the message shown as the prompt. If ``completion`` is None, return the
    prompt."""
    prompt = _prompt_text(group)
    if completion is None:
        return [("", prompt)]
    said = said_in(group.completions[_known_completion(group, completion)])
    return said[1:] if not group.prompt.text and said[0] == ("environment", prompt) else said


def _known_completion(group: Group, number: int) -> int:
    if not 0 <= number < len(group.completions):
        raise NoGroupError(f"the group has {len(group.completions)} completions, but no completion number {number}")
    return number


def _prompt_text(group: Group) -> str:
    """Return the prompt's text. If it is empty, return the environment's first message, provided all attempts share it."""
    openings = {one.episode.opening for one in group.completions if one.episode is not None}
    return group.prompt.text or (openings.pop() if len(openings) == 1 else "")


def _cut(said: list[tuple[str, str]]) -> list[tuple[str, str]]:
    shown, left = [], LONG
    for who, text in said:
        if left > 0:
            shown.append((who, text[:left]))
        left -= len(text)
    return shown


# Tokens


class Vocabulary:
    """Turns token ids into text with the tokenizer in a run directory."""

    def __init__(self, data: bytes) -> None:
        # This is the tokenizer library that transformers uses. Without torch, it loads in a tenth of a second.
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_buffer(data)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}

    def texts(self, ids: list[int]) -> list[str]:
        """Return each token's text. If several tokens form one character, only the last of them gets the text."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, number) or "" if self._piece(number) is not None else "" for number in ids]

    def pieces(self, ids: list[int]) -> dict[str, str]:
        """Return each token's spelling in the tokenizer's vocabulary, keyed by its id."""
        return {str(number): piece for number in set(ids) if (piece := self._piece(number)) is not None}

    def special(self, ids: list[int]) -> list[int]:
        """Return the positions of the special tokens."""
        return [place for place, number in enumerate(ids) if number in self._special]

    def _piece(self, number: int) -> str | None:
        return self._tokenizer.id_to_token(number) if number >= 0 else None


def vocabulary_of(root: Path) -> Vocabulary | None:
    """Load the run directory's tokenizer. None if it has none yet."""
    for folder in (root, root / "model", *sorted(root.glob("checkpoints/*/model"), reverse=True)):
        with suppress(Exception):  # the library raises a plain Exception for a file that is not a tokenizer
            path = folder / "tokenizer.json"
            return _vocabulary(path, path.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=4)
def _vocabulary(path: Path, written_ns: int) -> Vocabulary:
    return Vocabulary(path.read_bytes())


def read_scores(root: Path, group: Group, *, completion: int, trained: TrainedDraws) -> dict[str, Floats] | None:
    """Return the learner's log-prob and entropy of each token, or None if they were not kept for this group."""
    step = trained.step_of(group.draw) or group.step
    try:
        with (root / TOKEN_SCORES / file_name(step)).open("rb") as file:
            return scores_in(file, group, completion=completion)
    except FileNotFoundError:
        return None


def show_tokens(
    group: Group,
    *,
    completion: int,
    config: Config | None,
    vocabulary: Vocabulary | None,
    learner: dict[str, Floats] | None,
) -> dict[str, Any]:
    """Return columns of equal length with one entry per token. ``learner`` contains the learner's log-probs and entropy for the same
    tokens, if they were kept."""
    one, score = group.completions[_known_completion(group, completion)], group.scores[completion]
    advantages = advantages_of(group, config)
    ids = one.token_ids.tolist()
    columns: dict[str, Any] = {"id": ids, "logprob": short(one.logprobs), "mask": one.mask.astype(int).tolist()}
    columns["version"] = [segment.version for segment in one.segments for _ in range(segment.num_tokens)]
    if advantages is not None:
        columns["advantage"] = short(np.where(one.mask, advantages[completion], 0.0))
    if learner is not None:
        difference = learner["logprobs"] - one.logprobs
        columns["entropy"] = short(learner["entropy"])
        columns["learner"] = short(learner["logprobs"])
        columns["mismatch"] = short(np.where(one.mask, difference, 0.0))
        columns["ratio"] = short(np.where(one.mask, np.exp(np.clip(difference, -20, 20)), 1.0))
    whole_prompt = one.prompt_ids(group.prompt.token_ids)
    prompt = whole_prompt[-2000:].tolist()  # the end of the prompt, which the completion answers
    return {
        "step": group.step,
        "draw": group.draw,
        "completion": completion,
        "of": len(group.completions),
        "prompt_id": group.prompt.id,
        "finish": one.finish.value,
        "reward": score.value,
        "has_text": vocabulary is not None,
        "columns": columns,
        "pieces": {} if vocabulary is None else vocabulary.pieces(ids),
        **_text_of(ids, vocabulary),
        "prompt": {"ids": prompt, "left_out": len(whole_prompt) - len(prompt), **_text_of(prompt, vocabulary)},
    }


def _text_of(ids: list[int], vocabulary: Vocabulary | None) -> dict[str, Any]:
    if vocabulary is None:
        return {"texts": None, "special": []}
    return {"texts": vocabulary.texts(ids), "special": vocabulary.special(ids)}


# Held-out prompts


def held_out_steps(root: Path) -> list[int]:
    found = (re.fullmatch(r"val-(\d{6,12})\.jsonl", path.name) for path in (root / "samples").glob("val-*"))
    return sorted(int(match[1]) for match in found if match)


def show_held_out(root: Path, *, step: int, needle: str) -> list[dict[str, Any]]:
    path, wanted, rows = root / "samples" / f"val-{step:06d}.jsonl", needle.casefold(), []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        row = parse_row(line)
        if row is None:
            continue
        texts = {name: _text(row.get(name)) for name in ("prompt_id", "prompt", "answer")}
        try:
            said = [(who, _text(text)) for who, text in said_in_row(row)]
        except NOT_A_GROUP:  # not an episode
            said = [("", _text(row.get("completion")))]
        if not any(wanted in text.casefold() for text in (*texts.values(), *(text for _, text in said))):
            continue
        numbers = {name: row.get(name) for name in ("reward", "num_tokens")}
        numbers = {name: value if isinstance(value, int | float) else None for name, value in numbers.items()}
        rows.append({**texts, **numbers, "finish": _text(row.get("finish")), "said": said})
        if len(rows) == 200:  # the most that the page shows
            break
    return rows


def _text(value: Any) -> str:
    return value[:LONG] if isinstance(value, str) else ""
