"""Environments of other packages, each made by `scripts/setup_peers.sh .peers NAME`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PEERS = Path(os.environ.get("ROLLCALL_PEERS") or Path(__file__).parents[1] / ".peers")


def peer(name: str) -> str:
    python = PEERS / name / "bin/python"
    if not python.exists():
        pytest.skip(f"needs {python}; scripts/setup_peers.sh {PEERS} {name}")
    return str(python)
