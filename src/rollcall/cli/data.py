"""`rollcall data`: make the train and test files of a task."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rollcall.cli import Json
from rollcall.data.make import TaskRows, make_task, write_parquet
from rollcall.screen import Screen
from rollcall.words import counted


def data(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="arithmetic, countdown, gsm8k, math or reasoning-gym:TASK.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for train.parquet and test.parquet.")],
    num: Annotated[
        int | None, typer.Option(min=1, help="Number of training rows. Generated tasks add a tenth of it as test rows.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed for generated rows and splits. For arithmetic: for the order only.")
    ] = 0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            help="For gsm8k and math, in place of the hub: a folder with train and test files, or a JSONL or Parquet file, of "
            "which a tenth is held out.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the data files of a task.

    \b
    Examples:
      rollcall data arithmetic --out data/sums
      rollcall data countdown --num 20000 --seed 1 --out data/countdown
      rollcall data gsm8k --source gsm8k/ --out data/gsm8k
      rollcall data reasoning-gym:chain_sum --num 2000 --out data/chain_sum
    """
    made = make_task(task, num=num, seed=seed, source=source)
    written, example = _write(made, out)
    if as_json:
        files = [{"path": str(path), "rows": rows} for path, rows in written.items()]
        print(json.dumps({"task": task, "files": files, "reward": made.reward, "example": example}))
    else:
        _show(written, example, made.reward)


def _write(made: TaskRows, out: Path) -> tuple[dict[Path, int], dict[str, Any]]:
    """The number of rows in each file, and the first row of all."""
    example: dict[str, Any] = {}
    written: dict[Path, int] = {}
    with _late_progress(made.num_rows) as advance:

        def watched(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            for row in rows:
                if not example:
                    example.update(row)
                advance()
                yield row

        for split, rows in (("train", made.train), ("test", made.test)):
            path = out / f"{split}.parquet"
            written[path] = write_parquet(watched(rows), path)
    return written, example


def _show(written: dict[Path, int], example: dict[str, Any], reward: str) -> None:
    console = Screen(soft_wrap=True)
    for path, rows in written.items():
        console.print(f"[green]wrote[/green] {escape(str(path))}  {counted(rows, 'row')}")
    console.print("[bold]example[/bold]")
    for column, value in example.items():
        text = value if isinstance(value, str) else json.dumps(value)
        text = text if len(text) <= 400 else text[:397] + "..."
        console.print(f"  [cyan]{escape(column)}[/cyan]  {escape(text.replace(chr(10), chr(10) + '    '))}")
    train, test = (escape(str(path)) for path in written)
    console.print(f"[bold]use[/bold]\n  data:   {{train: {train}, val: {test}}}\n  reward: \\[{{type: {reward}}}]")


@contextmanager
def _late_progress(total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr that appears after two seconds. Call the result once for each row."""
    columns = (SpinnerColumn(), TextColumn("making rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Screen(stderr=True), transient=True)
    task = progress.add_task("rows", total=total)
    timer = threading.Timer(2.0, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: progress.advance(task)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
