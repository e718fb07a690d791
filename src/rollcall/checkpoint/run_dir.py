"""Tells new run directories from started ones, and cleans up after a killed start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcall.base.atomic import TEMPORARY
from rollcall.base.errors import ConfigError
from rollcall.base.journal import ATTEMPTS, GROUPS
from rollcall.base.wait import warn
from rollcall.model.stored.find import checkpoints_of

RUN_FILE = "run.yaml"  # the config that the run was last started with
_OF_A_RUN = (RUN_FILE, "journal", "checkpoints", "events.jsonl", "metrics.jsonl", "summary.json")
ATOMIC_FOLDERS = ("samples", "token_scores", "logs")  # a killed write may leave a temporary file in them


def is_run(run_dir: Path) -> bool:
    """Whether a folder contains anything that a run writes."""
    return any((run_dir / name).exists() for name in _OF_A_RUN)


def run_file_of(path: Path, *, what: str = "a run file or a run directory") -> tuple[Path, dict[str, str]]:
    """Return the run file for ``path`` (itself or inside it) and overrides for its values, since a run directory may have been moved.

    ``what`` describes the accepted input in messages."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give {what}, or write a run file with `rollcall init`")
    if not path.is_dir():
        return path, {}
    if not (path / RUN_FILE).is_file():
        raise ConfigError(f"{path} is a directory without {RUN_FILE}; give {what}")
    return path / RUN_FILE, {"run.dir": str(path)}


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read ``summary.json``; None if the run has not finished yet, the file is damaged or an earlier version wrote it."""
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        return None
    return summary if {"steps", "headline", "no_signal"} <= summary.keys() else None


def has_begun(run_dir: Path) -> bool:
    """Whether a new start must be compatible with existing work: a checkpoint, or a group or attempt in the journal."""
    if any((run_dir / "checkpoints").glob("*step-*")):
        return True
    return any(path.stat().st_size for kind in (GROUPS, ATTEMPTS) for path in (run_dir / "journal").glob(f"*.{kind}"))


def newest_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint, judging by its name; None if there is none."""
    found = checkpoints_of(run_dir / "checkpoints")
    return int(found[0].name.removeprefix("step-")) if found else None


def clear_leftovers(run_dir: Path) -> None:
    """Remove what a killed process left half-written. Only the process that holds the run's lock calls this."""
    for folder in (run_dir, *(run_dir / name for name in ATOMIC_FOLDERS)):
        for path in folder.glob(f"{TEMPORARY}*"):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            except OSError as error:
                warn(f"{path} was left by a write that was killed, and cannot be removed: {error}")


def move_aside(run_dir: Path) -> Path | None:
    """Rename ``runs/x`` to ``runs/x.old-1`` (or the next free number). Return None if there is no ``runs/x``."""
    if not run_dir.exists():
        return None
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    run_dir.rename(target)
    return target


@contextmanager
def unless_begun(run_dir: Path, *, old: Path | None) -> Iterator[None]:
    """If the block raises before anything was trained or measured, undo the start: remove a new directory and move
    back the ``old`` run that was moved aside for it."""
    was_there = run_dir.exists()
    try:
        yield
    except BaseException:
        rows = run_dir / "metrics.jsonl"
        if not was_there and not has_begun(run_dir) and not (rows.exists() and rows.stat().st_size):
            shutil.rmtree(run_dir, ignore_errors=True)
            if old is not None and not run_dir.exists():
                old.rename(run_dir)
                warn(f"nothing was trained, so the old run was moved back to {run_dir}")
        raise
