"""Builds tool schemas from type hints and docstrings, and checks the arguments of tool calls against the hints.

The schemas match ``transformers.utils.get_json_schema``, the format for chat templates. We build them here because environment
processes have to be small and start fast, so they import only the standard library.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_JSON_TYPES: dict[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array", tuple: "array",
    dict: "object",
}  # fmt: skip
_SECTION = re.compile(r"\s*(Args|Returns|Raises):(.*)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(\[[^\]]*\])\s*\)\s*$", re.IGNORECASE)


class WrongArguments(ValueError):  # noqa: N818 - an answer to the model
    """A call does not match its tool. The message is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    schema: dict[str, Any]  # in the format for chat templates
    hints: dict[str, Any]  # argument name -> type
    required: tuple[str, ...]

    @property
    def signature(self) -> str:
        """Return a signature such as ``add(a: integer, b: integer)``, for models that write calls in plain text."""
        properties = self.schema["function"]["parameters"]["properties"]
        return f"{self.name}({', '.join(f'{name}: {_kind(found)}' for name, found in properties.items())})"


# Schemas


def tools_of_class(cls: type, *, path: str) -> dict[str, Tool]:
    """Build tools from a class's public methods, including inherited ones. Raise ValueError if a method cannot be a tool."""
    found: dict[str, Tool] = {}
    for name in dir(cls):
        if name.startswith("_") or name in ("reset", "get_reward"):
            continue
        attribute = inspect.getattr_static(cls, name)
        is_static = isinstance(attribute, staticmethod)
        # A decorator such as functools.cache returns an object that is not a function.
        is_decorated = callable(attribute) and hasattr(attribute, "__wrapped__") and not inspect.isclass(attribute)
        if is_static or is_decorated or isinstance(attribute, classmethod) or inspect.isfunction(attribute):
            found[name] = tool_of(getattr(cls, name), path=f"{path}.{name}", is_method=not is_static)
    return found


def tool_of(function: Callable[..., Any], *, path: str, is_method: bool = False) -> Tool:
    """Build a tool from a function. ``path`` is its name in ValueError messages."""
    parameters = _parameters(function, path=path, is_method=is_method)
    if not (doc := (inspect.getdoc(function) or "").strip()):
        other = (
            "a class with reset and step needs type: step"
            if is_method and path.endswith(".step")
            else "if it is not a tool, begin its name with an underscore"
        )
        raise ValueError(
            f"{path} has no docstring; write one that says what the tool does and describes its arguments under `Args:` ({other})"
        )
    description, told, returned = _read_docstring(doc)
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # noqa: BLE001 - evaluating a quoted hint runs user code
        raise ValueError(f"{path}: its type hints cannot be read ({type(error).__name__}: {error})") from None
    properties: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(f"{path}: argument {name} has no type hint; add one, such as {name}: str")
        if name not in told:
            raise ValueError(
                f"{path}: the docstring does not describe argument {name}; add under `Args:` a line `{name}: what it is`"
            )
        properties[name] = _with_description(_schema(hints[name], path=path), told[name], path=path)
    required = tuple(name for name, each in parameters.items() if each.default is inspect.Parameter.empty)
    name = getattr(function, "__name__", "")
    schema: dict[str, Any] = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties} | ({"required": list(required)} if required else {}),
    }
    if "return" in hints:
        schema["return"] = _schema(hints["return"], path=path) | ({"description": returned} if returned else {})
    taken = {each: hints[each] for each in parameters}
    return Tool(name=name, schema={"type": "function", "function": schema}, hints=taken, required=required)


def _parameters(function: Callable[..., Any], *, path: str, is_method: bool) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    if is_method and not inspect.ismethod(function) and parameters:
        del parameters[next(iter(parameters))]  # self
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{path} has the parameter {parameter}, but a tool's arguments are passed by name; name each argument"
                if parameter.kind is not parameter.POSITIONAL_ONLY
                else f"{path}: argument {name} cannot be passed by name; remove the `/` from the signature"
            )
    return parameters


