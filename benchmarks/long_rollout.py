"""Decoding at long contexts: how much slower it gets, against what the bytes alone would cost.

A decode step reads the weights once and the keys and values of every sequence. So from one context to a longer one it should slow
down by the ratio of these bytes, and by no more. `of_predicted` is the measured slowdown over that ratio: at most 1 is the aim.
`added_gb_per_s` is the rate at which the bytes that a longer context adds are read: near what the card can read is the aim.

The time of a decode step is the difference of two runs with the same prompts and other numbers of new tokens, so filling the
prompts does not count. Prompts are all different, so nothing is shared.

python -m benchmarks.long_rollout                                                          a small model, for the syntax
python -m benchmarks.long_rollout --device cuda --workload qwen-0.5b --workload qwen-7b
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import WORKLOADS, Workload, build_model_dir, measure, print_result
from benchmarks.ours import make_config, make_workers
from rollcall.config import Config
from rollcall.engine.protocol import Request, Sampling

FEW = 32  # new tokens of the shorter run
BLOCK = 64  # tokens; the last block of a sequence is not full
CONTEXTS = {"cpu": (128, 512, 2048), "cuda": (1024, 8192, 32768)}
WIDTHS = {"float32": 4, "bfloat16": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append")
    parser.add_argument("--context", type=int, action="append", help="prompt tokens; several, the shortest first")
    parser.add_argument("--batch", type=int, help="sequences at once; 16 on CUDA, 4 on a CPU")
    parser.add_argument("--new-tokens", type=int, help="decoded at each context; 256 on CUDA, 32 on a CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-dir", type=Path, help="keep the model here; absent: built and thrown away")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    args.batch = args.batch or (4 if on_cpu else 16)
    args.new_tokens = args.new_tokens or (32 if on_cpu else 256)
    args.context = args.context or list(CONTEXTS[args.device])
    for name in args.workload or ["rollout-0.8m" if on_cpu else "qwen-0.5b"]:
        run_workload(lengthened(WORKLOADS[name], args), args)


def lengthened(workload: Workload, args: argparse.Namespace) -> Workload:
    """The workload's model with prompts of the longest context, one completion each."""
    return replace(
        workload,
        name=f"{workload.name}-long",
        num_prompts=args.batch,
        samples_per_prompt=1,
        prompt_tokens=max(args.context),
        new_tokens=(FEW + args.new_tokens,) * args.batch,
    )


def run_workload(workload: Workload, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_model_dir(workload, args.model_dir or Path(folder) / "model")
        workers = make_workers(engine_config(workload, model_dir, Path(folder) / "run", args))
        try:
            seconds = {context: step_s(workers.engine, workload, context, args) for context in args.context}
        finally:
            workers.close()
    ours = against_bytes(workload, seconds, new_tokens=args.new_tokens)
    print_result("long_rollout", workload=workload.name, device=args.device, ours=ours, peer=None, ratio=None)


def engine_config(workload: Workload, model_dir: Path, run_dir: Path, args: argparse.Namespace) -> Config:
    """Only the engine is used, so KV gets what it needs, whatever the learner beside it would want."""
    # GRPO asks for two completions of a prompt; requests here have one each.
    pairs = replace(workload, samples_per_prompt=2, new_tokens=workload.new_tokens * 2)
    config = make_config(pairs, model_dir, run_dir, device=args.device, steps=1, max_running=args.batch)
    kv_tokens = args.batch * (workload.max_tokens + BLOCK)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_tokens": kv_tokens})})


def step_s(engine: Any, workload: Workload, context: int, args: argparse.Namespace) -> float:
    """Seconds of one decode step of all sequences at this context."""
    prompts = [np.array(prompt[:context], dtype=np.int32) for prompt in workload.prompts()]
    preempted = engine.num_preemptions
    runs = 0

    def decode(count: int) -> None:
        nonlocal runs
        runs += 1
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=count, stop_token_ids=(), stop_strings=())
        for row, prompt in enumerate(prompts):
            engine.submit(Request(id=f"{context}/{runs}/{row}", prompt_ids=prompt, seed=row, sampling=sampling))
        found = 0
        while engine.num_unfinished:
            found += sum(len(one.token_ids) for one in engine.step().values())
        assert found == count * len(prompts), f"{found} tokens instead of {count * len(prompts)}"

    few, many = (
        measure(lambda count=count: decode(count), warmup=1, repeats=args.repeats).median_s
        for count in (FEW, FEW + args.new_tokens)
    )
    assert engine.num_preemptions == preempted, f"{args.batch} sequences of {context} tokens do not fit; lower --batch"
    found = (many - few) / args.new_tokens
    assert found > 0, f"{few:.3f} s for {FEW} tokens and {many:.3f} s for more: the machine is busy; measure again"
    print(f"{workload.name} context {context}: {1e3 * found:.3f} ms a step of {len(prompts)} sequences", flush=True)
    return found


def against_bytes(workload: Workload, seconds: dict[int, float], *, new_tokens: int) -> dict[str, Any]:
    """Each context with its bytes, and how its slowdown over the first compares with theirs."""
    weights, per_token = weight_bytes(workload), kv_bytes_per_token(workload)
    rows: list[dict[str, Any]] = []
    for context, step in seconds.items():
        kv = workload.num_prompts * per_token * (context + FEW + new_tokens // 2)
        row: dict[str, Any] = {
            "context": context,
            "tokens_per_s": round(workload.num_prompts / step, 1),
            "step_ms": round(1e3 * step, 4),
            "kv_bytes_per_token": kv // workload.num_prompts,
            "bytes_per_step": weights + kv,
            "gb_per_s": round((weights + kv) / step / 1e9, 1),
        }
        first = rows[0] if rows else row
        row["slowdown"] = round(row["step_ms"] / first["step_ms"], 3)
        row["predicted_slowdown"] = round(row["bytes_per_step"] / first["bytes_per_step"], 3)
        row["of_predicted"] = round(row["slowdown"] / row["predicted_slowdown"], 3)
        if row is not first:  # what the longer context adds, without what every step costs
            added_s = (row["step_ms"] - first["step_ms"]) / 1e3
            row["added_gb_per_s"] = round((row["bytes_per_step"] - first["bytes_per_step"]) / added_s / 1e9, 1)
        rows.append(row)
    return {
        "batch": workload.num_prompts,
        "weight_bytes": weights,
        "contexts": rows,
        "worst_of_predicted": max(row["of_predicted"] for row in rows),
    }


def weight_bytes(workload: Workload) -> int:
    """What a decode step reads of the weights: all layers and the output head; of embeddings that are not the head, a few rows."""
    shape = workload.shape
    hidden, heads, kv_heads = (shape[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * shape["intermediate_size"]
    numbers = shape["num_hidden_layers"] * layer + workload.vocab_size * hidden
    return numbers * WIDTHS[workload.dtype]


def kv_bytes_per_token(workload: Workload) -> int:
    """What one token of context adds to each decode step of its sequence."""
    shape = workload.shape
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * WIDTHS[workload.dtype]


if __name__ == "__main__":
    main()
