"""Formats an episode for human readers: what the model wrote, which tools it called, what the environment answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollcall.base.types import Completion, EndReason, Turn
from rollcall.base.words import counted

_ENDS = {
    EndReason.TURNS: "ended at the limit of turns",
    EndReason.TOKENS: "ended at the limit of tokens",
    EndReason.TIMEOUT: "took too long",
    EndReason.ERROR: "the environment failed",
}
_LONGEST_ARGUMENT = 200


def asked(text: str, metadata: Mapping[str, Any]) -> str:
    """Return a prompt's last user message, without chat template and system message."""
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
    return [*said, ("branches", f"{counted(num, 'more conversation')}, trained on too")] if num else said


def said_in_row(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Like ``said_in``, for an episode in the format of ``episode_columns`` and journal records."""
    said = [("environment", row["opening"])] if row.get("opening") else []
    for number, turn in enumerate(row["turns"], start=1):
        said.append((f"turn {number}", turn["text"]))
        calls = turn.get("calls") or ()
        said += [("call", _called(call)) for call in calls]
        if turn.get("observation") and not calls:
            said.append(("environment", turn["observation"]))
        if turn.get("reward") is not None:
            said.append(("reward", f"{turn['reward']:g}"))
    if why := _ENDS.get(row["ended"]):
        said.append(("end", f"{why}{f': {error}' if (error := row.get('error')) else ''}"))
    return said


def _line(who: str, text: str) -> str:
    """Indent all but the first line, so that if a turn itself writes the line `[call] test() -> passed`, readers and judges can see
    that nothing was called."""
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


def _called(call: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={_short(value)}" for name, value in call.get("arguments", {}).items())
    return f"{call['name']}({given}) {'failed:' if call.get('failed') else '->'} {call.get('result', '')}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}…"
