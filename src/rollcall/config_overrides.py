"""``section.key=value`` on the command line, put into a run file's sections before they are validated."""

from __future__ import annotations

from typing import Any

import yaml

from rollcall.config_base import read_number
from rollcall.config_errors import ConfigError
from rollcall.redact import secrets_of_run


def apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not key=value; write for example actor.lr=1e-5")
    value = _parse_value(text)
    node: Any = raw
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(node, list):
            node = node[_list_index(node, parent, override)]
        else:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    else:
        node[last] = value


def refuse_secret(override: str) -> None:
    """A command line is in the process list, in the shell's history and, of a driver, in Ray's records."""
    if not override.startswith("cluster."):
        return
    alone: dict[str, Any] = {}
    apply_override(alone, override)
    for name in secrets_of_run(alone):
        raise ConfigError(
            f"{name} is a secret by its name, and others see a command line; export {name} and name it in cluster.env_pass"
        )


def _parse_value(text: str) -> Any:
    try:
        return read_number(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _list_index(node: list[Any], text: str, override: str) -> int:
    if not text.isdigit() or int(text) >= len(node):
        raise ConfigError(f"override {override!r}: {text} is not an index into a list of {len(node)}")
    return int(text)
