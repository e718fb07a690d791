"""Distinguishes new run directories from started ones, cleans up after a killed process, and estimates a run's disk space."""

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
from rollcall.base.patience import free_bytes
from rollcall.base.wait import warn
from rollcall.base.words import counted
from rollcall.config import Config
from rollcall.model.stored.find import checkpoints_of
from rollcall.plan.memory import GIB, ModelSizes, state_width

RUN_FILE = "run.yaml"  # the config that the run was last started with
_OF_A_RUN = (RUN_FILE, "journal", "checkpoints", "events.jsonl", "metrics.jsonl", "summary.json")
ATOMIC_FOLDERS = ("samples", "token_scores", "logs")  # a killed process may leave temporary files in these folders


def is_run(run_dir: Path) -> bool:
    """Whether a folder contains anything that a run writes."""
    return any((run_dir / name).exists() for name in _OF_A_RUN)


def run_file_of(path: Path, *, what: str = "a run file or a run directory") -> tuple[Path, dict[str, str]]:
    """Return the run file at or inside ``path``, and overrides for its values, because a run directory may have been moved.

    ``what`` names the accepted input in messages."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give {what}, or write a run file with `rollcall init`")
    if not path.is_dir():
        return path, {}
    if not (path / RUN_FILE).is_file():
        raise ConfigError(f"{path} is a directory without {RUN_FILE}; give {what}")
    return path / RUN_FILE, {"run.dir": str(path)}


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read ``summary.json``. None if the run has not finished, the file is damaged, or an earlier version wrote it."""
    try:
        summary = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        return None
    return summary if {"steps", "headline", "no_signal"} <= summary.keys() else None


def has_begun(run_dir: Path) -> bool:
    """Whether the directory contains work that a new start must continue: a checkpoint, or a group or attempt in the journal."""
    if any((run_dir / "checkpoints").glob("*step-*")):
        return True
    return any(path.stat().st_size for kind in (GROUPS, ATTEMPTS) for path in (run_dir / "journal").glob(f"*.{kind}"))


def newest_step(run_dir: Path) -> int | None:
    """Return the step in the newest checkpoint's name, or None if there is no checkpoint."""
    found = checkpoints_of(run_dir / "checkpoints")
    return int(found[0].name.removeprefix("step-")) if found else None


def clear_leftovers(run_dir: Path) -> None:
    """Remove files that a killed process left half-written. Only the process that holds the run's lock may call this."""
    for folder in (run_dir, *(run_dir / name for name in ATOMIC_FOLDERS)):
        for path in folder.glob(f"{TEMPORARY}*"):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            except OSError as error:
                warn(f"{path} was left by a killed process and cannot be removed: {error}")


def move_aside(run_dir: Path) -> Path | None:
    """Rename ``runs/x`` to ``runs/x.old-1`` (or the next free number). Return None if there is no ``runs/x``."""
    if not run_dir.exists():
        return None
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    return run_dir.rename(target)


@contextmanager
def unless_begun(run_dir: Path, *, old: Path | None) -> Iterator[None]:
    """If the block raises before anything was trained or measured, undo the start: remove the new directory, and move
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


def checkpoint_bytes(config: Config, sizes: ModelSizes, *, width: int) -> int:
    """Return the size of a checkpoint. ``width`` is the number of bytes per weight."""
    trained = sizes.num_parameters if (lora := config.model.lora) is None else sizes.adapter_parameters(lora)
    critic = sizes.body_parameters if config.algorithm.name == "ppo" else 0
    each = ((trained, config.actor), (critic, config.critic))
    return sum(count * (width + state_width(section, width=width)) for count, section in each)


def size_words(config: Config, *, checkpoint: int, model: int) -> str | None:
    """Return a message about the disk space for checkpoints and model, given their sizes in bytes. None if little space is needed."""
    trainer, run_dir, on_nodes = config.trainer, config.run.dir, config.checkpoint.place == "local"
    saves = -(-trainer.steps // trainer.save_every) if trainer.save_every else 1  # including the last step
    kept = trainer.keep_last + (trainer.keep_best if config.data.val is not None else 0)
    paths = [*run_dir.glob("checkpoints/**/*"), *run_dir.glob("model/**/*")]
    held = sum(path.stat().st_size for path in paths if path.is_file())
    free = (free_bytes(run_dir.absolute()) or 0) + held
    # A new checkpoint is complete before an old one is removed.
    peak = model + (0 if on_nodes else min(saves, kept + 1) * checkpoint)
    if peak <= free and min(saves, kept) * checkpoint + model < GIB:
        return None
    count = f"{counted(min(saves, kept), 'checkpoint')} of {checkpoint / GIB:,.1f} GiB"
    text = (
        f"{run_dir} will store a model of {model / GIB:,.1f} GiB and {'each node will store its parts of ' if on_nodes else ''}{count}. "
        f"This takes up to {peak / GIB:,.1f} GiB in {run_dir} during a save, and {free / GIB:,.1f} GiB are available on its disk"
    )
    if peak <= free:
        return text
    return (
        f"warning: {text}, which is too little. Lower trainer.keep_last or trainer.keep_best, free space, or choose a run.dir on "
        "another disk; a save that does not fit waits for space"
    )
