"""Converts completions to response bodies and stream events of the OpenAI API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rollcall.base.types import Completion, Ints
from rollcall.environments.calls import Call
from rollcall.environments.wire import ChatRequest, GenerateRequest, TextRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a prompt."""

    index: int
    prompt: int  # the prompt's index in the request
    completion: Completion
    content: str  # the text without stop strings and calls
    calls: tuple[Call, ...]

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish.value

    def message(self, *, as_text: bool) -> dict[str, Any]:
        """Return the message. The arguments of its calls are a string, as in the API, or values, as in a parsed request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call in self.calls
                for arguments in [json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments]
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """All completions for a request."""

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
        message = choice.message(as_text=True) | {"refusal": None}
        if choice.calls and not choice.content:
            message["content"] = None
        part = {"index": choice.index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}
        if request.logprobs:
            part["logprobs"] = {"content": _tokens(choice, answered, request), "refusal": None}
        choices.append(part | _token_ids(choice, request))
    return _body("chatcmpl", "chat.completion", answered, choices) | _prompt_ids(0, answered, request)


def text_body(answered: Answered, request: TextRequest) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for choice in answered.choices:
        part = {"index": choice.index, "text": choice.content, "logprobs": None, "finish_reason": choice.finish_reason}
        if request.logprobs is not None:
            tokens = [entry["token"] for entry in _tokens(choice, answered, request)]
            part["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": choice.completion.logprobs.tolist(),
                "top_logprobs": None,
                "text_offset": [0, *accumulate(map(len, tokens))][:-1],
            }
        choices.append(part | _token_ids(choice, request) | _prompt_ids(choice.prompt, answered, request))
    body = _body("cmpl", "text_completion", answered, choices)
    return body | _prompt_ids(0, answered, request) if len(answered.prompts) == 1 else body


def generate_body(answered: Answered, request: GenerateRequest) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for choice in answered.choices:
        part = {"index": choice.index, "token_ids": choice.completion.token_ids.tolist(), "logprobs": None}
        if request.sampling_params.logprobs is not None:
            part["logprobs"] = {"content": _tokens(choice, answered, None)}
        choices.append(part | {"finish_reason": choice.finish_reason})
    head = {"request_id": request.request_id or f"gen-{secrets.token_hex(12)}", "model": answered.model}
    return {**head, "choices": choices, "usage": answered.usage()}


def events_of(body: dict[str, Any], *, has_usage: bool) -> Iterator[bytes]:
    """Yield the body as stream events. They start when the completion is finished, so each choice arrives in one piece."""
    head = {name: value for name, value in body.items() if name not in ("choices", "usage")}
    if has_usage:
        head["usage"] = None  # as in the API, where only the last event has the usage
    for choice in body["choices"]:
        parts = [choice]
        if "message" in choice:
            head["object"] = "chat.completion.chunk"
            delta = {name: value for name, value in choice["message"].items() if value is not None}
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
            said = {name: value for name, value in choice.items() if name != "message"}
            end = {"index": choice["index"], "delta": {}, "logprobs": None}
            parts = [said | {"delta": delta, "finish_reason": None}, end | {"finish_reason": choice["finish_reason"]}]
        for part in parts:
            yield _event({**head, "choices": [part]})
            head.pop("prompt_token_ids", None)  # only in the first event
    if has_usage:
        yield _event({**head, "choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_bytes(body) + b"\n\n"


def to_bytes(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def _body(prefix: str, kind: str, answered: Answered, choices: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    return {**head, "model": answered.model, "choices": choices, "usage": answered.usage()}


def _token_ids(choice: Choice, request: ChatRequest | TextRequest) -> dict[str, Any]:
    return {"token_ids": choice.completion.token_ids.tolist()} if request.return_token_ids else {}


def _prompt_ids(prompt: int, answered: Answered, request: ChatRequest | TextRequest) -> dict[str, Any]:
    return {"prompt_token_ids": answered.prompts[prompt].tolist()} if request.return_token_ids else {}


def _tokens(choice: Choice, answered: Answered, request: ChatRequest | TextRequest | None) -> list[dict[str, Any]]:
    """Return each sampled token with its log-prob. A token is shown as its ID if the request asks for this or has only IDs."""
    found: list[dict[str, Any]] = []
    completion, by_id = choice.completion, request is None or request.return_tokens_as_token_ids
    for token_id, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
        token = f"token_id:{token_id}" if by_id else answered.tokenizer.decode([token_id])
        found.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return found
