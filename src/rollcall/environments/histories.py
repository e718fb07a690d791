"""Turns a program's requests into token sequences. Sampled tokens are never tokenised again.

Each answer is stored with the exact IDs up to its end. A request extends an answer if its messages begin with the earlier messages
and the answer as it was returned. Its prompt is then the stored IDs, followed by the IDs of the new messages. Any other request
starts a new row: a program may rewrite its history or ask an unrelated question.

    row 0   prompt  [sampled] observed [sampled] observed [sampled]       first history: the episode's own row
    row 1   the same tokens up to the second answer as its prompt, then observed' [sampled']      went back to that answer
    row 2   a different prompt  [sampled]                                 rewritten history or unrelated conversation

Every sampled token has mask true in exactly one row. It is part of the prompt in rows that branch off after it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollcall.base.types import Branch, Completion, Episode, FinishReason, Ints, Prompt, Segment, ToolCall, Turn
from rollcall.environments.calls import Call
from rollcall.environments.conversation import Conversations
from rollcall.environments.protocol import EnvironmentFailed, Message


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A training row of a running episode: its sampled tokens, the observed tokens between them, and its turns."""

    prompt_ids: Ints
    token_ids: list[Ints] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    mask: list[Any] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    length: int = 0
    turns: list[Turn] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT  # until a turn is sampled

    def add_sampled(self, turn: Completion, calls: tuple[ToolCall, ...] = ()) -> None:
        self._append(turn.token_ids, turn.logprobs, turn.mask, turn.segments)
        self.finish, count = turn.finish, len(turn.token_ids)
        made = Turn(num_sampled=count, num_observed=0, text=turn.text, observation="", calls=calls, reward=None)
        self.turns.append(made)

    def add_observed(self, ids: Ints, text: str) -> None:
        if len(ids):
            segment = Segment(version=self.segments[-1].version, num_tokens=len(ids))
            self._append(ids, np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.bool_), (segment,))
        self.change_last(num_observed=len(ids), observation=text)

    def change_last(self, **fields: Any) -> None:
        """Change the last turn."""
        self.turns[-1] = replace(self.turns[-1], **fields)

    def joined(self) -> dict[str, Any]:
        """Return the fields for a `Completion` or a `Branch`."""
        return {
            "token_ids": np.concatenate((np.zeros(0, dtype=np.int32), *self.token_ids), dtype=np.int32),
            "logprobs": np.concatenate((np.zeros(0, dtype=np.float32), *self.logprobs), dtype=np.float32),
            "mask": np.concatenate((np.zeros(0, dtype=np.bool_), *self.mask), dtype=np.bool_),
            "segments": tuple(self.segments),
        }

    def completion(self, prompt: Prompt, *, seed: int, **episode: Any) -> Completion:
        """Return this row as an attempt at the prompt. ``episode`` contains the other fields of its `Episode`."""
        opened = None if np.array_equal(self.prompt_ids, prompt.token_ids) else self.prompt_ids
        return Completion(
            **self.joined(),
            finish=self.finish,
            seed=seed,
            text=self.turns[-1].text if self.turns else "",
            episode=Episode(prompt_ids=opened, turns=tuple(self.turns), **episode),
        )

    def _append(self, ids: Ints, logprobs: Any, mask: Any, segments: tuple[Segment, ...]) -> None:
        self.token_ids.append(ids)
        self.logprobs.append(logprobs)
        self.mask.append(mask)
        self.length += len(ids)
        for segment in segments:
            if self.segments and self.segments[-1].version == segment.version:
                segment = replace(segment, num_tokens=self.segments.pop().num_tokens + segment.num_tokens)
            self.segments.append(segment)


@dataclass(slots=True, kw_only=True, eq=False)
class HistoryRow(Row):
    session: str
    opening: str = ""  # the prompt's text
    tip: _Answer | None = None  # the row's last answer
    is_extended: bool = False  # whether a pending request extends it

    def branch(self) -> Branch:
        return Branch(prompt_ids=self.prompt_ids, **self.joined())


