"""Reads YAML that may contain users' mistakes or have been damaged by a crash. Limits size and depth, and refuses duplicate keys.

Every refusal is a ``ConfigError`` that names the file and, if possible, the invalid line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollcall.base.errors import ConfigError
from rollcall.base.redact import redact_source
from rollcall.config.errors import MOST_SHOWN

MAX_BYTES = 1 << 20  # the largest file; a run file has a few thousand bytes
MAX_DEPTH = 40  # nesting of lists and mappings; a run file has 4 levels
_TOO_DEEP = (
    f"lists and maps are nested more than {MAX_DEPTH} deep, or one contains itself; a run file needs only 4 levels"
)
_OPEN_ALREADY = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # for `<(command)`, a pipe that a process writes to


def read_yaml(path: Path | str, *, what: str) -> Any:
    """Read a YAML file. ``what`` names it in messages, such as "run file"."""
    try:
        return parse_yaml(read_small(path, most=MAX_BYTES).decode())
    except FileNotFoundError:
        hint = "; `rollcall init` writes one to start from" if what == "run file" else ""
        raise ConfigError(f"{what} {path} does not exist{hint}") from None
    except ConfigError as error:
        raise ConfigError(f"{what} {path}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path} is not YAML: {redact_source(str(error))[:MOST_SHOWN]}") from None


def read_small(path: Path | str, *, most: int = 1 << 28) -> bytes:
    """Read a regular file of at most ``most`` bytes. Raises ValueError for anything else, because a pipe or device could block."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and str(path).startswith(_OPEN_ALREADY)):
        if stat.S_ISDIR(mode):
            raise IsADirectoryError("it is a directory; give the path of a file")
        raise ValueError("it is a pipe or a device; give the path of a regular file")
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes; is it the right file?")
    return data


def refuse_deep(value: Any) -> None:
    """Refuse lists and mappings that are nested too deeply or contain themselves. Values that Python code passes can be like that."""
    level = {id(value): value}
    for _ in range(MAX_DEPTH):
        inner = (
            each.values() if isinstance(each, Mapping) else each
            for each in level.values()
            if isinstance(each, Mapping | list | tuple)
        )
        level = {id(each): each for values in inner for each in values}
        if not level:
            return
    raise ConfigError(_TOO_DEEP)


def parse_yaml(text: str) -> Any:
    """Parse YAML. Invalid text raises ConfigError or YAMLError and nothing else."""
    try:
        found = _load(text)
    except RecursionError:
        raise ConfigError(_TOO_DEEP) from None
    refuse_deep(found)
    return found


def _load(text: str) -> Any:
    if yaml.__with_libyaml__:
        try:
            return _Loader(text, parser=yaml.CSafeLoader(text)).get_single_data()
        except yaml.YAMLError:
            pass  # PyYAML's Python parser is slow, but its errors show the line
    return _Loader(text).get_single_data()


class _Loader(yaml.SafeLoader):
    """A stricter loader. PyYAML's own loader silently keeps the last of two equal keys, reads 010 as eight and 1:30 as ninety, and does
    not catch errors in its constructors."""

    def __init__(self, text: str, parser: Any = None) -> None:
        super().__init__("" if parser else text)
        if parser:
            self.get_event, self.peek_event, self.check_event = parser.get_event, parser.peek_event, parser.check_event

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = node.start_mark.line + 1
                    raise ConfigError(
                        f"{key.value[:60]} appears twice in the mapping that begins on line {line}; write it once"
                    )
                seen.add(key.value)
        return node

    def construct_number(self, node: Any) -> Any:
        """Read 010 as ten and 1:30 as a string. 0x10, 0b10 and 1_000 mean the same as in Python."""
        text = str(self.construct_scalar(node))
        if ":" in text:
            return text
        if node.tag.endswith(":float"):
            return self.construct_yaml_float(node)
        digits = text.replace("_", "").lstrip("+-")
        return self.construct_yaml_int(node) if digits[:2] in ("0x", "0b") else int(text.replace("_", ""))

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            # PyYAML's constructors raise these for values such as `!!bool maybe`, `!!timestamp x`, `!!int ''` or 2024-13-41.
            if isinstance(node, yaml.ScalarNode):
                shown, kind = node.value[:60], node.tag.rpartition(":")[2]
                raise ConfigError(
                    f"line {node.start_mark.line + 1}: {redact_source(repr(shown))} is not a YAML {kind}; correct it, or put "
                    "it in quotes if it is text"
                ) from None
            raise


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
