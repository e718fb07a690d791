"""What the endpoint understands and says: requests of the OpenAI API read into types, answers written from completions.

A parameter that this endpoint cannot honour is refused by its name, never ignored. ``LABELS`` only describe a request; ``NEUTRAL``
parameters are accepted with the value that asks for nothing, which some clients always send.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_ALTOGETHER = 4096  # choices of all prompts of a request
MAX_STOPS = 16
TEXT_TOKENS = 16  # the API's default for /v1/completions
LARGEST_SEED = 1 << 63
LABELS = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "cache_salt",
    "priority",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"), "echo": (False,), "best_of": (1,), "suffix": ("",), "top_logprobs": (0,),
    "parallel_tool_calls": (True,), "prompt_logprobs": (0,), "skip_special_tokens": (True,), "ignore_eos": (False,),
    "include_stop_str_in_output": (False,), "detokenize": (True, False), "features": (), "kv_transfer_params": (),
}  # fmt: skip
SAMPLING = ("n", "temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed", "logprobs")
OUTPUT = ("model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids")
CHAT = (*SAMPLING, *OUTPUT, "messages", "max_completion_tokens", "tools", "tool_choice")
TEXT = (*SAMPLING, *OUTPUT, "prompt")
GENERATE = ("model", "request_id", "token_ids", "sampling_params", "stream")
ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(Exception):  # noqa: N818 - an answer, not a defect
    """An answer with an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> Refused:
    return Refused(400, f"{param} {message}", code="invalid_value", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How to sample and what to say of it. None: the server's own."""

    n: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool  # a token is written as "token_id:7"
    stream: bool
    usage: bool  # at the end of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: tuple[dict[str, Any], ...]  # as chat templates take them
    tools: tuple[dict[str, Any], ...]
    finds_calls: bool  # false: a call in the answer stays text
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    prompts: tuple[str | tuple[int, ...], ...]
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    token_ids: tuple[int, ...]
    request_id: str | None
    wanted: Wanted


# Reading


def read_json(body: bytes) -> dict[str, Any]:
    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        given = json.loads(body, parse_constant=constant)
    except RecursionError:
        raise Refused(400, "the body has lists or maps too deep in each other", code="invalid_json") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise Refused(400, f"the body is a {type(given).__name__}; send one JSON object", code="invalid_json")
    return given


def read_chat(given: dict[str, Any]) -> ChatRequest:
    fields = _fields(given, CHAT)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", 'must be a list of messages, such as [{"role": "user", "content": "hello"}]')
    tools = _tools(fields.get("tools"))
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise invalid("tool_choice", f"is {_shown(choice)}; this endpoint does auto and none: the model decides itself")
    if (most := fields.get("max_completion_tokens")) is not None and fields.setdefault("max_tokens", most) != most:
        raise invalid(
            "max_completion_tokens", f"is {_shown(most)}, and max_tokens is {_shown(fields['max_tokens'])}; give one"
        )
    logprobs = _flag(fields, "logprobs")
    read = tuple(_message(message, place) for place, message in enumerate(messages))
    return ChatRequest(
        messages=_with_names(read),
        tools=tools,
        finds_calls=bool(tools) and choice == "auto",
        wanted=_wanted(fields, logprobs),
    )


def read_text(given: dict[str, Any]) -> TextRequest:
    fields = _fields(given, TEXT)
    logprobs = fields.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or logprobs != 0):
        raise invalid("logprobs", f"is {_shown(logprobs)}; give 0: this endpoint has the log-prob of the sampled token")
    prompt = fields.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_PROMPTS:
        raise invalid("prompt", f"must be text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these")
    read = tuple(_prompt(one) for one in prompts)
    fields.setdefault("max_tokens", TEXT_TOKENS)
    wanted = _wanted(fields, logprobs is not None)
    if wanted.n * len(read) > MAX_ALTOGETHER:
        raise invalid("n", f"is {wanted.n} for {len(read)} prompts; one request has at most {MAX_ALTOGETHER} choices")
    return TextRequest(prompts=read, wanted=wanted)


