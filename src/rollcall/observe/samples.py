"""What a run sampled, for human readers: ``samples/<split>-<step>.jsonl``, transcripts of episodes, and the learner's log-probs and
entropies for the tokens of a few groups, in ``token_scores/<step>.npz``.

The journal has the engine's log-probs from sampling. Together with the learner's they show, token by token, where engine and learner
differ and how confident the policy was.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollcall.base.atomic import write_atomic
from rollcall.base.types import Completion, EndReason, Floats, Group, Turn
from rollcall.base.words import counted

TOKEN_SCORES = "token_scores"
SCORED_GROUPS = 4  # groups per step; enough for a look, and cheap compared to the update
_ENDS = {
    EndReason.TURNS: "ended at the turn limit",
    EndReason.TOKENS: "ended at the token limit",
    EndReason.TIMEOUT: "took too long",
    EndReason.ERROR: "the environment failed",
}
_LONGEST_ARGUMENT = 200


def write_samples(dir: Path, *, step: int, split: str, groups: Iterable[Group]) -> Path:
    """Write ``samples/<split>-<step>.jsonl``, one line per completion, for human readers."""
    dir.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "answer": group.prompt.answer,
            "reward": score.value,
            "parts": score.parts,
            **_given({"errors": score.errors, "notes": score.notes}),
            "num_tokens": len(completion.token_ids),
            "finish": completion.finish.value,
            **episode_columns(completion),
        }
        for group in groups
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]
    path = dir / f"{split}-{step:06d}.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # A completion that was cut inside a character may contain a lone surrogate, which UTF-8 cannot encode.
    write_atomic(path, text.encode("utf-8", errors="backslashreplace"))
    return path


def sample_rows(groups: Iterable[Group], *, limit: int) -> list[tuple[str, str, str, float]]:
    """Return (prompt, completion, answer, reward) for the first completion in each of the first groups, for the console."""
    rows = [(one.prompt, transcript(one.completions[0]), one.scores[0].value) for one in groups if one.completions]
    return [(asked(prompt.text, prompt.metadata), text, prompt.answer, reward) for prompt, text, reward in rows[:limit]]


# Transcripts


def asked(text: str, metadata: Mapping[str, Any]) -> str:
    """Return a prompt's last user message, without the chat template and the system message."""
    said = [message["content"] for message in metadata.get("prompt_messages") or () if message["role"] == "user"]
    return str(said[-1]) if said else text


def transcript(completion: Completion) -> str:
    """Return a completion's text or, for an episode, all its turns.

    >>> from rollcall.base.types import Episode, ToolCall
    >>> import numpy as np
    >>> call = ToolCall(name="add", arguments={"a": 1, "b": 2}, result="3", failed=False)
    >>> turns = (
    ...     Turn(num_sampled=1, num_observed=1, text="let me add", observation="3", calls=(call,), reward=None),
    ...     Turn(num_sampled=1, num_observed=0, text="it is 3", observation="", calls=(), reward=0.5),
    ... )
    >>> episode = Episode(
    ...     prompt_ids=None, turns=turns, branches=(), reward=1.0, metrics={}, ended=EndReason.DONE, error="", opening="add them"
    ... )
    >>> from dataclasses import replace
    >>> print(transcript(replace(Completion.given(np.zeros(3, dtype=np.int32)), episode=episode)))
    [environment] add them
    [turn 1] let me add
    [call] add(a=1, b=2) -> 3
    [turn 2] it is 3
    [reward] 0.5
    """
    if completion.episode is None:
        return completion.text
    return "\n".join(_line(who, text) for who, text in said_in(completion))


def said_in(completion: Completion) -> list[tuple[str, str]]:
    """Return pairs of speaker and text, in order. A single turn has no speaker."""
    if completion.episode is None:
        return [("", completion.text)]
    num, said = len(completion.episode.branches), said_in_row(episode_columns(completion))
    return [*said, ("branches", f"{counted(num, 'more conversation')}, also trained on")] if num else said


