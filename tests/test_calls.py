"""Tool calls in what models write, in each format, and in rubbish."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcall.base.errors import ConfigError
from rollcall.environments.calls import MAX_CALLS, Call, CallFormat, format_of, parse_calls

TOOLS = {"add": ("a", "b"), "look": (), "add_more": ("a",)}
FORMATS: tuple[CallFormat, ...] = ("hermes", "llama", "text")


def parsed(text: str, call_format: CallFormat) -> list[Call]:
    return parse_calls(text, call_format=call_format, tools=TOOLS)


def plain(text: str, call_format: CallFormat) -> list[Any]:
    """(name, arguments), or "error"."""
    return ["error" if call.error else (call.name, call.arguments) for call in parsed(text, call_format)]


ADD = ("add", {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', [ADD]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call> and <tool_call>{"name": "look"}</tool_call>',
         [ADD, ("look", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', [ADD]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1, "b": "x"}}', [ADD]),
        ('<think>maybe <tool_call>{"name": "look"}</tool_call></think>no', []),
        ('<think>maybe <tool_call>{"name": "look"}</tool_call>', []),
        ("the answer is 7", []),
        ("<tool_call>add(1)</tool_call>", ["error"]),
        ("<tool_call>", ["error"]),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', ["error"]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', ["error"]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ["error"]),
        ('<tool_call>{"name": 7}</tool_call>', ["error"]),
        ('<tool_call>{"name": "look"} more</tool_call><tool_call>{"name": "look"}</tool_call>', ["error", ("look", {})]),
    ],
)  # fmt: skip
def test_hermes(text: str, calls: list[Any]) -> None:
    assert plain(text, "hermes") == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": "x"}}', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}<|eom_id|>', [ADD]),
        ('Let me see. <|python_tag|>{"name": "look", "parameters": {}}', [("look", {})]),
        ('{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}', [("look", {}), ("look", {})]),
        ('[{"name": "look"}, {"name": "add", "arguments": {"a": 1, "b": "x"}}]', [("look", {}), ADD]),
        ('{"name": "look", "parameters": {}} is what I call', [("look", {})]),
        ("the answer is 7", []),
        ('{"answer": 7}', []),
        ('{"name": "add", "parameters": {', ["error"]),
        ("<|python_tag|>print(1)", ["error"]),
    ],
)
def test_llama(text: str, calls: list[Any]) -> None:
    assert plain(text, "llama") == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('add(a=1, b="x")', [ADD]),
        ("I add.\n  add(1, 'x')  \nand wait", [ADD]),
        ('add: {"a": 1, "b": "x"}', [ADD]),
        ("look()\nadd_more([1, -2.5, None, True])", [("look", {}), ("add_more", {"a": [1, -2.5, None, True]})]),
        ("add_more(a=(1, {'x': 2}))", [("add_more", {"a": [1, {"x": 2}]})]),
        ("add(1, 2) gives 3", []),
        ("we add(1, 2)", []),
        ("note: {x}", []),
        ("add: the sum", []),
        ("added(1)", []),
        ("add(a=1, a=2)", ["error"]),
        ("add(1, a=2)", ["error"]),
        ("add(1, 2, 3)", ["error"]),
        ("add(**{'a': 1})", ["error"]),
        ("add(__import__('os').getpid())", ["error"]),
        ("add(a=b)", ["error"]),
        ("add(1) + add(2)", ["error"]),
        ("add(a={1, 2})", ["error"]),
        ("add(a=b'x')", ["error"]),
        ("add(a=1e999)", ["error"]),
        (f"add(a=0x{'f' * 4000})", ["error"]),
        (f"add(a={'[' * 90}{']' * 90})", ["error"]),
        ('add: {"a": }', ["error"]),
    ],
)
def test_text(text: str, calls: list[Any]) -> None:
    assert plain(text, "text") == calls


def test_a_turn_has_a_bounded_number_of_calls() -> None:
    calls = parsed("look()\n" * (MAX_CALLS + 5), "text")
    assert len(calls) == MAX_CALLS + 1 and "more than 64 calls" in calls[-1].error


def test_the_chat_template_says_how_calls_are_written() -> None:
    assert format_of(None) == format_of("{% for message in messages %}{{ message.content }}{% endfor %}") == "text"
    assert format_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    named = {"default": "{{ messages }}", "tool_use": "{% if tools %}<tool_call>{% endif %}"}
    assert format_of(named) == "hermes" and format_of({"default": "{{ messages }}"}) == format_of({}) == "text"
    assert format_of('{% if tools %}{"name": function name, "parameters": {}}{% endif %}') == "llama"
    with pytest.raises(ConfigError, match="environment.call_format=auto: .*set environment.call_format to hermes"):
        format_of("{% if tools %}[TOOL_CALLS]{% endif %}")
    with pytest.raises(ConfigError, match="call_format"):
        format_of("{% if tools %}<tool_call><function=name>{% endif %}")


RUBBISH = [
    "<tool_call>" * 90_000,
    "<tool_call>" + "[" * 1_000_000,
    "<tool_call>" * 40_000 + "</tool_call>" * 40_000,
    "<|python_tag|>" * 70_000,
    '<|python_tag|>{"name":' * 45_000,
    "{" * 1_000_000,
    '{"a":' * 200_000,
    "[" * 1_000_000,
    "add(" * 250_000 + ")",
    "add(" + "(" * 9_000 + ")",
    "add(" + "-" * 9_000 + "1)",
    "add(" + "1," * 4_500 + ")",
    "add(a='" + "\\" * 9_001 + "')",
    "\n" * 1_000_000,
    " " * 1_000_000 + "add(",
    "add: {" + '{"a":' * 1900 + "}",
    "<think>" * 140_000,
    "</think>" * 120_000,
    '{"name": "' + "\\" * 1_000_000,
    ";" * 1_000_000,
]


@pytest.mark.parametrize("text", RUBBISH, ids=range(len(RUBBISH)))
def test_a_megabyte_of_rubbish_is_read_and_nothing_is_called(text: str) -> None:
    for call_format in FORMATS:
        assert all(call.error for call in parsed(text, call_format))


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "add", "arguments": ', '{"a": 1}', "}", "add(", "a=1", ")", ": {", "\n", ";",
     "[", "]", '"', "\\", "\ud800", "1e9", "look()", "<think>", "</think>", ","]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join), st.sampled_from(FORMATS))
def test_any_text_gives_calls_that_json_can_hold(text: str, call_format: CallFormat) -> None:
    for call in parsed(text, call_format):
        json.dumps(call.arguments, allow_nan=False).encode()
        assert call.error or call.name


ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.integers(-(2**60), 2**60) | st.text(st.characters(codec="utf-8")) | st.lists(st.booleans()),
)


@settings(deadline=None)
@given(ARGUMENTS)
def test_what_is_written_well_is_read_as_it_was_meant(arguments: dict[str, Any]) -> None:
    body = json.dumps({"name": "add", "arguments": arguments})
    assert plain(f"So: <tool_call>{body}</tool_call>", "hermes") == [("add", arguments)]
    assert plain(body.replace('"arguments"', '"parameters"', 1), "llama") == [("add", arguments)]
    assert plain(f"add: {json.dumps(arguments)}", "text") == [("add", arguments)]
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    assert plain(f"Well.\nadd({written})", "text") == [("add", arguments)]
