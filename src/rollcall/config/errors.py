"""Explains what is wrong with a run file: the key, its value, and what to write instead."""

from __future__ import annotations

import difflib
import itertools
import reprlib
from datetime import date
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rollcall.base.redact import REDACTED, names_secret, redact_source
from rollcall.config.base import KeyProblem

WORDS_ALIKE = 0.75  # if two words are at least this similar, one may be a misspelling of the other
LONGEST_NAME = 60  # characters; no name is suggested for a longer key
MOST_ERRORS = 10  # the most errors shown at once
MOST_SHOWN = 300  # characters shown of a given value


def explain_all(error: ValidationError, root: type[BaseModel]) -> str:
    """Return one line for each of the first few mistakes, and then the number of the remaining mistakes."""
    found: list[Any] = error.errors(include_url=False)
    # For a value that is neither valid nor `auto`, pydantic reports two errors, which become one.
    autos = {item["loc"][:-1] for item in found if item["loc"] and item["loc"][-1] == "literal['auto']"}
    items = [
        {**item, "loc": item["loc"][:-1], "msg": f"{item['msg']}, or auto"} if item["loc"][:-1] in autos else item
        for item in found
        if item["loc"][-1:] != ("literal['auto']",)
    ]
    lines = [explain(item, root) for item in items[:MOST_ERRORS]]
    return "\n".join([*lines, *([f"and {len(items) - MOST_ERRORS:,} more"] if len(items) > MOST_ERRORS else [])])


def explain(item: Any, root: type[BaseModel]) -> str:
    """Describe one of pydantic's errors about ``root`` in one line."""
    path, section = _locate(item["loc"], root)
    path = redact_source(path)[:MOST_SHOWN]
    given = _given(path, item["input"])
    match item["type"]:
        case "extra_forbidden":
            return _unknown_key(path, list(section.model_fields) if section else [], root)
        case "missing":
            return f"{path} is missing; give it a value"
        case "union_tag_not_found":
            tag = item["ctx"]["discriminator"].strip("'")
            example = "class" if path == "environment" else "grpo" if tag == "name" else "exact"
            return f"{path} has no {tag}; write for example {path}.{tag}={example} (docs/configuration.md lists all choices)"
        case "union_tag_invalid":
            context = item["ctx"]
            tag, tags = context["discriminator"].strip("'"), context["expected_tags"].replace("'", "").split(", ")
            near = nearest(context["tag"], tags)
            hint = f"did you mean {near}?" if near else f"choose from {', '.join(tags)}"
            return f"{path}.{tag}={shown(context['tag'])} is not known; {hint}"
        case "model_type" | "dict_type":
            field = section.model_fields.get(path.rpartition(".")[2]) if section else None
            inner = target(field.annotation)[0] if field else None
            keys = f"; its keys are {', '.join(inner.model_fields)}" if inner else ", such as {name: value}"
            return f"{given} is not a map{keys}"
        case "string_type" if isinstance(item["input"], bool | int | float | date):
            return f"{given} is not a string; put it in quotes if it should be one"
        case "value_error":
            error = item["ctx"]["error"]
            joint = "." if isinstance(error, KeyProblem) else ": "
            return f"{path + joint if path else ''}{error}"
    return f"{given}: {item['msg'][0].lower() + item['msg'][1:]}"


def _given(path: str, value: Any) -> str:
    """Return ``key=value`` as given, but hide environment variables, because they may contain secrets under any name and in any form."""
    if {"env", "node_env"} & set(path.split(".")) or (path == "cluster" and not isinstance(value, int | float)):
        return f"{path}=<{_KINDS.get(type(value), type(value).__name__)}, not shown>"
    return f"{path}={shown(value)}"


def shown(value: Any) -> str:
    """Return a value's ``repr`` without secrets, shortened to a readable length."""
    try:
        text = _short.repr(value)
    except ValueError:  # Python refuses to print numbers with more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


_KINDS = {str: "a string", list: "a list", dict: "a map", int: "a number", float: "a number", bool: "a boolean"}


