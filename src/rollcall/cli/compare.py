"""`rollcall compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollcall.cli import Json, answer

if TYPE_CHECKING:
    from rollcall.inspect.compare import Comparison

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory (run.dir).")]


def compare(first: RunDir, second: RunDir, as_json: Json = False) -> None:
    """Compare two runs: settings that differ, accuracy, reward, lengths, speed.

    \b
    Examples:
      rollcall compare runs/grpo runs/dapo
      rollcall compare runs/grpo runs/dapo --json
    """
    from rollcall.inspect.compare import compare as side_by_side
    from rollcall.inspect.run import load_run

    answer(side_by_side(load_run(first), load_run(second)), _show, as_json=as_json)


def _show(comparison: Comparison) -> None:
    console = Console(highlight=False, soft_wrap=True)
    settings = _table("setting", comparison)
    for key, pair in comparison.settings.items():
        settings.add_row(*(Text(str(value)) for value in (key, *pair)))
    if comparison.settings:
        console.print(settings)
    else:
        console.print("all settings are the same")
    numbers = _table("number", comparison)
    numbers.add_column("second/first", justify="right")
    for line in comparison.lines:
        shown = ["-" if value is None else f"{value:,.{line.digits}f}" for value in line.values]
        numbers.add_row(line.name, *shown, "" if line.ratio is None else f"{line.ratio:.2f}")
    console.print(numbers)


def _table(what: str, comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(what)
    right: Any = "right" if what == "number" else "left"
    for name in comparison.runs:
        table.add_column(Text(name), justify=right, overflow="fold")
    return table
