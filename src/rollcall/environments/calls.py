"""Parses tool calls from model output.

``hermes``   ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``, any number of times anywhere in the text.
``llama``    ``{"name": "add", "parameters": {"a": 1}}`` as the full text or after ``<|python_tag|>``. Several calls are separated by
             ``;`` or whitespace, or form a list.
``text``     a separate line, ``add(a=1, b="x")`` or ``add: {"a": 1}``, that begins with a tool's name. The arguments in parentheses
             are Python literals, by keyword or in the order of the tool's arguments. Nothing is ever evaluated.

Text before ``</think>`` never contains a call. A call that cannot be parsed becomes a ``Call`` with an ``error`` for the model. The text
is untrusted, so parsing takes linear time and limits the depth and size of JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from rollcall.base.errors import ConfigError

CallFormat = Literal["hermes", "llama", "text"]
MAX_CALLS = 64  # per turn
MAX_DEPTH = 32  # of a call's JSON
_MAX_CALL_CHARS = 100_000
_MAX_LINE_CHARS = 10_000
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]++|<\|python_tag\|>|<\|eom_id\|>|<\|eot_id\|>)*+")
_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    name: str  # empty if the call could not be parsed
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # tells the model why the call cannot be made
    id: str = ""  # set in the endpoint's answers


class _Unreadable(ValueError):
    """Tells the model why a call cannot be parsed."""


def format_of(chat_template: str | Mapping[str, str] | None) -> CallFormat:
    """Return the call format of a model with this chat template. Raise ConfigError if the format is unknown."""
    if isinstance(chat_template, Mapping):  # several templates; transformers uses this one if a chat has tools
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    template = chat_template or ""
    if _OPEN in template and "<function=" not in template:
        return "hermes"
    if _PYTHON_TAG in template or ("tools" in template and '"parameters"' in template and _OPEN not in template):
        return "llama"
    if re.search(r"\btools\b", template):
        raise ConfigError(
            "environment.call_format=auto: the chat template supports tools, but its calls are neither Qwen's (<tool_call> with JSON) "
            "nor Llama's; set environment.call_format to hermes, llama or text, and describe the format to the model in the prompt"
        )
    return "text"


def parse_calls(text: str, *, call_format: CallFormat, tools: Mapping[str, Sequence[str]]) -> list[Call]:
    """Find the calls in a text, in order. ``tools`` maps each tool's name to the names of its arguments, in order."""
    _, thought, said = text.rpartition(_THOUGHT)
    if not thought and text.lstrip().startswith(_THINK):
        return []
    calls = list(islice({"hermes": _hermes, "llama": _llama, "text": _lines}[call_format](said, tools), MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        calls[-1] = Call(name="", error=f"more than {MAX_CALLS} calls in one turn; the rest were ignored")
    return calls


def _hermes(text: str, tools: Mapping[str, Sequence[str]]) -> Iterator[Call]:
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        try:
            yield _call(_load(text[start : end if end >= 0 else start + _MAX_CALL_CHARS + 1].strip()))
        except _Unreadable as error:
            why = str(error) if end >= 0 else f"{_OPEN} without {_CLOSE}"
            example = '{"name": "...", "arguments": {...}}'
            yield Call(name="", error=f"the call cannot be read: {why}; write {_OPEN}{example}{_CLOSE}")
        if end < 0:
            return
        at = end + len(_CLOSE)


def _llama(text: str, tools: Mapping[str, Sequence[str]]) -> Iterator[Call]:
    tag = text.find(_PYTHON_TAG)
    is_tagged = tag >= 0
    body = text[tag + len(_PYTHON_TAG) :] if is_tagged else text
    at = _skip(body, 0)
    if not is_tagged and body[at : at + 1] not in ("{", "["):
        return
    is_first = True
    while at < len(body):
        try:
            found, at = _decode(body, at)
            calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
        except _Unreadable as error:
            # A model may answer with JSON that is not a call, or add text after a call.
            if is_first and (is_tagged or '"name"' in body[:_MAX_CALL_CHARS]):
                example = '{"name": "...", "parameters": {...}}'
                yield Call(name="", error=f"the call cannot be read: {error}; write {example}")
            return
        yield from calls
        is_first = False
        at = _skip(body, at)


def _skip(body: str, at: int) -> int:
    match = _BETWEEN.match(body, at)
    return match.end() if match else at


def _lines(text: str, tools: Mapping[str, Sequence[str]]) -> Iterator[Call]:
    if not tools:
        return
    names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True))
    for match in re.finditer(rf"^[ \t]*+({names})(\(|: ?\{{)", text, re.MULTILINE):
        end = text.find("\n", match.end())
        line = text[match.start(1) : end if end >= 0 else len(text)].rstrip()
        name = match[1]
        if not line.endswith(")" if match[2] == "(" else "}"):
            continue  # an ordinary sentence that begins with a tool's name
        try:
            yield Call(name=name, arguments=_line_arguments(line, name, is_json=match[2] != "(", names=tools[name]))
        except _Unreadable as error:
            yield Call(
                name=name, error=f'the call cannot be read: {error}; write {name}(argument=1, other="x") on a line'
            )


