"""Seconds per GRPO step (rollout, rewards, journal, update) against TRL's GRPOTrainer on the same work.

python -m benchmarks.grpo_step --device cpu
python -m benchmarks.grpo_step --compile --dtype bfloat16     where the CPU computes in it: against the faster of TRL's two
python -m benchmarks.grpo_step --compile --dtype bfloat16 --turns 5     five times in turn; the median of the ratios counts
python -m benchmarks.grpo_step --device cuda --peer none
python -m benchmarks.grpo_step --device cuda --peer local     the same step through Ray against local mode
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, WORKLOADS, Workload, build_model_dir, peer_python, print_result, run_peer
from benchmarks.ours import make_config, make_workers, one_node, run_steps
from rollcall.config import Config, parse_config

Turn = tuple[dict[str, Any], dict[str, Any] | None]  # ours, the peer's
WARMUP = {"cpu": 2, "cuda": 3}
PEER_DEADLINE_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peer", choices=("trl", "local", "none"), default="trl")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native", help="who samples on our side")
    parser.add_argument("--peer-python", help="Python that has TRL")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument(
        "--turns", type=int, default=1, help="ours and TRL in turn, so often: a machine has quieter minutes"
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="another than the device's own")
    parser.add_argument("--tokens-per-microbatch", type=int, default=None)
    parser.add_argument("--compile", action="store_true", help="actor.compile=true, rollout.compile=true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of the workload's own")
    parser.add_argument("--model-dir", type=Path, help="keep the workload's model here; absent: built and thrown away")
    args = parser.parse_args()
    if args.turns > 1 and args.peer != "trl":
        parser.error(f"--turns {args.turns} is for --peer trl, not for --peer {args.peer}")
    workload = WORKLOADS[args.workload or ("grpo-0.8m" if args.device == "cpu" else "qwen-0.5b")]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, args.model_dir or Path(folder) / "model")
        steps = args.steps + WARMUP[args.device]
        budget = args.tokens_per_microbatch or (16384 if args.device == "cpu" else 32768)
        given = dataclasses.replace(workload, dtype=args.dtype or workload.dtype)
        config = make_config(
            given, model_dir, Path(folder) / "run", device=args.device, steps=steps, engine=args.engine,
            tokens_per_microbatch=budget, compile=args.compile,
        )  # fmt: skip
        if args.peer == "local":
            peer = measure_local(args, model_dir)
            with one_node(Path(folder)):
                ours, _ = take_turn(args, on_the_cluster(config), workload, model_dir)
            turns = [(ours, peer)]
        else:
            turns = [take_turn(args, config, workload, model_dir) for _ in range(args.turns)]
    ours, peer = sorted(turns, key=ratio_of)[(len(turns) - 1) // 2]
    ratio = ratio_of((ours, peer)) if peer else None
    if len(turns) > 1:
        print("ratios", [round(ratio_of(turn), 3) for turn in turns])
    print_result("grpo_step", workload=workload.name, device=args.device, ours=ours, peer=peer, ratio=ratio)


def take_turn(args: argparse.Namespace, config: Config, workload: Workload, model_dir: Path) -> Turn:
    shutil.rmtree(config.run.dir / "journal", ignore_errors=True)  # of the turn before: a run would resume
    ours = measure(config, warmup=WARMUP[args.device])
    print("ours", ours, flush=True)
    if args.peer != "trl":
        return ours, None
    return ours, min(measure_trl(args, workload, model_dir), key=lambda result: result["step_s"])


def ratio_of(turn: Turn) -> float:
    ours, peer = turn
    return peer["step_s"] / ours["step_s"] if peer else 0.0


def measure(config: Config, *, warmup: int) -> dict[str, Any]:
    workers = make_workers(config)
    try:
        recorder = run_steps(config, workers)
    finally:
        workers.close()
    seconds = recorder.step_seconds()[warmup - 1 :]
    rows = [metrics for _, metrics in recorder.rows][warmup:]
    return {
        "step_s": round(statistics.median(seconds), 4),
        "steps": [round(second, 3) for second in seconds],
        "rollout_s": round(statistics.median(row["time/rollout_s"] for row in rows), 4),
        "update_s": round(statistics.median(row["time/update_s"] for row in rows), 4),
        "sync_s": round(statistics.median(row["time/sync_s"] for row in rows), 4),
        "rollout_tokens_per_s": round(statistics.median(row["rollout/tokens_per_s"] for row in rows)),
        "logprob_mismatch": statistics.median(row["rollout/logprob_mismatch"] for row in rows),
        "peak_memory_gib": round(rows[-1]["perf/peak_memory_gib"], 2),
    }


def measure_trl(args: argparse.Namespace, workload: Workload, model_dir: Path) -> list[dict[str, Any]]:
    """In the workload's own precision, and in ours where that is another."""
    python = peer_python("trl", args.peer_python)
    results = []
    for dtype in dict.fromkeys([workload.dtype, args.dtype or workload.dtype]):
        options = ["--model-dir", str(model_dir), "--device", args.device]
        options += ["--dtype", dtype, "--repeats", str(args.steps)]
        results.append(run_peer("peer_trl", python=python, workload=workload, args=options, deadline_s=PEER_DEADLINE_S))
        print("TRL", results[-1], flush=True)
    return results


def measure_local(args: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """The same in one process, which gives its memory back before the other begins."""
    options = ["--device", args.device, "--peer", "none", "--steps", str(args.steps), "--model-dir", str(model_dir)]
    options += ["--engine", args.engine, *(["--compile"] if args.compile else [])]
    options += ["--dtype", args.dtype] if args.dtype else []
    options += ["--tokens-per-microbatch", str(args.tokens_per_microbatch)] if args.tokens_per_microbatch else []
    options += ["--workload", args.workload] if args.workload else []
    command = [sys.executable, "-m", "benchmarks.grpo_step", *options]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=PEER_DEADLINE_S, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["ours"]


def on_the_cluster(config: Config) -> Config:
    """The same run in a process of the cluster, roles collocated."""
    accelerator = "cpu" if config.model.device == "cpu" else "gpu"
    cluster = {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": "all"}}
    return parse_config(config.model_dump(mode="json") | {"cluster": cluster | {"accelerator": accelerator}})


if __name__ == "__main__":
    main()
