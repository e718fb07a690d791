"""Peer: rollout with transformers' `generate`.

It looks for its best setting first (cache, and for mixed lengths the number of batches, shortest completions first),
then times that setting with and without the log-probs of the sampled tokens. Rows of mixed length run to the longest
of their batch; only the tokens asked for count.

    python -m benchmarks.peer_transformers --workload rollout-0.8m
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.common import WORKLOADS, Workload, measure, model_dir, peer_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    cache: str  # dynamic or static
    num_batches: int


class SampledLogprobs(LogitsProcessor):
    """Keeps the log-prob of each sampled token, one step late, without keeping every step's logits."""

    def __init__(self) -> None:
        self.previous: torch.Tensor | None = None
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.take(input_ids)
        self.previous = scores
        return scores

    def take(self, input_ids: torch.Tensor) -> None:
        if self.previous is not None:
            chosen = self.previous.gather(1, input_ids[:, -1:])
            self.logprobs.append(chosen - self.previous.logsumexp(dim=1, keepdim=True))


def batches(workload: Workload, num_batches: int) -> list[list[int]]:
    """Row numbers by length, cut into batches of equal size."""
    rows = sorted(range(workload.num_completions), key=lambda row: workload.new_tokens[row])
    size = -(-len(rows) // num_batches)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def rollout(model: Any, workload: Workload, *, setting: Setting, logprobs: bool) -> None:
    prompts = workload.completion_prompts()
    for rows in batches(workload, setting.num_batches):
        num_new = max(workload.new_tokens[row] for row in rows)
        ids = torch.tensor([prompts[row] for row in rows], device=model.device)
        config = GenerationConfig(
            max_new_tokens=num_new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None,
            pad_token_id=model.config.pad_token_id, cache_implementation=setting.cache,
        )  # fmt: skip
        recorder = SampledLogprobs()
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder] if logprobs else []),
        )
        assert output.shape[1] == workload.prompt_tokens + num_new, "generation stopped early"
        if logprobs:
            recorder.take(output)
            assert torch.cat(recorder.logprobs, dim=1).cpu().shape == (len(rows), num_new)
        output.cpu()  # waits for the device


def main() -> None:
    args = peer_parser(__doc__, workload="rollout-0.8m").parse_args()
    workload = WORKLOADS[args.workload]
    torch.set_num_threads(workload.threads)
    torch.manual_seed(workload.seed)
    with model_dir(workload, args.model_dir) as path:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, workload.dtype), attn_implementation="sdpa"
        )
    model.generation_config = GenerationConfig()  # the saved one names an eos, and generation is never to stop
    model.to(args.device).eval()

    def timed(setting: Setting, *, logprobs: bool, repeats: int) -> float:
        run = partial(rollout, model, workload, setting=setting, logprobs=logprobs)
        return workload.num_new_tokens / measure(run, warmup=0, repeats=repeats).median_s

    splits = (1,) if len(set(workload.new_tokens)) == 1 else (1, 2, 4)
    settings = [Setting(cache=cache, num_batches=n) for cache, n in itertools.product(("dynamic", "static"), splits)]
    with torch.inference_mode():
        timed(settings[0], logprobs=True, repeats=1)  # the first run of a process is slow
        tried = {setting: timed(setting, logprobs=True, repeats=1) for setting in settings}
        best = max(tried, key=lambda setting: tried[setting])
        with_logprobs = timed(best, logprobs=True, repeats=args.repeats)
        without = timed(best, logprobs=False, repeats=args.repeats)
    result = {
        "peer": "transformers",
        "version": transformers.__version__,
        "workload": workload.name,
        "tokens_per_s": round(with_logprobs, 1),
        "tokens_per_s_without_logprobs": round(without, 1),
        "setting": asdict(best),
        "tried": [{**asdict(setting), "tokens_per_s": round(rate, 1)} for setting, rate in tried.items()],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
