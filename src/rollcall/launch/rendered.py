"""The files that a target renders for the launch's folder, and the commands that start the launch. This module runs nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollcall.base.atomic import write_atomic
from rollcall.launch.record import LaunchError

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RUN_FILE_VARIABLE = "ROLLCALL_RUN_FILE_BASE64"  # contains the run file, for jobs that get it in a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the target's tool, such as `sbatch`."""

    words: tuple[str, ...]
    what: str  # its purpose in a few words: "submit the batch script"
    stdin: str | None = None  # the rendered file that the command reads

    def __str__(self) -> str:
        words = shlex.join(self.words)
        return words if self.stdin is None else f"{words} < {shlex.quote(self.stdin)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    files: dict[str, str]  # contents by file name in the launch's folder
    commands: tuple[Command, ...]
    notes: tuple[str, ...] = ()  # what the user should know or do
    problems: tuple[str, ...] = ()  # reasons why a start would be refused

    def write(self, folder: Path) -> None:
        """Write the files atomically: a job that is reading a file keeps the old version."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in self.files.items():
            write_atomic(folder / name, text, durable=False, private=True)

    def changed_in(self, folder: Path) -> list[str]:
        """Return the names of files that already exist in the folder with different content."""
        present = [name for name in self.files if (folder / name).exists()]
        return [name for name in present if (folder / name).read_bytes() != self.files[name].encode()]


def yaml_text(value: Any) -> str:
    """Dump ``value`` as YAML in which multi-line strings stay readable."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # not every YAML reader supports aliases


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In a block scalar, YAML would turn each of these line breaks into a newline.
    block = "\n" in text and not re.search("[\r\x85\u2028\u2029]", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if block else '"' if "\n" in text else None)


_Dumper.add_representer(str, _text)


# Shell lines. ``shlex`` quotes each of the user's values exactly once.


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return shell lines that set variables to arbitrary values."""
    for name in variables:
        if not VARIABLE.fullmatch(name):
            raise LaunchError(
                f"{name!r} is not a valid name for a shell variable; use letters, digits and '_', and do not begin with a digit"
            )
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def shell_path(path: Path) -> str:
    """Quote a path as one shell word; a leading ``~`` is the user's home folder on that machine.

    >>> shell_path(Path("~/my venv/bin/activate")), shell_path(Path("/opt/$x/activate"))
    ('"$HOME"/\'my venv/bin/activate\'', "'/opt/$x/activate'")
    """
    text = str(path)
    if text == "~" or text.startswith("~/"):
        return '"$HOME"' + (f"/{shlex.quote(text[2:])}" if text[2:] else "")
    return shlex.quote(text)