@dataclass(slots=True, kw_only=True, eq=False)
class _Answer:
    """The state after one answer."""

    ids: Ints  # all IDs up to its end
    ids_bytes: bytes
    row: HistoryRow
    key: bytes | None  # key of the messages including the answer; None if not a chat
    text: str | None  # prompt and answer; None if not plain text
    ends_at_stop: bool
    calls: tuple[Call, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A request in the form that the engine receives."""

    prompt_ids: Ints
    session: str
    behind: _Answer | None  # the answer that the request extends
    added: Ints  # the IDs after that answer
    key: bytes | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()  # the new messages
    holds_row: bool = False

    @property
    def observation(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


class Histories:
    """The histories of the requests made with one key. With ``max_kept``, keep no rows and drop the least recently used answers beyond
    this many tokens. Without it, keep all answers and rows."""

    def __init__(self, conversations: Conversations, *, name: str, max_kept: int | None = None) -> None:
        self._conversations, self._tokenizer = conversations, conversations.tokenizer
        self._name, self._max_kept = name, max_kept
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        self._by_key: dict[bytes, _Answer] = {}
        self._num_kept = 0
        self._num_sessions = 0
        self.rows: list[HistoryRow] = []

    # Requests

    def chat(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]]) -> Asked:
        keys = [_digest(b"", json.dumps(tools, sort_keys=True))]  # one key for each prefix of the messages
        for message in messages:
            keys.append(_next_key(keys[-1], message))
        for count in range(len(messages), 0, -1):
            answer = self._by_key.get(keys[count])
            new = messages[count:]
            if answer is not None and new and all(message["role"] in ("user", "tool", "system") for message in new):
                if why := self._conversations.why_not_after(new, tools=tools, key=keys[0]):
                    if self._max_kept is None:
                        raise EnvironmentFailed(why)
                    break  # these tokens are not used for training, so it is safe to render all messages again
                said = [Message(role=one["role"], content=one["content"], name=one.get("name", "")) for one in new]
                last_id = int(answer.ids[-1])
                added = self._conversations.extend(said, is_chat=True, tools=tools, last_id=last_id)
                return self._extended(answer, added, key=keys[-1], messages=tuple(new))
        ids = self._conversations.open_chat(messages, tools=tools)
        return self._opened(ids, key=keys[-1], messages=tuple(messages))

    def ids(self, token_ids: Ints) -> Asked:
        """Extend the longest answer that this prompt of token IDs begins with."""
        given = token_ids.tobytes()
        begins = [answer for answer in self._answers.values() if given.startswith(answer.ids_bytes)]
        if not begins:
            return self._opened(token_ids)
        longest = max(reversed(begins), key=lambda answer: len(answer.ids))
        return self._extended(longest, token_ids[len(longest.ids) :])

    def plain(self, text: str) -> Asked:
        """Extend the longest answer that this text prompt begins with. If the answer ended at a stop token that its text does not show,
        the prompt does not contain that token either, so it cannot extend the answer's row. It starts a new row, which begins with the
        IDs before the token."""
        begins = [answer for answer in self._answers.values() if answer.text and text.startswith(answer.text)]
        if not begins:
            return self._opened(self._encode(text, special=True), text=text)
        longest = max(reversed(begins), key=lambda answer: len(answer.text or ""))
        added = self._encode(text[len(longest.text or "") :])
        if longest.ends_at_stop:
            return self._opened(np.concatenate((longest.ids[:-1], added)), text=text)
        return self._extended(longest, added, text=text)

    def give_up(self, asked: Asked) -> None:
        """Record that nothing was sampled for a request, because it was refused or its client disconnected."""
        if asked.holds_row and asked.behind is not None:
            asked.behind.row.is_extended = False

    # Answers

    def note(
        self,
        asked: Asked,
        completion: Completion,
        *,
        session: str,
        message: dict[str, Any] | None = None,
        calls: Sequence[Call] = (),
    ) -> None:
        """Record the completion sampled for a request. ``message`` is the answer as it was returned to the client."""
        self.give_up(asked)
        behind = asked.behind
        if behind is None or behind.row.tip is not behind:
            row = HistoryRow(prompt_ids=asked.prompt_ids, session=session)
            if self._max_kept is None:
                row.opening = asked.text or asked.observation
                self.rows.append(row)
        else:
            row = behind.row
            if self._max_kept is None:  # add the new messages, and record the results of the last calls
                results = {one.get("tool_call_id"): one["content"] for one in asked.messages if one["role"] == "tool"}
                row.add_observed(asked.added, asked.observation)
                pairs = zip(row.turns[-1].calls, behind.calls, strict=True)
                row.change_last(calls=tuple(replace(call, result=results.get(found.id, "")) for call, found in pairs))
        if self._max_kept is None:
            made = [ToolCall(name=call.name, arguments=call.arguments, result="", failed=False) for call in calls]
            row.add_sampled(completion, tuple(made))
        stops = completion.finish is FinishReason.STOP and bool(len(completion.token_ids))
        shown = "" if not stops else self._tokenizer.decode(completion.token_ids[-1:], skip_special_tokens=True)
        ids = np.concatenate((asked.prompt_ids, completion.token_ids))
        row.tip = answer = _Answer(
            ids=ids,
            ids_bytes=ids.tobytes(),
            row=row,
            key=None if asked.key is None or message is None else _next_key(asked.key, message),
            text=None if asked.text is None else asked.text + completion.text,
            ends_at_stop=stops and not shown,
            calls=tuple(calls),
        )
        self._keep(answer)

    def new_session(self) -> str:
        self._num_sessions += 1
        return self._name if self._num_sessions == 1 else f"{self._name}/{self._num_sessions}"

    # Inside

    def _opened(self, ids: Ints, **given: Any) -> Asked:
        nothing = np.zeros(0, dtype=np.int32)
        return Asked(prompt_ids=ids, session=self.new_session(), behind=None, added=nothing, **given)

    def _extended(self, answer: _Answer, added: Ints, **given: Any) -> Asked:
        self._answers.move_to_end(id(answer))
        row = answer.row
        holds = row.tip is answer and not row.is_extended
        if holds:
            row.is_extended = True
        return Asked(
            prompt_ids=np.concatenate((answer.ids, added)),
            session=row.session if holds else self.new_session(),
            behind=answer,
            added=added,
            holds_row=holds,
            **given,
        )

    def _keep(self, answer: _Answer) -> None:
        self._answers[id(answer)] = answer
        self._num_kept += len(answer.ids)
        if answer.key is not None:
            self._by_key[answer.key] = answer
        while self._max_kept is not None and self._num_kept > self._max_kept and len(self._answers) > 1:
            forgotten = self._answers.popitem(last=False)[1]
            self._num_kept -= len(forgotten.ids)
            if forgotten.key is not None and self._by_key.get(forgotten.key) is forgotten:
                del self._by_key[forgotten.key]

    def _encode(self, text: str, *, special: bool = False) -> Ints:
        return np.array(self._tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)


def _next_key(key: bytes, message: dict[str, Any]) -> bytes:
    """Return a conversation's key after one more message. Ignore call IDs: the model does not write them, and programs change them."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    name = message.get("name", "") if message["role"] != "tool" else ""
    return _digest(key, json.dumps([message["role"], message["content"], name, calls], sort_keys=True))


def _digest(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
