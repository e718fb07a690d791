"""The files that a target renders for the launch's folder, and the commands that start it. Plain values; nothing runs here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rollcall.base.atomic import write_atomic
from rollcall.launch.container import Container
from rollcall.launch.record import LaunchError

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RUN_FILE_VARIABLE = "ROLLCALL_RUN_FILE_BASE64"  # of a job that gets its run file in a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFile:
    name: str  # inside the launch's folder
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a target's own tool."""

    words: tuple[str, ...]
    what: str  # it does, in a few words: "submit the batch script"
    stdin: str | None = None  # the rendered file that it reads

    def __str__(self) -> str:
        words = shlex.join(self.words)
        return words if self.stdin is None else f"{words} < {shlex.quote(self.stdin)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    files: tuple[RenderedFile, ...]
    commands: tuple[Command, ...]
    notes: tuple[str, ...] = ()  # for the user, to know or to do
    problems: tuple[str, ...] = ()  # why it would not be started

    def file(self, name: str) -> RenderedFile:
        return next(file for file in self.files if file.name == name)

    def write(self, folder: Path) -> None:
        """A job that is reading a file keeps the one that it has opened."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in self.files:
            write_atomic(folder / file.name, file.text, durable=False, private=True)

    def changed_in(self, folder: Path) -> list[str]:
        """The files that the folder already has with another text."""
        found = [(file, folder / file.name) for file in self.files]
        return [file.name for file, path in found if path.exists() and path.read_bytes() != file.text.encode()]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "files": {file.name: file.text for file in self.files}}


def yaml_text(value: Any) -> str:
    """YAML in which a text of several lines stays readable."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # not every reader of YAML knows them


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # YAML reads other ends of a line as plain ones inside a block.
    block = "\n" in text and not re.search("[\r\x85\u2028\u2029]", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if block else '"' if "\n" in text else None)


_Dumper.add_representer(str, _text)


# Shell. Values of the user are quoted once, by ``shlex``.


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of shell that set variables to any values."""
    for name in variables:
        if not VARIABLE.fullmatch(name):
            raise LaunchError(
                f"{name!r} cannot be a variable's name in a shell; use letters, digits and '_', not beginning with a digit"
            )
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def shell_path(path: Path) -> str:
    """A path as one word of shell; a leading ``~`` is the home folder of the user there.

    >>> shell_path(Path("~/my venv/bin/activate")), shell_path(Path("/opt/$x/activate"))
    ('"$HOME"/\'my venv/bin/activate\'', "'/opt/$x/activate'")
    """
    text = str(path)
    if text == "~" or text.startswith("~/"):
        return '"$HOME"' + (f"/{shlex.quote(text[2:])}" if text[2:] else "")
    return shlex.quote(text)


def node_lines(
    *,
    run_file: str,
    cluster: str,
    activate: Path | None,
    env: Mapping[str, str],
    head: str | None = None,
    before: Sequence[str] = (),
    more: str,
    container: Container | None = None,
    variables: Sequence[str] = (),
    guard: Callable[[str], str] = str,
) -> list[str]:
    """The lines of shell that every node runs, around `rollcall node --run`.

    ``run_file``, ``head`` (the address of rank 0) and ``more`` (options) are shell, such as ``"$HOME"/run.yaml``; ``before`` has the
    user's own lines; ``variables`` are names that a container gets as well as those of ``env``; ``guard`` changes a line with quoted
    values for a tool that reads it before the shell does.
    """
    # Activate scripts read variables that are not set.
    activated = [] if activate is None else [guard(f". {shell_path(activate)} || exit 1")]
    lines = [*([] if container else activated), "set -eu", *map(guard, exports(env)), *before]
    command = f"exec rollcall node --run {run_file} --cluster {shlex.quote(cluster)} {more}"
    names = [*env, *variables]
    if head is not None:
        lines += [f"head={head}", 'case $head in *:*) head="[$head]" ;; esac', "export head"]  # [IPv6]
        command += ' --head-address "$head:6399"'  # SkyPilot's own Ray has 6380 on its machines
        names.append("head")
    if container is None:
        return [*lines, command]
    words = container.run(["sh", "-c", "\n".join([*activated, command])], variables=names)
    return [*lines, *container.before(), *container.exports(names), f"exec {shlex.join(words)}"]
