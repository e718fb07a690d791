"""`rollcall merge`: a checkpoint into one model directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import Json, answer, calm_libraries
from rollcall.wait import Wait, say
from rollcall.words import counted, size

if TYPE_CHECKING:
    from rollcall.merge.merge import Merged

SAY_EVERY_S = 10.0


def merge(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Run directory, checkpoint, or what another system has saved.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the model directory goes.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="Precision to write: keep (as stored), bf16, fp16 or fp32.")
    ] = "keep",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, such as 5GB or 512MiB.")
    ] = "5GB",
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="Model directory to take config and tokenizer from, if there is none beside the weights.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Then load it with transformers and compare its log-probs with the trained model's."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Merge a checkpoint into one directory that transformers and vllm open.

    Reads a run directory (its newest checkpoint), a checkpoint of Rollcall, verl (FSDP shards) or PyTorch (DCP), or a model
    directory. Every file is checked while it is read. DIR appears whole or not at all; the same command goes on after an
    interruption.

    \b
    Examples:
      rollcall merge runs/gsm8k --out models/gsm8k --verify
      rollcall merge runs/gsm8k/checkpoints/step-000040 --out models/gsm8k-40 --dtype bf16
      rollcall merge checkpoints/global_step_100/actor --out models/from-verl
      rollcall merge dcp-folder --base models/Qwen3-0.6B --out models/from-dcp --max-shard-size 2GB
    """
    from rollcall.merge.merge import DTYPES
    from rollcall.merge.merge import merge as merge_stored
    from rollcall.stored.find import adapter_folder
    from rollcall.stored.open import open_stored

    if verify:
        _refuse_without_probe(checkpoint, adapter_folder(checkpoint) or open_stored(checkpoint).folder)
    with progress_bar("merge") as progress:
        merged = merge_stored(checkpoint, out, dtype=dtype, max_shard_size=max_shard_size, base=base, progress=progress)
    if not verify:
        answer(merged, _show, as_json=as_json)
        return
    say(f"loading {merged.out} to verify it")
    calm_libraries()
    from rollcall.checkpoint.verify import verify as compare

    wanted = DTYPES.get(dtype)
    verified = compare(merged.out, dtype=None if wanted is None else wanted.name)
    if as_json:
        print(json.dumps(merged.as_json() | {"verified": asdict(verified)}))
        return
    _show(merged)
    print(f"verified {verified.words}")


def _refuse_without_probe(checkpoint: Path, folder: Path | None) -> None:
    """Before a merge that may take an hour: what --verify compares with must be there."""
    from rollcall.stored.find import PROBE

    if folder is None or not (folder / PROBE).is_file():
        raise ValueError(
            f"{checkpoint} has no {PROBE}, so --verify has nothing to compare with; leave --verify out. Only checkpoints and models "
            "that Rollcall saved have one"
        )


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a line every few seconds."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from rollcall.screen import Screen

    console = Screen(stderr=True)
    if not console.is_terminal:
        wait = Wait(first_s=SAY_EVERY_S, every_s=SAY_EVERY_S)
        yield lambda done, total: wait.tell(f"{title}: {size(done)} of {size(total)}") if done else None
        return
    with Progress(
        title, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(merged: Merged) -> None:
    rate = round(merged.num_bytes / max(merged.duration_s, 1e-9))
    print(f"from     {merged.origin} ({merged.kind})")
    if merged.facts:
        print(f"run      {', '.join(f'{key} {value}' for key, value in merged.facts.items())}")
    print(
        f"model    {merged.out}: {counted(merged.num_tensors, 'tensor')}, {size(merged.num_bytes)} in "
        f"{counted(merged.num_files, 'file')}, {merged.duration_s:.1f} s ({size(rate)}/s)"
    )
    if merged.continued_bytes:
        print(f"         {size(merged.continued_bytes)} were there from an earlier start")
    for note in merged.notes:
        print(f"note     {note}")
