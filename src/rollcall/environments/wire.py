"""Request formats of the OpenAI API, and the format in which a program reports its reward.

A parameter that this endpoint does not support is refused by name, never ignored. Parameters in ``LABELS`` only label a request, so any
value is accepted. ``NEUTRAL`` parameters, which some clients always send, must have a value that has no effect. A list is checked only
up to its first error.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from rollcall.reward.functions import LARGEST_SCORE

MAX_PROMPTS = 256
LABELS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority"
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"), "echo": (False,), "best_of": (1,), "suffix": ("",), "top_logprobs": (0,),
    "parallel_tool_calls": (True,), "prompt_logprobs": (0,), "skip_special_tokens": (True,), "ignore_eos": (False,),
    "include_stop_str_in_output": (False,), "detokenize": (True, False), "features": (), "kv_transfer_params": (),
}  # fmt: skip


class Refused(Exception):  # noqa: N818 - a response, not a bug
    """An error response in OpenAI's format."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> Refused:
    return Refused(400, f"{param} {message}", code="invalid_value", param=param)


# Requests

Limit = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]


class _Parameters(BaseModel):
    """Refuses unknown parameters; leaves out nulls, labels and neutral values."""

    model_config = ConfigDict(frozen=True)
    within: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given  # refused by pydantic
        for name, value in given.items():
            if value is None or name in LABELS or name in cls.model_fields:
                continue
            param = f"{cls.within}{name[:60]}"
            if name not in NEUTRAL:
                message = f"{param} is not a parameter of this endpoint; leave it out"
                raise Refused(400, message, code="unknown_parameter", param=param)
            if value not in NEUTRAL[name]:
                ways = " or ".join(json.dumps(one) for one in NEUTRAL[name])
                instead = f"send {ways}, or leave it out" if ways else "leave it out"
                raise invalid(param, f"is {_shown(value)}, which this endpoint does not support; {instead}")
        return {name: value for name, value in given.items() if value is not None}


class Wanted(_Parameters):
    """Sampling parameters. The server chooses those that are None."""

    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(strict=True, ge=1e-6, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=1 << 31), AfterValidator(lambda top_k: max(top_k, 0))] | None = None
    max_tokens: Limit | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=16, fail_fast=True),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] = []
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class StreamOptions(_Parameters):
    within = "stream_options."
    include_usage: StrictBool = False


class _Request(Wanted):
    """A request whose answer is text."""

    model: str | None = None
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False  # a token is written as "token_id:7"


