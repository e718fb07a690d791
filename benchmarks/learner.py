"""The learner alone: model FLOPs of an update (6 x parameters x packed tokens) over what the card's matrix unit does.

python -m benchmarks.learner --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import WORKLOADS, Workload, build_model_dir, print_result
from benchmarks.ours import make_config, make_workers
from rollcall.base.types import Sample

PEAK_TFLOPS = 780.0  # an 8192^3 bfloat16 product on one H200


def make_samples(workload: Workload) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for draw, prompt in enumerate(workload.prompts()):
        for attempt in range(workload.samples_per_prompt):
            length = workload.new_tokens[draw * workload.samples_per_prompt + attempt]
            samples.append(
                Sample(
                    draw=draw,
                    attempt=attempt,
                    prompt_ids=np.array(prompt, dtype=np.int32),
                    response_ids=rng.integers(0, workload.vocab_size, length).astype(np.int32),
                    mask=np.ones(length, dtype=np.bool_),
                    behaviour_logprobs=np.full(length, -10.0, dtype=np.float32),
                    old_logprobs=None,
                    reference_logprobs=None,
                    advantages=np.full(length, rng.normal(), dtype=np.float32),
                    returns=None,
                    values=None,
                )
            )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="another than the device's own")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--tokens-per-microbatch", type=int, default=32768)
    parser.add_argument("--model-dir", type=Path, help="keep the workload's model here; absent: built and thrown away")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload or ("grpo-0.8m" if args.device == "cpu" else "qwen-0.5b")]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, args.model_dir or Path(folder) / "model")
        config = make_config(
            workload, model_dir, Path(folder) / "run", device=args.device, steps=1,
            tokens_per_microbatch=args.tokens_per_microbatch,
        )  # fmt: skip
        workers = make_workers(config)
        samples = make_samples(workload)
        num_parameters = sum(parameter.numel() for parameter in workers.learner.model.parameters())
        seconds: list[float] = []
        tokens = 0
        for _ in range(args.updates + 2):
            before, start = workers.learner.num_tokens_trained, time.perf_counter()
            workers.learner.update(samples)
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            tokens = workers.learner.num_tokens_trained - before
        workers.close()
    print("updates", [round(second, 3) for second in seconds], flush=True)
    update_s = statistics.median(seconds[2:])
    tflops = 6 * num_parameters * tokens / update_s / 1e12
    ours = {
        "update_s": round(update_s, 4),
        "packed_tokens": tokens,
        "parameters": num_parameters,
        "tflops_6nd": round(tflops, 2),
        "share_of_peak": round(tflops / PEAK_TFLOPS, 3),
    }
    ratio = tflops / PEAK_TFLOPS if args.device == "cuda" else None
    peer = {"peak_tflops": PEAK_TFLOPS} if args.device == "cuda" else None
    print_result("learner", workload=workload.name, device=args.device, ours=ours, peer=peer, ratio=ratio)


if __name__ == "__main__":
    main()
