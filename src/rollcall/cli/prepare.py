"""`rollcall prepare` and `rollcall fetch-model`: what a node does before a run, by hand."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from rollcall.cli import Overrides


def prepare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file.")],
    overrides: Overrides = None,
    once: Annotated[
        bool, typer.Option("--once", help="Run prepare.once too: what one node does for all of them.")
    ] = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True, help="Give up if stdin ends meanwhile.")] = False,
) -> None:
    """Run the commands of `prepare.each_node` on this machine and fetch the models of the run.

    `rollcall launch` does this on every node before the run.

    \b
    Examples:
      rollcall prepare run.yaml
      rollcall prepare run.yaml --once
    """
    from rollcall.config import load_config
    from rollcall.jobs.prepare import prepare_node
    from rollcall.nodes.here import tied_to_stdin

    with tied_to_stdin() if tied else nullcontext():
        prepare_node(load_config(file, overrides or []), once=once)


def fetch_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, such as Qwen/Qwen2.5-0.5B-Instruct.")],
) -> None:
    """Download a model from the hub into this machine's cache, and print where it is.

    \b
    Example:
      rollcall fetch-model Qwen/Qwen2.5-0.5B-Instruct
    """
    from rollcall.model.fetch import fetch_model

    print(fetch_model(model, key="model"))