def _text_of(content: Any) -> Any:
    """Join the parts of a list into one string."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        text = part.get("text", part.get("refusal")) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise _wrong(f"has a part of type {_shown(kind)}; this endpoint accepts only text")
        texts.append(text)
    return "".join(texts)


def _read_arguments(given: Any) -> Any:
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            return given  # the model did not write JSON, so the template shows the text as it is
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _wrong("has half of a surrogate pair, which is not a character; send whole characters") from None
    return given


class Function(BaseModel):
    name: str
    arguments: Annotated[Any, BeforeValidator(_read_arguments)] = Field({}, description="a JSON object, as text")


class ToolCall(BaseModel):
    id: Annotated[str, BeforeValidator(lambda given: given or "")] = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """A message. Any other fields, such as `refusal`, are ignored, because the model does not read them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: Any = None

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.function_call is not None:
            raise _wrong("has function_call, which is deprecated; send tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise _wrong(f"has tool_calls, but its role is {self.role}; only the assistant can call tools")
        if self.content is None and self.role != "assistant":
            raise _wrong(f"has no content; a message with the role {self.role} needs text")
        return self


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong('must be {"type": "function", "function": {"name": ..., "parameters": {}}}')
    return tool


class ChatRequest(_Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description='a list of messages, such as [{"role": "user", "content": "hello"}]'
    )
    max_completion_tokens: Limit | None = None
    tools: Annotated[list[Annotated[dict[str, Any], AfterValidator(_check_tool)]], Field(fail_fast=True)] = []
    tool_choice: Literal["auto", "none"] = Field("auto", description="the model decides whether to call tools")
    logprobs: StrictBool = False

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        most = self.max_completion_tokens
        if most is not None and self.max_tokens not in (None, most):
            raise invalid(
                "max_completion_tokens", f"is {most}, but max_tokens is {self.max_tokens}; send only one of them"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def finds_calls(self) -> bool:
        """Return whether to parse calls. Otherwise, a call in the answer stays text."""
        return bool(self.tools) and self.tool_choice == "auto"

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in the format for chat templates. Tool messages contain a call ID, but templates need the tool's name."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        found: list[dict[str, Any]] = []
        for message in self.messages:
            role = "system" if message.role == "developer" else message.role
            plain: dict[str, Any] = {"role": role, "content": message.content or ""}
            if name := message.name or (names.get(message.tool_call_id or "") if role == "tool" else None):
                plain["name"] = name
            if message.tool_call_id is not None:
                plain["tool_call_id"] = message.tool_call_id
            if message.tool_calls:
                plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            found.append(plain)
        return found


def _read_prompts(given: Any) -> list[str | list[int]]:
    prompts = [given] if isinstance(given, str) or _are_ids(given) else given
    if (
        not isinstance(prompts, list)
        or not 0 < len(prompts) <= MAX_PROMPTS
        or not all(prompt and (isinstance(prompt, str) or _are_ids(prompt)) for prompt in prompts)
    ):
        raise _wrong(f"must be text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these, none of them empty")
    return prompts


def _are_ids(value: Any) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # a bool is not an ID
        return False
    return not value or (min(value) >= 0 and max(value) < 1 << 31)


class TextRequest(_Request):
    prompt: Annotated[list[str | list[int]], PlainValidator(_read_prompts)]
    max_tokens: Limit | None = 16  # the API's default
    logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = Field(
        None, description="0 returns the log-prob of the sampled token"
    )


class SamplingParams(Wanted):
    within = "sampling_params."
    logprobs: Annotated[StrictInt, Field(ge=0, le=1)] | None = None  # for the sampled token


class GenerateRequest(_Parameters):
    """Token ids in, token ids out."""

    model: str | None = None
    request_id: Annotated[str, Field(max_length=200)] | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    sampling_params: SamplingParams = SamplingParams()
    stream: Literal[False] = Field(False, description="/inference/v1/generate does not stream")


# Rewards


def _check_metrics(given: dict[str, Any]) -> dict[str, float]:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e308:
            raise _wrong(f"must be a map of names to finite numbers, but {_shown(name)} is {_shown(value)}")
    return given


class Worth(BaseModel):
    """``{"reward": 1.0, "metrics": {"steps": 3}}``"""

    reward: Annotated[float, Field(strict=True, ge=-LARGEST_SCORE, le=LARGEST_SCORE)]
    metrics: Annotated[dict[str, Any], AfterValidator(_check_metrics)] | None = None


# Reading

T = TypeVar("T", bound=BaseModel)


def read(kind: type[T], body: bytes) -> T:
    """Parse a request's body. Raise Refused if it is invalid."""
    try:
        return kind.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)[0], kind) from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _refused(error: Any, kind: type[BaseModel]) -> Refused:
    """Convert one of pydantic's errors to a response."""
    if not error["loc"]:
        return Refused(400, f"the body is a {type(error['input']).__name__}; send one JSON object", code="invalid_json")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])[1:]
    if error["type"] == "refused":
        return invalid(param, error["msg"])
    wanted = kind.model_fields[error["loc"][0]].description if len(error["loc"]) == 1 else ""
    hint = f" ({wanted})" if wanted else ""
    if error["type"] == "missing":
        return invalid(param, f"is missing{hint}")
    return invalid(param, f"is {_shown(error['input'])}; {error['msg'][0].lower()}{error['msg'][1:]}{hint}")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:80]
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
