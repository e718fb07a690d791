"""The model that a run's adapter began with, noted in the run directory: a run that ends before its first checkpoint has nothing
else that tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rollcall.checkpoint.run_dir import has_begun
from rollcall.config.yaml import read_small
from rollcall.durable.atomic import write_atomic
from rollcall.durable.patience import persist
from rollcall.errors import CheckpointError
from rollcall.model.base import other_weights
from rollcall.words import ANOTHER_RUN

FILE = "base.json"
MOST_BYTES = 1 << 20


def refuse_changed_base(run_dir: Path, found: Mapping[str, str], *, base: str) -> None:
    """``found`` is the identity of the weights in ``base`` now, by their type."""
    noted = _read(run_dir / FILE) if has_begun(run_dir) else {}
    if any(noted[kind] != found[kind] for kind in noted.keys() & found.keys()):
        advice = f", or begin a run with this one: {ANOTHER_RUN}"
        raise other_weights(f"run.dir={run_dir}", base=base, advice=advice)


def note_base(run_dir: Path, found: Mapping[str, str]) -> None:
    """Once the run has begun, what is noted stays."""
    path = run_dir / FILE
    if not has_begun(run_dir) or not path.exists():
        data = json.dumps({"format": 1, "base": dict(found)})
        persist(lambda: write_atomic(path, data), path=path, what="the identity of the adapter's model")


def _read(path: Path) -> Mapping[str, str]:
    """Empty: an earlier version noted nothing."""
    try:
        noted = json.loads(read_small(path, most=MOST_BYTES))["base"]
        if not isinstance(noted, dict):
            raise TypeError("it holds no map")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not as Rollcall writes it ({type(error).__name__}: {error}), so it is not known which model the run's adapter is of; "
            "restore the file, or remove it if the model is still the same"
        ) from None
    return noted
