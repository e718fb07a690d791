"""Useful tokens per second of the native engine, log-probs included, against the better of transformers and vLLM.

python -m benchmarks.rollout --device cpu                       all three CPU workloads
python -m benchmarks.rollout --device cuda --peer none
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import WORKLOADS, Workload, build_model_dir, measure, peer_python, print_result, run_peer
from benchmarks.ours import make_config, make_workers
from rollcall.engine.protocol import Core, Request, Sampling

CPU_WORKLOADS = ("rollout-0.8m", "rollout-135m", "rollout-11m-mixed")
PEER_DEADLINE_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append")
    parser.add_argument("--peer", choices=("both", "transformers", "vllm", "none"), default="both")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model-dir", type=Path, help="keep the workload's model here; absent: built and thrown away")
    args = parser.parse_args()
    for name in args.workload or (CPU_WORKLOADS if args.device == "cpu" else ("qwen-0.5b",)):
        run_workload(WORKLOADS[name], args)


def run_workload(workload: Workload, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, args.model_dir or Path(folder) / "model")
        ours = measure_ours(workload, model_dir, Path(folder) / "run", args)
        print("ours", ours, flush=True)
        peers = {"both": ("transformers", "vllm"), "none": ()}.get(args.peer, (args.peer,))
        results: dict[str, Any] = {}
        for peer in peers:
            # The TRL environment has transformers; vLLM has one of its own.
            python = peer_python("trl" if peer == "transformers" else peer)
            options = ["--model-dir", str(model_dir), "--device", args.device]
            results[peer] = run_peer(
                f"peer_{peer}", python=python, workload=workload, args=options, deadline_s=PEER_DEADLINE_S
            )
            print(peer, results[peer], flush=True)
        best = max((result["tokens_per_s"] for result in results.values()), default=None)
        ratio = ours["tokens_per_s"] / best if best else None
    print_result("rollout", workload=workload.name, device=args.device, ours=ours, peer=results or None, ratio=ratio)


def measure_ours(workload: Workload, model_dir: Path, run_dir: Path, args: argparse.Namespace) -> dict[str, Any]:
    config = make_config(workload, model_dir, run_dir, device=args.device, steps=1)
    workers = make_workers(config)
    prompts = workload.prompts()
    runs = 0

    def once() -> None:
        nonlocal runs
        submit(workers.engine.core, workload, prompts, tag=runs)
        runs += 1
        count = 0
        while workers.engine.core.num_unfinished:
            count += sum(len(completion.token_ids) for completion in workers.engine.core.step().values())
        assert count == workload.num_new_tokens, f"{count} tokens instead of {workload.num_new_tokens}"

    try:
        timing = measure(once, warmup=2, repeats=args.repeats)
    finally:
        workers.close()
    return {
        "tokens_per_s": round(workload.num_new_tokens / timing.median_s, 1),
        "median_s": round(timing.median_s, 4),
        "seconds": [round(second, 4) for second in timing.seconds],
    }


def submit(core: Core, workload: Workload, prompts: list[list[int]], *, tag: int) -> None:
    per_prompt = workload.samples_per_prompt
    for index, prompt in enumerate(prompts):
        ids = np.array(prompt, dtype=np.int32)
        for place, length in enumerate(workload.new_tokens[index * per_prompt : (index + 1) * per_prompt]):
            sampling = Sampling(
                temperature=1.0, top_p=1.0, top_k=0, max_tokens=length, stop_token_ids=(), stop_strings=()
            )
            core.submit(
                Request(
                    id=f"{tag}/{index}/{place}",
                    prompt_ids=ids,
                    seed=(tag * 1000 + index) * 100 + place,
                    sampling=sampling,
                    group=f"{tag}/{index}",
                )
            )


if __name__ == "__main__":
    main()
