"""``section.key=value`` on the command line, put into a run file's sections before they are validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from rollcall.base.errors import ConfigError
from rollcall.base.redact import secrets_of_run
from rollcall.config.base import read_number
from rollcall.config.errors import shown, target
from rollcall.config.yaml import parse_yaml


def apply_override(raw: dict[str, Any], override: str, *, root: type[BaseModel]) -> None:
    """``root`` says which keys hold text: what is given for those is not read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} is not key=value; write for example actor.lr=1e-5")
    value = _parse_value(text, override, is_text=_is_text(key, root))
    try:
        set_key(raw, key, value)
    except ConfigError as error:
        raise ConfigError(f"override {shown(override)}: {error}") from None


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """``key`` is dotted; sections that are not there are made."""
    node: Any = raw
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(node, dict) and node.get(parent) is None:
            node[parent] = {}
        node = node[_place(node, parent)]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{parent} is {shown(node)} in the run file, not a section with keys")
    node[_place(node, last)] = value


def add_key(raw: dict[str, Any], key: str, value: Any, *, root: type[BaseModel]) -> None:
    """``set_key`` for what Python code gives: a map adds its keys to the section that is there, and a path becomes text."""
    if isinstance(value, Mapping) and get_origin(_annotation(key, root)) is not dict:
        for name, inner in value.items():
            add_key(raw, f"{key}.{name}", inner, root=root)
        if value or isinstance(_value_at(raw, key), Mapping):
            return
    try:
        set_key(raw, key, str(value) if isinstance(value, PurePath) else value)
    except ConfigError as error:
        raise ConfigError(f"{key}={shown(value)}: {error}") from None


def _value_at(raw: Mapping[str, Any], key: str) -> Any:
    node: Any = raw
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def refuse_secret(override: str) -> None:
    """A command line is in the process list, in the shell's history and, of a driver, in Ray's records."""
    key, _, text = override.partition("=")
    section, *rest = key.split(".")
    if section != "cluster":
        return
    value = _parse_value(text, override, is_text=False)
    for part in reversed(rest):
        value = {part: value}
    # Once as it is read and once as it is written: text that is not YAML stays text to the reader.
    for name in secrets_of_run({"cluster": value}) or secrets_of_run({"cluster": text}):
        raise ConfigError(
            f"{name} is a secret by its name, and others see a command line; export {name} and name it in cluster.env_pass"
        )


def _is_text(key: str, root: type[BaseModel]) -> bool:
    """Whether a key holds text, or text or nothing."""
    annotation = _annotation(key, root)
    kinds = {annotation, *get_args(annotation)}
    return str in kinds and not kinds - {str, NoneType, str | None}


def _annotation(key: str, root: type[BaseModel]) -> Any:
    """Of a key's field; None where there is no such field, or a union decides."""
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
    # `run.name=1000` and `data.val=2024.jsonl: x` are texts; quotes and null are YAML's.
    return text if is_text and not isinstance(value, str | NoneType) else value


def _place(node: dict[str, Any] | list[Any], text: str) -> Any:
    """A key of a section, or an index into a list."""
    if isinstance(node, dict):
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) >= len(node):
        raise ConfigError(f"{text} is not an index into a list of {len(node)}")
    return int(text)
