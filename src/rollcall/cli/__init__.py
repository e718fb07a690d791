"""The command line: small modules with related commands and no logic. This module contains what the commands share.

No module in this package imports torch at the top, so that help and `rollcall config` respond at once.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from rollcall.base.errors import in_one_line, is_out_of_memory
from rollcall.base.importing import calm_transformers
from rollcall.base.redact import OutputError
from rollcall.base.stop import ended_by
from rollcall.base.wait import Wait, say
from rollcall.base.words import size, visible

if TYPE_CHECKING:
    from rollcall.config import Config

Debug = Annotated[bool, Option("--debug", help="Show the full traceback of an error.")]
RunFile = Annotated[str | None, Argument(metavar="FILE", help="Run file. Default: the demo.")]
RunDir = Annotated[Path, Argument(metavar="RUN_DIR", help="Run directory (run.dir).")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Set a key of the run file, such as actor.lr=1e-5.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON object, and nothing else, on stdout.")]

SAY_EVERY_S = 10.0  # between progress messages where there is no bar
FAILED = 1  # exit status; 2 is a usage error, and stop.py defines two more


def local_time(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def split_arguments(file: str | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """Return the run file, if there is one, and the overrides. If the first argument contains a '=', it is an override."""
    if file is not None and "=" in file:
        return None, [file, *(overrides or [])]
    return Path(file) if file is not None else None, overrides or []


def read_run(file: str | None, overrides: list[str] | None) -> Config:
    """Read the config of the run that the command line names."""
    from rollcall.config import load_config

    return load_config(*split_arguments(file, overrides))


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Add a ``--debug`` option to the command. Without it, a user error becomes a single message and exit status 1."""

    @wraps(command)
    def run(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as heard:
            by, status = ended_by(heard)
            say(f"stopped by {by}")
            raise typer.Exit(status) from None
        except (BrokenPipeError, OutputError):
            raise  # `main` handles it
        except Exception as error:
            # The message is enough without a traceback for our own errors and for value, file and memory errors.
            ours = type(error).__module__.startswith("rollcall.")
            if debug or not (ours or isinstance(error, ValueError | OSError) or is_out_of_memory(error)):
                raise
            text = _explain(error)
            # The text may quote other people's files. It must not send control codes to the terminal or flood it.
            say(f"error: {visible(text if len(text) <= 20_000 else f'{text[:20_000]} ...')}")
            raise typer.Exit(FAILED) from None

    own = inspect.signature(command, eval_str=True)
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), debug])  # type: ignore[attr-defined]
    run.__annotations__ = {}  # the signature contains the annotations
    return run


def answer(found: Any, show: Callable[[Any], None], *, as_json: bool, failed: object = False) -> None:
    """Print a command's result: as one JSON object, or as ``show`` formats it for a person. If it ``failed``, end the command."""
    if not as_json:
        show(found)
    else:
        fields = found if isinstance(found, dict) else getattr(found, "as_json", partial(asdict, found))()
        print(json.dumps(fields, default=str))
    if failed:
        raise typer.Exit(FAILED)


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_rows(rows: Iterable[tuple[str, str]], *, width: int) -> None:
    for label, text in rows:
        print(f"{label:<{width}} {text}")


@contextmanager
def progress_bar(title: str, *, unit: str | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on a terminal; elsewhere print a line every few seconds. It counts ``unit``, or bytes if ``unit`` is None."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from rollcall.base.screen import Screen

    console = Screen(stderr=True)
    if not console.is_terminal:
        wait = Wait(first_s=SAY_EVERY_S, every_s=SAY_EVERY_S)

        def tell(done: int, total: int | None) -> None:
            if done:
                shown = [size(num) if unit is None else f"{num:,}" for num in (done, total) if num is not None]
                wait.tell(f"{title}: {' of '.join(shown)}{f' {unit}' if unit else ''}")

        yield tell
        return
    counts = DownloadColumn() if unit is None else MofNCompleteColumn()
    with Progress(title, BarColumn(), counts, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def calm_libraries() -> None:
    """Show our own warnings as plain lines on stderr, and hide the progress bars and advice that transformers prints."""
    handler = _OnStderr()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    ours = logging.getLogger("rollcall")
    ours.handlers = [handler]
    ours.propagate = False
    calm_transformers()


class _OnStderr(logging.StreamHandler[Any]):
    """Writes to the current ``sys.stderr``, because a live panel may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _explain(error: Exception) -> str:
    if is_out_of_memory(error):
        return (
            f"there is not enough memory: {in_one_line(error)}\nlower actor.tokens_per_microbatch, rollout.kv_memory_fraction or "
            "data.prompts_per_step"
        )
    if isinstance(error, OSError) and not type(error).__module__.startswith("rollcall."):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return str(error) or type(error).__name__
