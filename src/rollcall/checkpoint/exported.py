"""The model that a run exported to ``RUN/model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollcall.base.errors import CheckpointError
from rollcall.base.wait import warn
from rollcall.checkpoint.run_dir import read_summary
from rollcall.checkpoint.store import MANIFEST, Checkpoint
from rollcall.config.yaml import read_small
from rollcall.model.stored.files import StoredError, plain_damage
from rollcall.model.stored.find import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PROBE
from rollcall.model.stored.safetensors import check_weights


def exported_model(run_dir: Path, *, last: Checkpoint | None) -> Path | None:
    """Return the run's exported model. None if there is none, or if it is older than the newest checkpoint."""
    model = run_dir / "model"
    if not (model / "config.json").exists():
        return None
    # Compare with the manifest's time, not the folder's: gathering parts changes the folder but not what is saved.
    if last is not None and model.stat().st_mtime < (last.path / MANIFEST).stat().st_mtime:
        return None
    try:
        _refuse_damaged(model)
        check_weights(model)
    except StoredError as error:
        if last is None:
            raise CheckpointError(str(error)) from None
        warn(f"{error}. This command uses the checkpoint of step {last.step} instead")
        return None
    return model


def _refuse_damaged(model: Path) -> None:
    """Raise if a file other than the weights is missing or is not valid JSON. A user may have edited these files."""
    names = ["config.json", *([ADAPTER_CONFIG] if (model / ADAPTER_WEIGHTS).exists() else [])]
    names += [PROBE] if (model / PROBE).exists() else []
    while names:
        path = model / names.pop()
        if not path.is_file():
            raise StoredError(f"{path} does not exist; restore the file")
        if path.suffix == ".json":
            with plain_damage(f"{path} is not a complete JSON file"):
                found = json.loads(read_small(path))
                if not isinstance(found, dict):
                    raise ValueError(f"it contains a {type(found).__name__}, not a map")
                if path.name == PROBE:
                    names += found.get("beside", {})  # config files that were saved with the weights


def finished_summary(run_dir: Path, *, last: Checkpoint | None, num_steps: int) -> dict[str, Any] | None:
    """Return the summary of a run that has trained all its steps and exported its model. None if the run is not finished."""
    if last is None or last.step != num_steps or exported_model(run_dir, last=last) is None:
        return None
    summary = read_summary(run_dir)
    return summary if summary is not None and summary["steps"] == num_steps else None
