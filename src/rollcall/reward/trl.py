"""Builds the arguments for reward functions that follow TRL's convention: lists with one entry per completion in a group.

As in TRL, prompts and completions are strings if the row's prompt is a string. They are messages if the prompt consists of messages
or if an environment played the episode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollcall.base.types import Completion, Episode, Prompt, Turn

MESSAGES, TEXT = "prompt_messages", "prompt_text"  # keys in a prompt's metadata if a chat template rendered it
_CALL = re.compile(r"<tool_call>|<\|python_tag\|>|^\s*\{")


def lists_of(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the arguments by name, including the row's columns."""
    columns = {"id": prompt.id, "answer": prompt.answer} | prompt.metadata
    lists = {name: [value] * len(completions) for name, value in columns.items() if name not in (MESSAGES, TEXT)}
    is_text = TEXT in prompt.metadata or MESSAGES not in prompt.metadata
    lists |= {
        "prompts": [_prompt(prompt, completion.episode, is_text=is_text) for completion in completions],
        "completions": [_completion(completion, is_text=is_text) for completion in completions],
        "completion_ids": [completion.token_ids.tolist() for completion in completions],
    }
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    return lists | ({"environments": [episode.attributes for episode in episodes]} if episodes else {})


def _prompt(prompt: Prompt, episode: Episode | None, *, is_text: bool) -> Any:
    if episode is None and is_text:
        return prompt.metadata.get(TEXT, prompt.text)
    messages = [dict(message) for message in prompt.metadata.get(MESSAGES, [{"role": "user", "content": prompt.text}])]
    if episode is not None:
        messages[-1]["content"] += episode.opening
    return messages


def _completion(completion: Completion, *, is_text: bool) -> Any:
    if completion.episode is not None:
        return [message for turn in completion.episode.turns for message in _messages(turn)]
    return completion.text if is_text else [{"role": "assistant", "content": completion.text}]


def _messages(turn: Turn) -> list[dict[str, Any]]:
    if not turn.calls:
        said = [{"role": "assistant", "content": turn.text}]
        return [*said, {"role": "user", "content": turn.observation}] if turn.observation else said
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
    content = _CALL.split(turn.text, maxsplit=1)[0].strip()
    results = [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]
