"""`make episodes`: the embedded model learns to ask for a number, then to answer with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def evaluations(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


@pytest.mark.slow
def test_the_model_learns_to_ask_before_it_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollcall", "train", "examples/hidden_number.yaml", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = evaluations(tmp_path / "run")
    assert found[0] < 0.3
    assert found[-1] > 0.9
