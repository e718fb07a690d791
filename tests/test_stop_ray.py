"""A run on Ray that is told to stop: by its job, and with the node that it runs on."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from one_node import WAIT_S, OneNode, rollcall, start_arguments
from runs import wait_for_steps

from rollcall.observe.sinks import read_rows
from rollcall.view.audit import audit

CLUSTER = {
    "num_nodes": 1,
    "num_gpus_per_node": 2,
    "accelerator": "cpu",
    "component_placement": {"actor,rollout": "all"},
}


def newest_steps(run_dir: Path) -> tuple[int, int]:
    """Trained, and saved."""
    trained = max(row["step"] for row in read_rows(run_dir / "metrics.jsonl") if "time/step_s" in row)
    return trained, max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.chaos
def test_a_run_on_ray_saves_when_its_job_is_stopped_and_when_its_node_is() -> None:
    with tempfile.TemporaryDirectory(prefix="rollcall-stop-") as name:
        node = OneNode(Path(name))
        options = ["--rank", "0", "--num-nodes", "1", "--rendezvous", str(node.folder / "meet"), "--slots", "2"]
        command, env = start_arguments("node", *options, "--block", "--save-wait", "120", **node.node)
        log = (node.folder / "node.log").open("w+")
        held = subprocess.Popen(command, cwd=node.folder, env=env, stdout=log, stderr=log)
        try:
            node.make_data()
            user = node.write_run(
                "stopped", cluster=CLUSTER, trainer={"steps": 100_000, "save_every": 0, "num_threads": 1}
            )
            run_dir = node.folder / "runs/stopped"
            checked = rollcall("check", "2", cwd=user, **node.node)
            assert checked.returncode == 0, checked.stderr

            submitted = rollcall("submit", "run.yaml", "--no-wait", cwd=user, **node.node)
            assert submitted.returncode == 0, submitted.stderr
            wait_for_steps(run_dir, 2, timeout_s=WAIT_S)
            stopped = rollcall("job", "stop", cwd=user, **node.node)
            assert "is STOPPED" in stopped.stdout, stopped.stderr
            trained, saved = newest_steps(run_dir)
            said = rollcall("job", "logs", cwd=user, **node.node).stdout
            assert trained == saved >= 2 and said.rstrip().endswith("the same command continues the run")
            assert (
                f"stopped by SIGTERM after step {saved} of 100000, which is saved" in said and "*** SIGTERM" not in said
            )

            submitted = rollcall("submit", "run.yaml", "--no-wait", cwd=user, **node.node)
            assert submitted.returncode == 0, submitted.stderr
            wait_for_steps(run_dir, saved + 2, timeout_s=WAIT_S)
            held.send_signal(signal.SIGTERM)
            assert held.wait(timeout=WAIT_S) == 0
            again, saved_again = newest_steps(run_dir)
            assert again == saved_again >= saved + 2
            assert not audit(run_dir).trained_twice
            assert "for the run on this node to save" in (node.folder / "node.log").read_text()
        finally:
            held.kill()
            held.wait()
            node.down()
            log.close()
            time.sleep(0.5)
