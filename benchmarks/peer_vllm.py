"""Peer: rollout with vLLM's offline engine, log-probs of the sampled tokens on.

Example:
    python -m benchmarks.peer_vllm --workload rollout-0.8m
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.common import WORKLOADS, Workload, measure, model_dir, peer_parser


def set_environment(workload: Workload, *, device: str) -> None:
    """vLLM reads these at import. One process: with two cores, a second one for the engine only gets in the way."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; the largest CPU workload needs half of it
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{workload.threads - 1}"
    else:
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it wants a compiler and a network


def build_engine(workload: Workload, path: Path, *, device: str) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"enforce_eager": True} if device == "cpu" else {"gpu_memory_utilization": 0.6}
    return LLM(
        model=str(path),
        dtype=workload.dtype,
        max_model_len=workload.max_tokens,
        max_num_seqs=workload.num_completions,
        seed=workload.seed,
        disable_log_stats=True,
        **options,
    )


def rollout(engine: Any, workload: Workload) -> None:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    params = [
        SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False
        )
        for length in workload.new_tokens
    ]
    prompts = [{"prompt_token_ids": ids} for ids in workload.completion_prompts()]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for output, length in zip(outputs, workload.new_tokens, strict=True):
        (completion,) = output.outputs
        assert len(completion.token_ids) == len(completion.logprobs) == length, "generation stopped early"


def main() -> None:
    args = peer_parser(__doc__, workload="rollout-0.8m").parse_args()
    workload = WORKLOADS[args.workload]
    set_environment(workload, device=args.device)
    import vllm  # pyright: ignore[reportMissingImports]

    with model_dir(workload, args.model_dir) as path:
        engine = build_engine(workload, path, device=args.device)
        timing = measure(lambda: rollout(engine, workload), warmup=2, repeats=args.repeats)
    result = {
        "peer": "vllm",
        "version": vllm.__version__,
        "workload": workload.name,
        "tokens_per_s": round(workload.num_new_tokens / timing.median_s, 1),
        "seconds": [round(seconds, 4) for seconds in timing.seconds],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
