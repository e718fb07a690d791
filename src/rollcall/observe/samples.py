"""Samples for human readers: ``samples/<split>-<step>.jsonl``, and rows for the console."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rollcall.base.atomic import write_atomic
from rollcall.base.types import Group
from rollcall.observe.transcript import asked, episode_columns, transcript


def write_samples(dir: Path, *, step: int, split: str, groups: Iterable[Group]) -> Path:
    """Write ``samples/<split>-<step>.jsonl``, one line per completion, for human readers."""
    dir.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "prompt_id": group.prompt.id,
                "prompt": group.prompt.text,
                "completion": completion.text,
                "answer": group.prompt.answer,
                "reward": score.value,
                "parts": score.parts,
                **({"errors": score.errors} if score.errors else {}),
                **({"notes": score.notes} if score.notes else {}),
                "num_tokens": len(completion.token_ids),
                "finish": completion.finish.value,
                **episode_columns(completion),
            },
            ensure_ascii=False,
        )
        for group in groups
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]
    path = dir / f"{split}-{step:06d}.jsonl"
    text = "".join(line + "\n" for line in lines)
    # A completion that was cut inside a character may contain half a surrogate pair, which UTF-8 cannot encode.
    write_atomic(path, text.encode("utf-8", errors="backslashreplace"))
    return path


def sample_rows(groups: Iterable[Group], *, limit: int) -> list[tuple[str, str, str, float]]:
    """Return (prompt, completion, answer, reward) for the first completion in each of the first groups, for the console."""
    rows = [
        (
            asked(group.prompt.text, group.prompt.metadata),
            transcript(group.completions[0]),
            group.prompt.answer,
            group.scores[0].value,
        )
        for group in groups
        if group.completions
    ]
    return rows[:limit]
