"""Questions to a service that scores, and a service of the user's own (``http``): completions as JSON, scores as JSON.

It gets ``{"prompt", "completion", "answer", "metadata"}``, or with ``whole_group`` ``completions``, a list. It answers a number
or ``{"score": number}`` for one completion, or ``{"scores": [...]}`` with one number for each. ``note`` or ``notes`` next to them
are texts that are kept with the completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollcall.base.types import Completion, Prompt
from rollcall.base.words import visible
from rollcall.config.rewards import HttpReward
from rollcall.reward.worker import RewardResult, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request on ``count`` completions. ``read`` makes their results of the answer's body."""

    count: int
    body: bytes
    read: Callable[[bytes], list[RewardResult]]


def failed(why: str, *, note: str = "") -> RewardResult:
    return RewardResult(0.0, "raised", visible(why), note=note)


def read_json(said: bytes) -> Any:
    """ValueError: it is not JSON; the message shows how it begins."""
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        begin = " ".join(said[:200].decode(errors="replace").split())
        raise ValueError(f"it is not JSON: {begin[:80]!r}" if begin else "it is empty") from None


def whole_characters(text: str) -> str:
    """A completion cut inside a character may hold half a surrogate pair, which many readers of JSON refuse."""
    return text.encode(errors="replace").decode()


class HttpService:
    what = "the reward service"

    def __init__(self, section: HttpReward) -> None:
        self._section = section
        self.url = section.url

    def questions(self, prompt: Prompt, completions: tuple[Completion, ...]) -> list[Question]:
        """In the order of the completions."""
        texts = [whole_characters(completion.text) for completion in completions]
        if self._section.whole_group:
            return [_question(prompt, len(texts), completions=texts)]
        return [_question(prompt, 1, completion=text) for text in texts]


def _question(prompt: Prompt, count: int, **completions: Any) -> Question:
    body = {"prompt": prompt.text, **completions, "answer": prompt.answer, "metadata": prompt.metadata}
    # Columns of a Parquet row are often numpy, which has tolist.
    text = json.dumps(body, default=lambda value: value.tolist())
    return Question(count=count, body=text.encode(), read=partial(read_scores, count=count))


def read_scores(said: bytes, *, count: int) -> list[RewardResult]:
    """One result for each completion."""
    try:
        scores, notes = _scores_in(read_json(said), count=count)
    except ValueError as error:
        return [failed(f"the answer of the reward service cannot be used: {error}")] * count
    return [replace(checked(score), note=note) for score, note in zip(scores, notes, strict=True)]


def _scores_in(answer: Any, *, count: int) -> tuple[list[Any], list[str]]:
    if not isinstance(answer, dict):
        answer = {"scores": answer} if isinstance(answer, list) else {"score": answer}
    scores = answer.get("scores", [answer["score"]] if "score" in answer else None)
    if not isinstance(scores, list):
        raise ValueError('it has no "scores"; answer {"scores": [...]}, or a number for one completion')
    if len(scores) != count:
        raise ValueError(f"it has {len(scores)} scores for {count} completions")
    notes = answer.get("notes", [answer["note"]] if "note" in answer else [""] * count)
    if not isinstance(notes, list) or len(notes) != count or not all(isinstance(note, str) for note in notes):
        raise ValueError(f'its "notes" are not a list of {count} texts')
    return scores, notes