def _line_arguments(line: str, name: str, *, is_json: bool, names: Sequence[str]) -> dict[str, Any]:
    if len(line) > _MAX_LINE_CHARS:
        raise _Unreadable(f"it has more than {_MAX_LINE_CHARS} characters")
    if is_json:
        found = _load(line[len(name) + 1 :].strip())
        assert isinstance(found, dict), "it begins with a brace"
        return found
    try:
        with warnings.catch_warnings(action="ignore"):  # the parser warns about the model's text
            call = ast.parse(line, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _Unreadable("it is not a call in Python syntax") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _Unreadable("it is more than one call")
    if len(call.args) > len(names):
        raise _Unreadable(f"{name} takes {len(names)} arguments, but the call has {len(call.args)}")
    given = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    arguments: dict[str, Any] = {}
    for key, node in given:
        if key is None or key in arguments:
            raise _Unreadable(f"argument {key} is given twice" if key else "** is not allowed")
        try:
            arguments[key] = _plain(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise _Unreadable(f"argument {key} is not a number, text in quotes, or a list of these") from None
    return arguments


# JSON


def _load(text: str) -> Any:
    found, end = _decode(text, 0)
    if end != len(text):
        raise _Unreadable("it has text after its JSON")
    return found


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``at`` and the position where it ends."""
    part = text if at == 0 and len(text) <= _MAX_CALL_CHARS else text[at : at + _MAX_CALL_CHARS]
    try:
        found, end = json.JSONDecoder().raw_decode(part)
    except RecursionError:
        raise _Unreadable(f"its JSON is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        is_long = len(part) == _MAX_CALL_CHARS < len(text) - at
        why = getattr(error, "msg", str(error))
        raise _Unreadable(
            f"it has more than {_MAX_CALL_CHARS} characters" if is_long else f"it is not JSON ({why})"
        ) from None
    return _plain(found), at + end


def _plain(value: Any, depth: int = 0) -> Any:
    """Check that a value contains only JSON types. Raise _Unreadable for deep nesting or a non-finite number (Python parses NaN)."""
    if depth > MAX_DEPTH:
        raise _Unreadable(f"its JSON is nested more than {MAX_DEPTH} deep")
    if value is None or (isinstance(value, bool | int) and abs(value) < 1 << 63):  # other formats can store it too
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # replaces lone surrogates
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_plain(key): _plain(each, depth + 1) for key, each in value.items()}
    raise _Unreadable("it has a value that JSON cannot represent, or a number that is too large")


def _call(found: Any) -> Call:
    """Build a call from ``{"name": ..., "arguments": {...}}``. Some models write ``parameters``, or the arguments as a string."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise _Unreadable('it has no "name"')
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = _load(arguments.strip() or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _Unreadable('its "arguments" are not an object')
    return Call(name=found["name"], arguments=arguments)