class _Short(reprlib.Repr):
    """A ``repr`` that reads only what it shows, because a small file with YAML aliases can expand to a huge value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxstring, self.maxother = 3, 12, 12, 120, 120

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact_source(x), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # Take one more than is shown, so that the output indicates that there are more.
        first = itertools.islice(x.items(), self.maxdict + 1)
        return super().repr_dict({key: REDACTED if names_secret(str(key)) else value for key, value in first}, level)


_short = _Short()


def _unknown_key(path: str, names: list[str], root: type[BaseModel]) -> str:
    prefix, dot, given = path.rpartition(".")
    if len(given) > LONGEST_NAME:
        return f"{prefix}{dot}{shown(given)} is not a field; the fields are {', '.join(names)}"
    near = nearest(given, names)
    is_misspelt = near is not None and _ratio(given, near) >= WORDS_ALIKE
    if not is_misspelt and (elsewhere := _homes(given, root)):
        if path in elsewhere:  # in a mapping or a file, where a dot is not a separator
            return f"{path} is not a field, because a dot is not a separator in keys of a file or a dict; write {given} under {prefix}"
        return f"{path} is not a field; did you mean {' or '.join(elsewhere)}?"
    hint = f"did you mean {prefix}{dot}{near}?" if near else f"the fields are {', '.join(names)}"
    return f"{path} is not a field; {hint}"


def _homes(name: str, root: type[BaseModel]) -> list[str]:
    """Return the keys in any section that have exactly this name."""
    return [
        f"{key}.{name}"
        for key, field in root.model_fields.items()
        if (sections := section_classes(field.annotation)) and not target(field.annotation)[1]
        for section in sections
        if name in section.model_fields
    ]


def nearest(given: str, names: list[str]) -> str | None:
    """Return the name that was probably meant: one with the same words, a similar spelling, or the words' initials.

    >>> nearest("max_tokens", ["max_running", "kv_tokens", "max_response_tokens"])
    'max_response_tokens'
    >>> nearest("learning_rate", ["min_lr_ratio", "lr"])
    'lr'
    """
    if len(given) > LONGEST_NAME:
        return None
    words = given.lower().split("_")

    def likeness(name: str) -> float:
        if name == "".join(word[:1] for word in words):
            return 1.0
        spelling = _ratio(given.lower(), name)
        if spelling >= 0.9:  # one letter differs; max_turn means max_turns, though max_turn_tokens has both words
            return 1.0 + spelling
        closest = [max(_ratio(word, part) for part in name.split("_")) for word in words]
        shared = sum(ratio for ratio in closest if ratio >= WORDS_ALIKE) / len(words)
        return max(shared, spelling)

    # On a tie, the first one, because sections begin with their most important keys.
    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.5 else None  # a less similar name is not worth suggesting


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _locate(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """Return a pydantic location without its union tags, and the section that contains its last element."""
    section: type[BaseModel] | None = root
    parts: list[str] = []
    union: dict[str, type[BaseModel]] = {}
    for place, element in enumerate(loc):
        if element in union:
            section, union = union[element], {}
            continue
        parts.append(str(element))
        if place == len(loc) - 1:
            break
        if isinstance(element, str) and section is not None and element in section.model_fields:
            section, union = target(section.model_fields[element].annotation)
    return ".".join(parts), section


def target(annotation: Any) -> tuple[type[BaseModel] | None, dict[str, type[BaseModel]]]:
    """Return the section class behind a field, or a union's variants by tag."""
    variants = section_classes(annotation)
    tagged = {tag: variant for variant in variants for tag in _tags(variant)}
    return (variants[0] if variants and not tagged else None), tagged


def section_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes in an annotation, including those inside lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for arg in get_args(annotation) for found in section_classes(arg)]


def _tags(variant: type[BaseModel]) -> tuple[str, ...]:
    for key in ("type", "name"):
        if key in variant.model_fields and get_origin(variant.model_fields[key].annotation) is Literal:
            return get_args(variant.model_fields[key].annotation)
    return ()