def said_in_row(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Like ``said_in``, for an episode in the format of ``episode_columns`` and journal records."""
    said = [("environment", row["opening"])] if row.get("opening") else []
    for number, turn in enumerate(row["turns"], start=1):
        said.append((f"turn {number}", turn["text"]))
        calls = turn.get("calls") or ()
        for call in calls:
            given = ", ".join(f"{name}={_short(value)}" for name, value in call.get("arguments", {}).items())
            sign = "failed:" if call.get("failed") else "->"
            said.append(("call", f"{call['name']}({given}) {sign} {call.get('result', '')}"))
        if turn.get("observation") and not calls:
            said.append(("environment", turn["observation"]))
        if turn.get("reward") is not None:
            said.append(("reward", f"{turn['reward']:g}"))
    if why := _ENDS.get(row["ended"]):
        said.append(("end", f"{why}{f': {error}' if (error := row.get('error')) else ''}"))
    return said


def _line(who: str, text: str) -> str:
    """Indent all but the first line. If a turn itself writes the line `[call] test() -> passed`, readers and judges can then see that
    nothing was called."""
    first, *others = text.splitlines() or [""]
    return "\n".join([f"[{who}] {first}", *(f"  {line}" for line in others)])


def episode_columns(completion: Completion) -> dict[str, Any]:
    """Return an episode's extra columns for a samples file; empty for a single turn."""
    episode = completion.episode
    if episode is None:
        return {}
    about = {"opening": episode.opening, "error": episode.error, "metrics": episode.metrics}
    return {"turns": [_turn(turn) for turn in episode.turns], "ended": episode.ended.value, **_given(about)}


def _turn(turn: Turn) -> dict[str, Any]:
    calls = [_given(asdict(call) | {"failed": call.failed or None}) for call in turn.calls]
    return {"text": turn.text, **_given({"calls": calls, "observation": turn.observation, "reward": turn.reward})}


def _given(columns: dict[str, Any]) -> dict[str, Any]:
    """Remove empty columns."""
    return {name: value for name, value in columns.items() if value is not None and value not in ("", [], {})}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}…"


# Token scores


def file_name(step: int) -> str:
    return f"{step:06d}.npz"


def write_token_scores(
    folder: Path, *, step: int, groups: Sequence[Group], logprobs: Sequence[Floats], entropy: Sequence[Floats]
) -> None:
    """Write a step's file. ``logprobs`` and ``entropy`` have one array per completion, in the order of the groups."""
    counts = [len(completion.token_ids) for group in groups for completion in group.completions]
    assert counts == [len(row) for row in logprobs] == [len(row) for row in entropy], "one number for each token"
    data = io.BytesIO()
    np.savez(
        data,
        draws=np.array([group.draw for group in groups for _ in group.completions], dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        logprobs=np.concatenate([np.zeros(0, dtype=np.float32), *logprobs]),
        entropy=np.concatenate([np.zeros(0, dtype=np.float32), *entropy]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / file_name(step), data.getvalue())


def scores_in(file: IO[bytes], group: Group, *, completion: int) -> dict[str, Floats] | None:
    """Read one completion's values, or None if the file does not contain them or is incomplete."""
    try:
        with np.load(file, allow_pickle=False) as held:
            draws, counts = held["draws"], held["counts"]
            rows = np.flatnonzero(draws == group.draw)
            if len(rows) <= completion or len(draws) != len(counts):
                return None
            row = rows[completion]
            start, count = int(counts[:row].sum()), int(counts[row])
            found = {name: held[name][start : start + count].astype(np.float32) for name in ("logprobs", "entropy")}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, IndexError, TypeError):
        return None
    num_tokens = len(group.completions[completion].token_ids)
    return found if all(len(values) == num_tokens for values in found.values()) else None
