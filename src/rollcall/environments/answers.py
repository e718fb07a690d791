"""Completions as the bodies and stream events of the OpenAI API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rollcall.base.types import Completion, FinishReason, Ints
from rollcall.environments.histories import Call
from rollcall.environments.wire import ChatRequest, GenerateRequest, TextRequest

DONE = b"data: [DONE]\n\n"
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a prompt."""

    index: int
    prompt: int  # which of the request's
    completion: Completion
    content: str  # without stop strings and calls
    calls: tuple[Call, ...]

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else FINISH[self.completion.finish]

    def message(self) -> dict[str, Any]:
        """As it is returned, and as a later request has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


Request = ChatRequest | TextRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """All that a request has come to."""

    model: str
    prompts: tuple[Ints, ...]
    choices: tuple[Choice, ...]
    tokenizer: Any

    def usage(self) -> dict[str, int]:
        read = sum(len(ids) for ids in self.prompts)
        new = sum(len(choice.completion.token_ids) for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def chat_body(answered: Answered, request: ChatRequest) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for choice in answered.choices:
        content = None if choice.calls and not choice.content else choice.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message["tool_calls"] = _calls(choice.calls)
        logprobs = _chat_logprobs(choice.completion, answered, request)
        part = {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        choices.append(part | _token_ids(choice, request))
    return _body("chatcmpl", "chat.completion", answered, choices) | _prompt_ids(0, answered, request)


def text_body(answered: Answered, request: TextRequest) -> dict[str, Any]:
    choices = [_text_choice(choice, answered, request) for choice in answered.choices]
    body = _body("cmpl", "text_completion", answered, choices)
    return body | _prompt_ids(0, answered, request) if len(answered.prompts) == 1 else body


def generate_body(answered: Answered, request: GenerateRequest) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for choice in answered.choices:
        ids, is_wanted = choice.completion.token_ids.tolist(), request.sampling_params.logprobs is not None
        logprobs = {"content": _contents(choice.completion, None)} if is_wanted else None
        reason = choice.finish_reason
        choices.append({"index": choice.index, "token_ids": ids, "finish_reason": reason, "logprobs": logprobs})
    head = {"request_id": request.request_id or f"gen-{secrets.token_hex(12)}", "model": answered.model}
    return {**head, "choices": choices, "usage": answered.usage()}


def chat_events(answered: Answered, request: ChatRequest) -> Iterator[bytes]:
    """A stream: who speaks, what is said, why it ended; then the usage, if that was wanted."""
    head = _head("chatcmpl", "chat.completion.chunk", answered)
    for choice in answered.choices:
        first = _prompt_ids(0, answered, request) if choice.index == 0 else {}
        yield _event({**head, **first, "choices": [_part(choice, {"role": "assistant", "content": ""})]}, request)
        said: dict[str, Any] = {"content": choice.content} if choice.content else {}
        if choice.calls:
            said["tool_calls"] = [{"index": at, **call} for at, call in enumerate(_calls(choice.calls))]
        logprobs = _chat_logprobs(choice.completion, answered, request)
        part = {**_part(choice, said), "logprobs": logprobs, **_token_ids(choice, request)}
        yield _event({**head, "choices": [part]}, request)
        yield _event({**head, "choices": [{**_part(choice, {}), "finish_reason": choice.finish_reason}]}, request)
    yield from _last_events(head, answered, request)


def text_events(answered: Answered, request: TextRequest) -> Iterator[bytes]:
    head = _head("cmpl", "text_completion", answered)
    for choice in answered.choices:
        yield _event({**head, "choices": [_text_choice(choice, answered, request)]}, request)
    yield from _last_events(head, answered, request)


def _last_events(head: dict[str, Any], answered: Answered, request: Request) -> Iterator[bytes]:
    if request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": answered.usage()}, None)
    yield DONE


def _event(body: dict[str, Any], request: Request | None) -> bytes:
    if request is not None and request.stream_options.include_usage:
        body["usage"] = None  # as the API has it, where the last event has the usage
    return b"data: " + to_bytes(body) + b"\n\n"


def to_bytes(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def _head(prefix: str, kind: str, answered: Answered) -> dict[str, Any]:
    identity = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": answered.model}


def _body(prefix: str, kind: str, answered: Answered, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {**_head(prefix, kind, answered), "choices": choices, "usage": answered.usage()}


def _part(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _text_choice(choice: Choice, answered: Answered, request: TextRequest) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.content,
        "logprobs": _text_logprobs(choice.completion, answered, request),
        "finish_reason": choice.finish_reason,
        **_token_ids(choice, request),
        **_prompt_ids(choice.prompt, answered, request),
    }


def _calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


def _token_ids(choice: Choice, request: Request) -> dict[str, Any]:
    return {"token_ids": choice.completion.token_ids.tolist()} if request.return_token_ids else {}


def _prompt_ids(prompt: int, answered: Answered, request: Request) -> dict[str, Any]:
    return {"prompt_token_ids": answered.prompts[prompt].tolist()} if request.return_token_ids else {}


def _chat_logprobs(completion: Completion, answered: Answered, request: ChatRequest) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    tokenizer = None if request.return_tokens_as_token_ids else answered.tokenizer
    return {"content": _contents(completion, tokenizer), "refusal": None}


def _contents(completion: Completion, tokenizer: Any) -> list[dict[str, Any]]:
    """Without a tokenizer a token is written by its id."""
    found: list[dict[str, Any]] = []
    for token_id, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
        token = f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id])
        found.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return found


def _text_logprobs(completion: Completion, answered: Answered, request: TextRequest) -> dict[str, Any] | None:
    if request.logprobs is None:
        return None
    tokenizer = None if request.return_tokens_as_token_ids else answered.tokenizer
    tokens = [entry["token"] for entry in _contents(completion, tokenizer)]
    offsets = [0, *accumulate(map(len, tokens))][:-1]
    logprobs = completion.logprobs.tolist()
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
