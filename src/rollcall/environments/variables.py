"""The environment variables of what runs an environment: those that `environment.env` names, and the ones that every program needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollcall.errors import ConfigError
from rollcall.reward.confine import Confinement, environment
from rollcall.words import are

ROOT = Path(__file__).resolve().parents[2]  # where the package lies


def variables_of(env: Sequence[str]) -> dict[str, str]:
    """ConfigError: one of those that ``env`` names is not set."""
    if missing := [name for name in env if name not in os.environ]:
        it = "it" if len(missing) == 1 else "them"
        raise ConfigError(
            f"environment.env names {', '.join(missing)}, which {are(len(missing))} not set where environments run (here); export {it}, or "
            f"take {it} out of environment.env"
        )
    confinement = Confinement(own_files=False, network=True, env=tuple(env), processes=0, memory_mb=0, file_mb=0)
    return environment(confinement, folder=tempfile.gettempdir(), environ=os.environ, root=ROOT)
