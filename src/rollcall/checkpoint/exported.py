"""The model that a run has left in ``RUN/model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollcall.checkpoint.store import MANIFEST, Checkpoint
from rollcall.errors import CheckpointError
from rollcall.stored.files import StoredError
from rollcall.stored.safetensors import check_weights
from rollcall.wait import warn


def exported_model(run_dir: Path, *, last: Checkpoint | None) -> Path | None:
    """The model that the run has left; None: there is none, or it is of fewer steps than the newest checkpoint."""
    model = run_dir / "model"
    if not (model / "config.json").exists():
        return None
    # By its manifest: gathering parts changes the checkpoint's folder, not what is saved.
    if last is not None and model.stat().st_mtime < (last.path / MANIFEST).stat().st_mtime:
        return None
    try:
        check_weights(model)
    except StoredError as error:
        if last is None:
            raise CheckpointError(str(error)) from None
        warn(f"{error}. Until then the checkpoint of step {last.step} is used in its place")
        return None
    return model


def finished_summary(run_dir: Path, *, last: Checkpoint | None, num_steps: int) -> dict[str, Any] | None:
    """The summary of a run that has trained all its steps and left its model; None: there is something to do."""
    if last is None or last.step != num_steps or exported_model(run_dir, last=last) is None:
        return None
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        return summary if summary["steps"] == num_steps and "headline" in summary else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
