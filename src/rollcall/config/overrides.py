"""Applies ``section.key=value`` from the command line to a run file's sections before they are validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from rollcall.base.errors import ConfigError
from rollcall.base.redact import secrets_of_run
from rollcall.base.words import counted
from rollcall.config.base import read_number
from rollcall.config.errors import shown, target
from rollcall.config.yaml import MAX_DEPTH, parse_yaml


def apply_override(raw: dict[str, Any], override: str, *, root: type[BaseModel]) -> None:
    """Apply an override to ``raw``. ``root`` says which keys are strings: their values are not parsed as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} is not of the form key=value; write for example actor.lr=1e-5")
    annotation = _annotation(key, root)
    kinds = {annotation, *get_args(annotation)}
    # `is_text`: the value is a string, or a string or null.
    value = _parse_value(text, override, is_text=str in kinds and not kinds - {str, NoneType, str | None})
    try:
        set_key(raw, key, value)
    except ConfigError as error:
        raise ConfigError(f"override {shown(override)}: {error}") from None


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key and create missing sections."""
    node: Any = raw
    *parents, last = _parts(key)
    for parent in parents:
        if isinstance(node, dict) and node.get(parent) is None:
            node[parent] = {}
        node = node[_place(node, parent)]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{parent} is {shown(node)} in the run file, not a section with keys")
    node[_place(node, last)] = value


def add_key(raw: dict[str, Any], key: str, value: Any, *, root: type[BaseModel]) -> None:
    """Like ``set_key``, for values from Python code: a dict adds its keys to the section, and a path becomes a string."""
    if isinstance(value, Mapping) and get_origin(_annotation(key, root)) is not dict:
        for name, inner in value.items():
            add_key(raw, f"{key}.{name}", inner, root=root)
        there: Any = raw
        for part in key.split("."):
            there = there.get(part) if isinstance(there, Mapping) else None
        if value or isinstance(there, Mapping):
            return
    try:
        set_key(raw, key, str(value) if isinstance(value, PurePath) else value)
    except ConfigError as error:
        raise ConfigError(f"{key}={shown(value)}: {error}") from None


def refuse_secret(override: str) -> None:
    """Refuse secrets, because a command line is visible in the process list, the shell's history and, for a driver, Ray's records."""
    key, _, text = override.partition("=")
    section, *rest = _parts(key)
    if section != "cluster":
        return
    value = _parse_value(text, override, is_text=False)
    for part in reversed(rest):
        value = {part: value}
    # Check both the parsed value and the raw text, because text that is not YAML stays a string.
    for name in secrets_of_run({"cluster": value}) or secrets_of_run({"cluster": text}):
        raise ConfigError(
            f"{name} looks like a secret, and other users can see a command line; export {name} and list its name in cluster.env_pass"
        )


def _annotation(key: str, root: type[BaseModel]) -> Any:
    """Return the annotation of a key's field, or None if there is no such field or it is in a union."""
    section: Any = root
    for part in key.split("."):
        section, _ = target(section)
        info = section.model_fields.get(part) if section else None
        if info is None:
            return None
        section = info.annotation
    return section


def _parse_value(text: str, override: str, *, is_text: bool) -> Any:
    try:
        value = read_number(parse_yaml(text))
    except yaml.YAMLError:
        return text
    except ConfigError as error:
        raise ConfigError(f"override {shown(override)}: {error}") from None
    # `run.name=1000` and `data.val=2024.jsonl: x` are strings; quotes and null are parsed as YAML.
    return text if is_text and not isinstance(value, str | NoneType) else value


def _parts(key: str) -> list[str]:
    parts = key.split(".")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(f"the key {shown(key)} has {len(parts)} parts, but keys of a run file have at most 4")
    return parts


def _place(node: dict[str, Any] | list[Any], text: str) -> Any:
    """Return a section's key, or an index into a list."""
    if isinstance(node, dict):
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) >= len(node):
        raise ConfigError(f"{text} is not a valid index for a list of {counted(len(node), 'item')}")
    return int(text)
