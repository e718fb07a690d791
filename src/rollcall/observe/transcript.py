"""An episode as text that people read: what the model wrote, which tools it called, what the environment answered."""

from __future__ import annotations

import json
from typing import Any

from rollcall.types import Completion, EndReason, ToolCall, Turn

_ENDS = {
    EndReason.TURNS: "ended at the limit of turns",
    EndReason.TOKENS: "ended at the limit of tokens",
    EndReason.TIMEOUT: "took too long",
    EndReason.ERROR: "the environment failed",
}
_LONGEST_ARGUMENT = 200


def transcript(completion: Completion) -> str:
    """The text of a completion; of an episode all its turns.

    >>> from rollcall.types import Episode
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
    episode = completion.episode
    if episode is None:
        return completion.text
    lines = [_said("environment", episode.opening)] if episode.opening else []
    for number, turn in enumerate(episode.turns, start=1):
        lines.append(_said(f"turn {number}", turn.text))
        lines += [_said("call", _called(call)) for call in turn.calls]
        if turn.observation and not turn.calls:
            lines.append(_said("environment", turn.observation))
        if turn.reward is not None:
            lines.append(f"[reward] {turn.reward:g}")
    if why := _ENDS.get(episode.ended):
        lines.append(_said("end", f"{why}{f': {episode.error}' if episode.error else ''}"))
    if episode.branches:
        lines.append(f"[branches] {len(episode.branches)} more conversations, trained on too")
    return "\n".join(lines)


def _said(who: str, text: str) -> str:
    """Only its first line stands at the edge: a turn that writes `[call] test() -> passed` on a line of its own has called nothing, and
    a reader can see that, a judge too."""
    first, *others = text.splitlines() or [""]
    return "\n".join([f"[{who}] {first}", *(f"  {line}" for line in others)])


def episode_columns(completion: Completion) -> dict[str, Any]:
    """What a line of a samples file says of an episode, beside the completion's own; nothing for a single turn."""
    episode = completion.episode
    if episode is None:
        return {}
    return {
        **({"opening": episode.opening} if episode.opening else {}),
        "turns": [_turn(turn) for turn in episode.turns],
        "ended": episode.ended.value,
        **({"error": episode.error} if episode.error else {}),
        **({"metrics": episode.metrics} if episode.metrics else {}),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    calls = [
        {
            "name": call.name,
            "arguments": call.arguments,
            "result": call.result,
            **({"failed": True} if call.failed else {}),
        }
        for call in turn.calls
    ]
    return {
        "text": turn.text,
        **({"calls": calls} if calls else {}),
        **({"observation": turn.observation} if turn.observation else {}),
        **({"reward": turn.reward} if turn.reward is not None else {}),
    }


def _called(call: ToolCall) -> str:
    given = ", ".join(f"{name}={_short(value)}" for name, value in call.arguments.items())
    return f"{call.name}({given}) {'failed:' if call.failed else '->'} {call.result}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}…"
