"""A cluster of this machine, and run files for jobs that are submitted to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tiny import save_model

WAIT_S = 600.0


def rollcall(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = start_arguments(*arguments, **variables)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=WAIT_S)


def start_arguments(*arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ROLLCALL_"))}
    return [sys.executable, "-m", "rollcall", *arguments], {**kept, "OMP_NUM_THREADS": "1", **variables}


class OneNode:
    """A cluster of this machine alone, and the folder of someone who submits to it from elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = {"ROLLCALL_STATE_DIR": str(folder / "s"), "ROLLCALL_CLUSTER": "jobs"}

    def up(self) -> None:
        folder = self.folder
        started = rollcall(
            "node", "--rank", "0", "--num-nodes", "1", "--rendezvous", str(folder / "meet"), "--slots", "1",
            cwd=folder, **self.node, HF_TOKEN="of-the-nodes-own-shell", HF_HOME="/of/that/shell",
        )  # fmt: skip
        assert started.returncode == 0, started.stderr
        assert "HF_HOME, HF_TOKEN" in started.stderr and "of-the-nodes" not in started.stderr
        found = json.loads((folder / "s/jobs/node.json").read_text())
        self.token = (folder / "s/jobs/token").read_text()
        # Another state folder: not a node. The address and the token are all it has.
        self.elsewhere = {"ROLLCALL_STATE_DIR": str(folder / "other"), "ROLLCALL_TOKEN": self.token}
        self.address = ("--address", found["dashboard_url"])
        self.make_data()

    def make_data(self) -> None:
        folder = self.folder
        save_model(folder / "model")
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def down(self) -> None:
        stopped = rollcall("down", cwd=self.folder, **self.node)
        assert stopped.returncode == 0, stopped.stderr

    def write_run(self, name: str, **sections: Any) -> Path:
        """A user's folder with a run file that uses paths of the cluster."""
        data = str(self.folder / "sums.jsonl")
        run = {
            "run": {"name": name, "dir": str(self.folder / "runs" / name)},
            "model": {"path": str(self.folder / "model"), "device": "cpu"},
            "data": {"train": data, "val": None, "prompts_per_step": 4},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
            "trainer": {"steps": 2, "save_every": 1, "num_threads": 1, "loggers": []},
            **sections,
        }
        user = self.folder / f"user-{name}"
        user.mkdir()
        (user / "run.yaml").write_text(yaml.safe_dump(run))
        return user


def write_run(shared: Path, name: str, **sections: Any) -> Path:
    """A run file whose model, data and run directory are in the folder that all hosts share."""
    folder = shared / name
    save_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "run": {"name": name, "dir": str(folder / "run")},
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": str(folder / "sums.jsonl"), "val": None, "prompts_per_step": 4},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
        "trainer": {"steps": 2, "save_every": 1, "num_threads": 1, "loggers": []},
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