def _schema(hint: Any, *, path: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _schema(args[0], path=path)
    if origin in (Union, types.UnionType):
        return _union_schema(args, path=path)
    if origin is Literal:
        kinds = list(dict.fromkeys(_JSON_TYPES.get(type(arg), "") for arg in args))
        if "" in kinds:
            raise ValueError(f"{path}: {hint} has choices that JSON cannot represent; use text and numbers")
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin is list and args:
        return {"type": "array", "items": _schema(args[0], path=path)}
    if origin is tuple and args:
        if len(args) == 1 or ... in args:
            raise ValueError(f"{path}: {hint} does not have a fixed length of two or more; use list[...]")
        return {"type": "array", "prefixItems": [_schema(arg, path=path) for arg in args]}
    if origin is dict and len(args) == 2:
        return {"type": "object", "additionalProperties": _schema(args[1], path=path)}
    if hint is Any:
        return {}
    return {"type": _JSON_TYPES.get(origin or hint, "object")}


def _union_schema(args: tuple[Any, ...], *, path: str) -> dict[str, Any]:
    members = [_schema(arg, path=path) for arg in args if arg is not type(None)]
    if len(members) == 1:
        found = members[0]
    elif all(member.keys() == {"type"} and isinstance(member["type"], str) for member in members):
        kinds = sorted({member["type"] for member in members})
        found = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        found = {"anyOf": members}
    return found | ({"nullable": True} if type(None) in args else {})


def _with_description(schema: dict[str, Any], told: str, *, path: str) -> dict[str, Any]:
    """Add the description, which may end with ``(choices: ["tea", "coffee"])``."""
    if match := _CHOICES.search(told):
        try:
            choices = json.loads(match[1])
        except ValueError:
            raise ValueError(f"{path}: {match[0]} is not a JSON list; write (choices: [...])") from None
        schema["enum"] = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
        told = told[: match.start()].strip()
    return schema | {"description": told}


def _read_docstring(doc: str) -> tuple[str, dict[str, str], str]:
    """Split a Google-style docstring into the description, the arguments and the return value.

    >>> _read_docstring("Add.\\n\\nArgs:\\n    a: The first\\n        number.\\n\\nReturns:\\n    The sum.")
    ('Add.', {'a': 'The first number.'}, 'The sum.')
    """
    sections: dict[str, list[str]] = {"": []}
    at = ""
    for line in doc.splitlines():
        if (match := _SECTION.fullmatch(line)) and match[1] not in sections:
            at = match[1]
            sections[at] = [match[2]] if match[2].strip() else []
        else:
            sections[at].append(line)
    arguments: dict[str, str] = {}
    name = ""
    for line in sections.get("Args", []):
        if match := re.fullmatch(r"\s*(\w+):\s*(.*)", line):
            name = match[1]
            arguments[name] = match[2].strip()
        elif name and line.strip():
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    returned = "\n".join(line for line in sections.get("Returns", [])).strip()
    return "\n".join(sections[""]).strip(), arguments, returned


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a type to the model in a word or two."""
    if "enum" in schema:
        return " or ".join(json.dumps(choice) for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(member) for member in schema["anyOf"])
    kind = schema.get("type", "anything")
    return kind if isinstance(kind, str) else " or ".join(kind)


def describe(tools: Mapping[str, Tool]) -> str:
    """Describe the tools in words, for a model whose chat template does not support tools."""
    lines = ['You can call these tools. Write a call on a line of its own, such as name(argument=1, other="x").']
    for tool in tools.values():
        function = tool.schema["function"]
        lines.append(f"{tool.signature}: {function['description']}")
        lines += [
            f"  {name}: {found['description']}"
            for name, found in function["parameters"]["properties"].items()
            if found["description"]
        ]
    return "\n".join(lines)


# Arguments


def check_arguments(tool: Tool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments to match the type hints. Raise WrongArguments if that is not possible."""
    for name in given:
        if name not in tool.hints:
            takes = ", ".join(tool.hints) or "nothing"
            raise WrongArguments(f"{tool.name} has no argument {name[:80]!r}; it takes {takes}")
    if missing := [name for name in tool.required if name not in given]:
        raise WrongArguments(f"{tool.name} needs {', '.join(missing)}; call it as {tool.signature}")
    properties = tool.schema["function"]["parameters"]["properties"]
    found: dict[str, Any] = {}
    for name, value in given.items():
        try:
            found[name] = _convert(value, tool.hints[name])
            if "enum" in properties[name] and found[name] not in properties[name]["enum"]:
                raise ValueError
        except (ValueError, OverflowError, RecursionError):
            raise WrongArguments(
                f"{tool.name}: {name} is {cut_end(json.dumps(value, default=str), 80)}; it must be {_kind(properties[name])}"
            ) from None
    return found


def _convert(value: Any, hint: Any) -> Any:
    """Convert a value to match the hint, or raise ValueError. A hint without a JSON type accepts anything. A model may write a
    list, an object, a number or true as a string, and an integer as 2.0."""
    origin, args = get_origin(hint), get_args(hint)
    kind, text = origin or hint, value if isinstance(value, str) else None
    if origin is Annotated:
        return _convert(value, args[0])
    if origin in (Union, types.UnionType):
        return _convert_to_one(value, args)
    if origin is Literal:
        same = [each for each in args if type(each) is type(value) and each == value]
        found = same or [each for each in args if not isinstance(each, str) and str(each) == value]
        if not found:
            raise ValueError
        return found[0]
    if kind in (list, tuple, dict):
        made = json.loads(text) if text is not None else value
        if not isinstance(made, dict if kind is dict else list):
            raise ValueError
        if isinstance(made, dict):
            return {key: _convert(each, args[1]) for key, each in made.items()} if len(args) == 2 else made
        if kind is tuple and args and len(made) != len(args):
            raise ValueError
        hints = args if kind is tuple else args * len(made)
        return kind(_convert(item, arg) for item, arg in zip(made, hints, strict=True)) if args else kind(made)
    if kind in (int, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = not isinstance(value, float) or value.is_integer()
        if not (is_number or (text and len(text) <= 100)) or (kind is int and not is_whole):
            raise ValueError
        if not math.isfinite(found := kind(value)):
            raise ValueError
        return found
    if kind is bool and text is not None and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is str and text is None and value is not None and not isinstance(value, list | dict):
        return json.dumps(value)
    if kind is type(None) and value == "null":
        return None
    if kind in (bool, str, type(None)) and not isinstance(value, kind):
        raise ValueError
    return value


def _convert_to_one(value: Any, args: tuple[Any, ...]) -> Any:
    """Convert a value to one of several types: its own type if that is listed, or else the first type that works."""
    for arg in sorted(args, key=lambda arg: type(value) is not (get_origin(arg) or arg)):
        try:
            return _convert(value, arg)
        except ValueError:
            if type(value) is (get_origin(arg) or arg):
                raise
    raise ValueError


def cut_end(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."
