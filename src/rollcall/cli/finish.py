"""`rollcall finish`: a run's model gathered, merged, verified and uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import Json, Overrides, answer, calm_libraries, print_table
from rollcall.cli.gather import Hosts, split_hosts
from rollcall.cli.merge import progress_bar
from rollcall.wait import say

if TYPE_CHECKING:
    from rollcall.finish.finish import FinishedRun


def finish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory or run file.")],
    overrides: Overrides = None,
    hosts: Hosts = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Make the model of a run's newest checkpoint: gather its parts, merge, verify, upload as the run file says.

    The model is in RUN/merged. A step that is done is skipped, and done again if what it was made of has changed. The
    section `finish` of the run file says how it is merged and where it is uploaded. Without it, weights are written as they
    are stored, and nothing is uploaded.

    \b
    Examples:
      rollcall finish runs/gsm8k --dry-run
      rollcall finish runs/gsm8k
      rollcall finish runs/gsm8k finish.dtype=bf16 finish.upload.repo=me/gsm8k-model
    """
    say("loading torch and transformers")
    calm_libraries()
    from rollcall.finish.finish import finish as work

    with progress_bar("finish") as progress:
        done = work(run, overrides=overrides or [], hosts=split_hosts(hosts), dry_run=dry_run, progress=progress)
    answer(done, _show, as_json=as_json)


def _show(done: FinishedRun) -> None:
    print_table([(step.name, step.state, step.words) for step in done.steps])
    if done.uploaded is not None:
        print(f"uploaded {done.uploaded.num_files} files: {done.uploaded.url}")
