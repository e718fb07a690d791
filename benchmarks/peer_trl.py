"""Peer: one GRPO step with TRL's `GRPOTrainer`, at settings chosen for its speed.

A step is generation, reward, one optimizer update: no KL, one update per generation batch, no gradient checkpointing,
no logging, no saving. Eos is banned, so every completion has exactly the workload's length.

    python -m benchmarks.peer_trl --workload grpo-0.8m
    python -m benchmarks.peer_trl --workload qwen-0.5b --device cuda [--vllm]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.common import WORKLOADS, Workload, model_dir, peer_parser

WARMUP_STEPS = 2


class StepTimes(TrainerCallback):
    """When each step ended; a step begins where the one before it ended, so nothing the trainer does is left out."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends_s.append(time.perf_counter())

    @property
    def steps_s(self) -> list[float]:
        return [end - start for start, end in zip(self.ends_s, self.ends_s[1:], strict=False)]


class TimedTrainer(GRPOTrainer):
    """TRL's trainer with a clock around its generation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generations_s: list[float] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)  # returns lists, so the device is done
        self.generations_s.append(time.perf_counter() - start_s)
        return result


def grpo_config(
    workload: Workload, *, eos: int, device: str, dtype: str, vllm: bool, rows: int, steps: int, out: str
) -> GRPOConfig:
    """`rows` completions per micro-batch; the gradients of all micro-batches make one update."""
    never_stop = {"ignore_eos": True} if vllm else {"suppress_tokens": [eos]}
    engine: dict[str, Any] = {}
    if vllm:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": workload.max_tokens,
        }
    return GRPOConfig(
        output_dir=out,
        use_cpu=device == "cpu",
        bf16=dtype == "bfloat16",
        model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=workload.num_completions // rows,
        num_generations=workload.samples_per_prompt,
        max_completion_length=max(workload.new_tokens),
        generation_kwargs=never_stop,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        loss_type="grpo",
        mask_truncated_completions=False,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=steps,
        shuffle_dataset=False,
        dataloader_pin_memory=device == "cuda",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=workload.seed,
        **engine,
    )


def train(
    workload: Workload, path: Path, *, device: str, dtype: str, vllm: bool, rows: int, steps: int
) -> dict[str, Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    prompts = [prompt for step in range(steps) for prompt in workload.prompts(step)]

    def length_reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        for ids in completion_ids:
            assert len(ids) == max(workload.new_tokens), f"a completion stopped early, at {len(ids)} tokens"
        return [float(len(text)) for text in completions]

    times = StepTimes()
    with tempfile.TemporaryDirectory() as out:
        trainer = TimedTrainer(
            model=str(path),
            reward_funcs=length_reward,
            args=grpo_config(
                workload,
                eos=tokenizer.eos_token_id,
                device=device,
                dtype=dtype,
                vllm=vllm,
                rows=rows,
                steps=steps,
                out=out,
            ),
            train_dataset=Dataset.from_dict({"prompt": [tokenizer.decode(prompt) for prompt in prompts]}),
            processing_class=tokenizer,
            callbacks=[times],
        )
        trainer.train()
    assert len(times.ends_s) == len(trainer.generations_s) == steps, "one generation per step"
    # The first step has no beginning on the clock, so one warm-up step is already left out.
    step_s = statistics.median(times.steps_s[WARMUP_STEPS - 1 :])
    generation_s = statistics.median(trainer.generations_s[WARMUP_STEPS:])
    return {
        "step_s": round(step_s, 4),
        "generation_s": round(generation_s, 4),
        "training_s": round(step_s - generation_s, 4),
        "tokens_per_s": round(workload.num_new_tokens / step_s, 1),
        "generation_tokens_per_s": round(workload.num_new_tokens / generation_s, 1),
        "steps_s": [round(seconds, 4) for seconds in times.steps_s[WARMUP_STEPS - 1 :]],
        "peak_gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
    }


def main() -> None:
    parser = peer_parser(__doc__, workload="grpo-0.8m")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the trainer's process (CUDA)")
    parser.add_argument("--rows", type=int, help="completions per micro-batch; default: all on CPU, 64 on CUDA")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of the workload's own")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    dtype = args.dtype or workload.dtype
    rows = args.rows or (workload.num_completions if args.device == "cpu" else min(64, workload.num_completions))
    if workload.num_completions % rows:
        parser.error(f"--rows {rows} does not divide the {workload.num_completions} completions of a step")
    torch.set_num_threads(workload.threads)
    with model_dir(workload, args.model_dir) as path:
        steps = WARMUP_STEPS + args.repeats
        numbers = train(workload, path, device=args.device, dtype=dtype, vllm=args.vllm, rows=rows, steps=steps)
    result = {"peer": "trl", "version": trl.__version__, "workload": workload.name}
    result |= {"dtype": dtype, "vllm": args.vllm, "rows": rows}
    print(json.dumps(result | numbers), flush=True)


if __name__ == "__main__":
    main()
