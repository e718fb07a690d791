"""The class convention: which columns and tools a class gets, and what the model reads."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from rollcall.environments.class_env import ClassPlayer, load_class

MODULE = "tests.environments_of_users"


def run(returned: Any) -> Any:
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def player(path: str | None, *functions: str, call_format: Any = "text", is_chat: bool = True) -> ClassPlayer:
    key = "environment.path"
    return load_class(path, key=key, kwargs={}, functions=list(functions), call_format=call_format, is_chat=is_chat)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{MODULE}:Gone", "has no 'Gone'; it defines"),
        (f"{MODULE}:NoReset", "has no reset; use a class"),
        (f"{MODULE}:Needs", "set environment.kwargs to the arguments of its __init__"),
        (f"{MODULE}:add", "not a class"),
        (f"{MODULE}:GuessPlainly", "needs type: step"),
        (MODULE, "does not have the form module:Class; write for example my_env:Game"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_what_to_do(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        player(path)


def test_a_function_that_cannot_be_a_tool_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="untold has no docstring; write one"):
        player(None, f"{MODULE}:untold")
    with pytest.raises(ValueError, match="environment.tools.0=.*there is already a tool ask"):
        player(f"{MODULE}:Secret", f"{MODULE}:ask")
    with pytest.raises(ValueError, match="environment.tools.0=.*is not a function"):
        player(None, f"{MODULE}:Plain")


def test_reset_gets_the_columns_that_it_takes() -> None:
    plain = player(f"{MODULE}:Plain", is_chat=False)
    assert plain.reset({"prompt": "p", "answer": "a", "other": 1}, run) is None
    assert plain.step("look()", [], run)["messages"] == [{"role": "user", "content": "\np a\n", "name": ""}]
    assert plain.reward(run) is None


def test_functions_alone_are_an_environment_and_a_template_without_tools_is_told_of_them_in_the_prompt() -> None:
    functions = player(None, f"{MODULE}:add")
    text = functions.reset({"prompt": "p"}, run)
    assert text is not None and "add(a: integer, b: integer): Add two numbers." in text and "  b: The second." in text
    result = functions.step("add(1, b=2)\nadd(a=5, b=5)", [], run)
    assert result["messages"] == [{"role": "user", "content": "add: 3\nadd: 10", "name": ""}]
    assert functions.step("3, of course", [], run)["done"]


def test_what_is_wrong_with_a_call_is_told_to_the_model() -> None:
    secret = player(f"{MODULE}:Secret", call_format="hermes")
    secret.reset({"answer": "7"}, run)
    calls = {
        '{"name": "ask", "arguments": {"times": "many"}}': 'ask: times is \\"many\\"; it must be integer',
        '{"name": "ask", "arguments": {"often": 1}}': "ask has no argument 'often'; it takes times",
        '{"name": "guess"}': "there is no tool 'guess'; the tools are ask, ask_later, refuse",
        '{"name": "_hidden"}': "there is no tool '_hidden'",
        '{"name": "get_reward"}': "there is no tool 'get_reward'",
        '{"name": "ask_later", "arguments": {"unit": "h"}}': 'it must be \\"s\\" or \\"ms\\"',
        "{oops}": "the call cannot be read",
    }
    for body, told in calls.items():
        result = secret.step(f"<tool_call>{body}</tool_call>", [], run)
        assert not result["done"] and result["calls"][0]["failed"], body
        assert told in result["messages"][0]["content"], body
