"""`rollcall init` and `rollcall config`: a run file to start from, and a resolved one."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rollcall.cli import Overrides, RunFile, read_run


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("run.yaml"),
) -> None:
    """Write a short run file with comments. As it stands, it trains the demo. Never overwrites a file.

    \b
    Examples:
      rollcall init
      rollcall init runs/mine.yaml
      rollcall init && rollcall train run.yaml trainer.steps=20
    """
    text = (files("rollcall.config") / "init.yaml").read_text().replace("NAME", _name(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise ValueError(f"{file} exists and was not changed; give another name, or move the file away") from None
    print(f"wrote {file}; look at it with `rollcall config {file}`, train it with `rollcall train {file}`")


def _name(file: Path) -> str:
    """The run's name, from the file's.

    >>> _name(Path("runs/my first.yaml"))
    'my-first'
    """
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in file.stem).strip("-")
    return "mine" if kept in ("", "run") else kept


def config(file: RunFile = None, overrides: Overrides = None) -> None:
    """Print the resolved run file: every key with its value.

    \b
    Examples:
      rollcall config > run.yaml
      rollcall config examples/gsm8k.yaml actor.lr=2e-6 reward.0.weight=0.5
    """
    from rollcall.config import dump_config
    from rollcall.config.checks import say_unused

    resolved = read_run(file, overrides)
    say_unused(resolved)
    print(dump_config(resolved), end="")
