"""TRL's class convention: ``reset(**row)``, public methods as tools, ``get_reward()``. Runs in the environment's process.

Each process has one instance of the class and resets it between episodes. A turn without a call ends the episode. This module
imports only the standard library, because environment processes have to be small.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollcall.base.importing import load_named
from rollcall.environments.calls import Call, CallFormat, parse_calls
from rollcall.environments.stepwise import WrongResult, class_at, number
from rollcall.environments.tools import (
    Tool,
    WrongArguments,
    check_arguments,
    cut_end,
    describe,
    tool_of,
    tools_of_class,
)

MAX_RESULT_CHARS = 1_000_000  # per tool call


@dataclass(slots=True, kw_only=True)
class ClassPlayer:
    """A class with its tools and optional functions, or functions only. Forked processes play its episodes. ``examine`` receives an
    exception that a tool raised, and ``run`` waits for the result of an async method."""

    cls: type | None
    kwargs: Mapping[str, Any]
    tools: dict[str, Tool]
    functions: dict[str, Callable[..., Any]]
    call_format: CallFormat
    is_chat: bool  # whether the model has a chat template
    instance: Any = None
    examine: Callable[[BaseException], None] = lambda error: None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the tool schemas for the chat template."""
        return [] if self.call_format == "text" else [tool.schema for tool in self.tools.values()]

    def reset(self, row: Mapping[str, Any], run: Callable[[Any], Any]) -> str | None:
        text = None
        if self.cls is not None:
            if self.instance is None:
                self.instance = self.cls(**self.kwargs)
            text = run(self.instance.reset(**_taken(self.instance.reset, row)))
        if text is not None and not isinstance(text, str):
            raise WrongResult(f"reset returned {type(text).__name__}; return a string or None")
        if self.is_chat and self.call_format == "text" and self.tools:  # the template does not describe the tools
            return f"{text or ''}\n\n{describe(self.tools)}"
        return text

    def step(self, text: str, token_ids: list[int], run: Callable[[Any], Any]) -> dict[str, Any]:
        names = {name: tuple(tool.hints) for name, tool in self.tools.items()}
        made = [self._answer(call, run) for call in parse_calls(text, call_format=self.call_format, tools=names)]
        calls = [each | {"result": cut_end(each["result"], 10_000)} for each in made]
        return {"messages": self._messages(made), "done": not made, "reward": None, "metrics": {}, "calls": calls}

    def reward(self, run: Callable[[Any], Any]) -> float | None:
        get_reward = getattr(self.instance, "get_reward", None)
        return None if get_reward is None else number(run(get_reward()), what="get_reward returned")

    def _answer(self, call: Call, run: Callable[[Any], Any]) -> dict[str, Any]:
        """Run a tool call. If the tool raises, the model reads the error, except that a MemoryError ends the episode, because the process
        is unreliable then."""
        error, result = "", ""
        try:
            if call.error:
                raise WrongArguments(call.error)
            if (tool := self.tools.get(call.name)) is None:
                there_are = ", ".join(self.tools) or "none"
                raise WrongArguments(f"there is no tool {call.name[:80]!r}; the tools are {there_are}")
            function = self.functions.get(call.name) or getattr(self.instance, call.name)
            result = run(function(**check_arguments(tool, call.arguments)))
            if not isinstance(result, str):
                result = json.dumps(result, default=str, ensure_ascii=False)
            if (size := len(result)) > MAX_RESULT_CHARS:
                raise WrongArguments(f"the result has {size:,} characters; at most {MAX_RESULT_CHARS:,} are allowed")
        except MemoryError:
            raise
        except WrongArguments as wrong:
            error = str(wrong)
        except Exception as raised:  # noqa: BLE001 - a tool may raise anything
            self.examine(raised)
            # Tools raise ValueError to explain what is wrong, so the name of the exception adds nothing.
            is_plain = type(raised) is ValueError and str(raised)
            error = str(raised) if is_plain else f"{type(raised).__name__}: {raised}".removesuffix(": ")
        if error:
            result = json.dumps({"error": error[:10_000]}, ensure_ascii=False)
        return {"name": call.name, "arguments": call.arguments, "result": result, "failed": bool(error)}

    def _messages(self, made: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Return the results as messages. If the chat template has no tool role, join them: it often rejects two user messages in a row.
        Without a chat template, the results follow the model's text directly, so put them on separate lines."""
        if self.call_format != "text":
            return [{"role": "tool", "content": each["result"], "name": each["name"]} for each in made]
        if not made:
            return []
        lines = [each["result"] if len(made) == 1 else f"{each['name'] or 'error'}: {each['result']}" for each in made]
        text = "\n".join(lines)
        return [{"role": "user", "content": text if self.is_chat else f"\n{text}\n", "name": ""}]


def load_class(
    path: str | None,
    *,
    key: str,
    kwargs: Mapping[str, Any],
    functions: list[str],
    call_format: CallFormat,
    is_chat: bool,
) -> ClassPlayer:
    """Load a class and functions as tools. If one of them is unusable, raise a ValueError that says what to do."""
    tools: dict[str, Tool] = {}
    cls: Any = None
    if path is not None:
        wanted = "use a class with a method reset(self, **row) -> str | None that begins an episode"
        cls = class_at(path, key=key, kwargs=kwargs, methods=["reset"], wanted=wanted)
        tools |= tools_of_class(cls, path=path)
    found: dict[str, Callable[..., Any]] = {}
    for index, each in enumerate(functions):
        named = f"environment.tools.{index}"
        function = load_named(each, key=named, what="function", example="my_tools:search")
        if not callable(function) or inspect.isclass(function):
            raise ValueError(f"{named}={each!r} is not a function; name a function with type hints and a docstring")
        tool = tool_of(function, path=each)
        if tool.name in tools:
            raise ValueError(f"{named}={each!r}: there is already a tool {tool.name}; rename one of them")
        tools[tool.name], found[tool.name] = tool, function
    return ClassPlayer(cls=cls, kwargs=kwargs, tools=tools, functions=found, call_format=call_format, is_chat=is_chat)


def _taken(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that ``reset`` accepts."""
    parameters = inspect.signature(reset).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(row)
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return {name: value for name, value in row.items() if name in names}
