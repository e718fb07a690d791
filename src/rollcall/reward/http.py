"""A service of the user's own: completions as JSON, scores as JSON.

It gets ``{"prompt", "completion", "answer", "metadata"}``, or with ``whole_group`` ``completions``, a list. It answers a number
or ``{"score": number}`` for one completion, or ``{"scores": [...]}`` with one number for each. ``note`` or ``notes`` beside them
are texts that are kept with the completion.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from rollcall.config.rewards import HttpReward
from rollcall.reward.asked import Question, Verdict, failed_verdict, read_json, whole_characters
from rollcall.reward.worker import checked
from rollcall.types import Completion, Prompt


class HttpService:
    """``section`` as questions to its service."""

    what = "the reward service"

    def __init__(self, section: HttpReward) -> None:
        self._section = section
        self.url = section.url

    def questions(self, prompt: Prompt, completions: tuple[Completion, ...]) -> list[Question]:
        texts = [whole_characters(completion.text) for completion in completions]
        if self._section.whole_group:
            body = _body(prompt, completions=texts)
            return [Question(first=0, count=len(texts), body=body, read=partial(read_scores, count=len(texts)))]
        return [
            Question(first=place, count=1, body=_body(prompt, completion=text), read=partial(read_scores, count=1))
            for place, text in enumerate(texts)
        ]


def _body(prompt: Prompt, **completions: Any) -> bytes:
    body = {"prompt": prompt.text, **completions, "answer": prompt.answer, "metadata": prompt.metadata}
    # Columns of a Parquet row are often numpy, which has tolist.
    return json.dumps(body, default=lambda value: value.tolist()).encode()


def read_scores(said: bytes, *, count: int) -> list[Verdict]:
    """One verdict for each completion."""
    try:
        scores, notes = _scores_in(read_json(said), count=count)
    except ValueError as error:
        return [failed_verdict(f"the answer of the reward service cannot be used: {error}")] * count
    return [Verdict(checked(score), note=note) for score, note in zip(scores, notes, strict=True)]


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
