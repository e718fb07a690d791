"""What a run waits for while a call is under way, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# By method of a run's workers, with the call's arguments where they tell something.
_CALLS = {
    "build": "to load its model",
    "listen": "to listen for the others",
    "advance": "to sample completions",
    "invite": "to invite those that get new weights",
    "send_weights": "to send weights of version {0}",
    "use_weights": "to take weights of version {0}",
    "update": "to update the policy",
    "update_critic": "to update the critic",
    "score": "to score samples",
    "score_reference": "to score samples by the reference",
    "values": "to value samples",
    "reward": "to score completions",
    "export": "to write the model",
    "write_checkpoint": "to write a checkpoint",
    "read_checkpoint": "to read a checkpoint",
}


def call_words(method: str, args: Sequence[Any]) -> str:
    """
    >>> call_words("use_weights", [4]), call_words("a_method", [4])
    ('to take weights of version 4', 'to return from a_method')
    """
    return _CALLS[method].format(*args) if method in _CALLS else f"to return from {method}"


def waits_words(waits: Mapping[str, Sequence[str]]) -> str:
    """Who is waited for, by what for; at most three of each.

    >>> waits_words({"to take weights of version 4": ["rollout rank 1 on node 1"]})
    'the run waited for rollout rank 1 on node 1 to take weights of version 4'
    """
    parts = [f"{_few(who)} {what}" for what, who in waits.items()]
    return f"the run waited for {', and for '.join(parts)}" if parts else ""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
