"""`rollcall data`: make the train and test files of a task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from rollcall.base.words import counted
from rollcall.cli import Json, answer, progress_bar
from rollcall.loop.data.make import TaskRows, make_task, write_parquet


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
    files = [{"path": str(path), "rows": rows} for path, rows in written.items()]
    found = {"task": task, "files": files, "reward": made.reward, "example": example}
    answer(found, lambda _: _show(written, example, made.reward), as_json=as_json)


def _write(made: TaskRows, out: Path) -> tuple[dict[Path, int], dict[str, Any]]:
    """Write the files. Returns the number of rows in each file, and the first row overall."""
    example: dict[str, Any] = {}
    written: dict[Path, int] = {}
    numbers = count(1)
    with progress_bar("making rows", unit="rows") as progress:

        def watched(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            for row in rows:
                if not example:
                    example.update(row)
                yield row
                progress(next(numbers), made.num_rows)

        for split, rows in (("train", made.train), ("test", made.test)):
            path = out / f"{split}.parquet"
            written[path] = write_parquet(watched(rows), path)
    return written, example


def _show(written: dict[Path, int], example: dict[str, Any], reward: str) -> None:
    for path, rows in written.items():
        print(f"wrote {path}  {counted(rows, 'row')}")
    print("example")
    for column, value in example.items():
        text = value if isinstance(value, str) else json.dumps(value)
        text = text if len(text) <= 400 else text[:397] + "..."
        print(f"  {column}  {text.replace(chr(10), chr(10) + '    ')}")
    train, test = written
    print(f"use\n  data:   {{train: {train}, val: {test}}}\n  reward: [{{type: {reward}}}]")