def read_generate(given: dict[str, Any]) -> GenerateRequest:
    fields = _fields(given, GENERATE)
    params = fields.get("sampling_params", {})
    if not isinstance(params, dict):
        raise invalid("sampling_params", f"is {_shown(params)}; it must be a map")
    if _flag(fields, "stream"):
        raise invalid("stream", "is true; /inference/v1/generate answers in one piece")
    sampling = _fields(params, SAMPLING, within="sampling_params.")
    logprobs = sampling.pop("logprobs", None)
    if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
        raise invalid("sampling_params.logprobs", f"is {_shown(logprobs)}; give 0 or 1: the sampled token's alone")
    token_ids = fields.get("token_ids")
    if not _are_ids(token_ids) or not token_ids:
        raise invalid("token_ids", "must be a list of one or more token ids")
    request_id = fields.get("request_id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= 200):
        raise invalid("request_id", "must be text of at most 200 characters")
    wanted = _wanted(sampling, logprobs is not None, within="sampling_params.")
    return GenerateRequest(token_ids=tuple(token_ids), request_id=request_id, wanted=wanted)


def _fields(given: Mapping[str, Any], known: Sequence[str], *, within: str = "") -> dict[str, Any]:
    """Without nulls, labels and neutral values; refuses what is unknown."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in LABELS:
            continue
        if name in known:
            found[name] = value
        elif name not in NEUTRAL:
            raise Refused(
                400,
                f"{within}{name[:60]} is not a parameter of this endpoint; leave it out",
                code="unknown_parameter",
                param=f"{within}{name[:60]}",
            )
        elif value not in NEUTRAL[name]:
            ways = " or ".join(json.dumps(one) for one in NEUTRAL[name])
            raise invalid(f"{within}{name}", f"is {_shown(value)}; this endpoint cannot do that: {_do(ways)}")
    return found


def _do(ways: str) -> str:
    return f"give {ways}, or leave it out" if ways else "leave it out"


def _wanted(fields: Mapping[str, Any], logprobs: bool, *, within: str = "") -> Wanted:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise invalid("stream_options", f'is {_shown(options)}; it may have "include_usage"')
    top_k = _whole(fields, "top_k", -1, 1 << 31, within=within)
    return Wanted(
        n=_whole(fields, "n", 1, MAX_CHOICES, within=within) or 1,
        temperature=_number(fields, "temperature", 0.0, 100.0, within=within),
        top_p=_number(fields, "top_p", 1e-6, 1.0, within=within),
        top_k=None if top_k is None else max(top_k, 0),
        max_tokens=_whole(fields, "max_tokens", 1, 1 << 31, within=within),
        stop=_stops(fields.get("stop"), within=within),
        stop_token_ids=_stop_ids(fields.get("stop_token_ids"), within=within),
        seed=_whole(fields, "seed", -LARGEST_SEED, LARGEST_SEED - 1, within=within),
        logprobs=logprobs,
        token_ids=_flag(fields, "return_token_ids"),
        tokens_as_ids=_flag(fields, "return_tokens_as_token_ids"),
        stream=_flag(fields, "stream"),
        usage=_flag(options, "include_usage"),
    )


def _whole(fields: Mapping[str, Any], name: str, least: int, most: int, *, within: str) -> int | None:
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise invalid(f"{within}{name}", f"is {_shown(value)}; it must be a whole number from {least} to {most}")
    return value


def _number(fields: Mapping[str, Any], name: str, least: float, most: float, *, within: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise invalid(f"{within}{name}", f"is {_shown(value)}; it must be a number from {least:g} to {most:g}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, f"is {_shown(value)}; it must be true or false")
    return value


def _stops(value: Any, *, within: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid(f"{within}stop", f"must be text, or a list of at most {MAX_STOPS} texts")
    if any(not isinstance(stop, str) or not 0 < len(stop) <= 1000 for stop in stops):
        raise invalid(f"{within}stop", "must hold texts of 1 to 1000 characters")
    return tuple(_text(stop, f"{within}stop") for stop in stops)


def _stop_ids(value: Any, *, within: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not (_are_ids(value) or not value) or len(value) > MAX_PROMPTS:
        raise invalid(f"{within}stop_token_ids", f"must be a list of at most {MAX_PROMPTS} token ids")
    return tuple(value)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return _text(value, "prompt")
    if _are_ids(value) and value:
        return tuple(value)
    raise invalid("prompt", f"has {_shown(value)}; each prompt is text or a list of token ids, and not empty")


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # a bool is no id
        return False
    return not value or (min(value) >= 0 and max(value) < 1 << 31)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(where, "has half of a surrogate pair, which is no character; send whole characters") from None
    return value


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:80]
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


# Messages


def _message(given: Any, place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise invalid(where, f"must be a map with a role: {', '.join(ROLES)}")
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            if not isinstance(given[name], str):
                raise invalid(f"{where}.{name}", "must be text")
            message[name] = _text(given[name], f"{where}.{name}")
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise invalid(f"{where}.tool_calls", "must be a list, in a message of the assistant")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if given.get("function_call") is not None:
        raise invalid(f"{where}.function_call", "is the old way to call tools; send tool_calls")
    if role in ("user", "tool", "system") and given.get("content") is None:
        raise invalid(f"{where}.content", f"is missing; a message of role {given['role']} has text")
    return message


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value, f"{where}.content")
    if not isinstance(value, list):
        raise invalid(f"{where}.content", f"is {_shown(value)}; it must be text, or a list of text parts")
    parts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise invalid(f"{where}.content", f"has a part {_shown(kind)}; this endpoint reads text alone")
        parts.append(_text(text, f"{where}.content"))
    return "".join(parts)


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{}"}}')
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        _text(arguments, where)
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            pass  # the model wrote no JSON: a template shows it as it is
    _text(json.dumps(arguments, ensure_ascii=False), where)  # what was escaped in it too
    name = _text(function["name"], where)
    identity = given.get("id")
    return {
        "id": _text(identity, where) if isinstance(identity, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _with_names(messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """A tool's message names its call; templates want the name of the tool."""
    names = {call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid("tools", "must be a list")
    for place, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(
                f"tools[{place}]", 'must be {"type": "function", "function": {"name": ..., "parameters": {}}}'
            )
    _text(json.dumps(value, ensure_ascii=False), "tools")
    return tuple(value)


def finite(value: Any) -> TypeGuard[float]:
    """Also as a float, which a whole number may be too large for."""
    is_number = not isinstance(value, bool) and isinstance(value, int | float)
    return is_number and abs(value) <= sys.float_info.max
