"""`rollcall view`: the page that shows runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcall.wait import say


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN_DIR|FOLDER", help="Run directories, or folders of runs. Default: runs/"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine. Default: one that is free.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on a page: curves, samples, tokens, timeline, cluster. It works during a run and afterwards.

    The page is on this machine only, and each printed address works once. It reads run directories and changes nothing in them.
    From another machine: ssh -L PORT:127.0.0.1:PORT HOST. Ctrl-C ends it.

    \b
    Examples:
      rollcall view                        every run in runs/
      rollcall view runs/gsm8k --open
      rollcall view runs/grpo runs/dapo    two runs, to compare
      rollcall view /shared/runs --port 8080
    """
    from rollcall.view.page_process import refuse_without_packages

    refuse_without_packages()
    from rollcall.view.server import serve
    from rollcall.view.shown_runs import ShownRuns

    serve(ShownRuns(runs or []), port=port, open_browser=open_browser, tell=say)
