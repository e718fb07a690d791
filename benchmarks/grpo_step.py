"""Seconds per GRPO step (rollout, rewards, journal, update) against TRL's GRPOTrainer on the same work.

python -m benchmarks.grpo_step --device cpu
python -m benchmarks.grpo_step --device cuda --peer none
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import WORKLOADS, build_model_dir, peer_python, print_result, run_peer
from benchmarks.ours import make_config, make_workers, run_steps

WARMUP = {"cpu": 2, "cuda": 3}
PEER_DEADLINE_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    parser.add_argument("--peer-python", help="Python that has TRL")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--tokens-per-microbatch", type=int, default=None)
    parser.add_argument("--compile", action="store_true", help="actor.compile=true: compile the learner's layers")
    parser.add_argument("--model-dir", type=Path, help="keep the workload's model here; absent: built and thrown away")
    args = parser.parse_args()
    workload = WORKLOADS["grpo-0.8m" if args.device == "cpu" else "qwen-0.5b"]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, args.model_dir or Path(folder) / "model")
        steps = args.steps + WARMUP[args.device]
        budget = args.tokens_per_microbatch or (16384 if args.device == "cpu" else 32768)
        config = make_config(
            workload, model_dir, Path(folder) / "run", device=args.device, steps=steps, tokens_per_microbatch=budget,
            compile=args.compile or None,
        )  # fmt: skip
        workers = make_workers(config)
        try:
            recorder = run_steps(config, workers)
        finally:
            workers.close()
        seconds = recorder.step_seconds()[WARMUP[args.device] - 1 :]
        rows = [metrics for _, metrics in recorder.rows][WARMUP[args.device] :]
        ours = {
            "step_s": round(statistics.median(seconds), 4),
            "steps": [round(second, 3) for second in seconds],
            "rollout_s": round(statistics.median(row["time/rollout_s"] for row in rows), 4),
            "update_s": round(statistics.median(row["time/update_s"] for row in rows), 4),
            "rollout_tokens_per_s": round(statistics.median(row["rollout/tokens_per_s"] for row in rows)),
            "logprob_mismatch": statistics.median(row["rollout/logprob_mismatch"] for row in rows),
            "peak_memory_gib": round(rows[-1]["perf/peak_memory_gib"], 2),
        }
        print("ours", ours, flush=True)
        peer = ratio = None
        if args.peer == "trl":
            python = peer_python("trl", args.peer_python)
            options = ["--model-dir", str(model_dir), "--device", args.device]
            peer = run_peer("peer_trl", python=python, workload=workload, args=options, deadline_s=PEER_DEADLINE_S)
            ratio = peer["step_s"] / ours["step_s"]
    print_result("grpo_step", workload=workload.name, device=args.device, ours=ours, peer=peer, ratio=ratio)


if __name__ == "__main__":
    main()
