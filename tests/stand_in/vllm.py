"""A stand-in for the package vLLM: the calls that engine/vllm/server.py makes, answered by transformers.

With this folder on PYTHONPATH, the server and the engine run through their contract where vLLM is not installed. Rows are
scheduled as vLLM does it: the oldest first, and one that no longer finds blocks is preempted. Instead of keys and values it
remembers logits by their prefix: whoever changes the weights must reset them.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

__version__ = "stand-in"
EngineArgs = SimpleNamespace


class SamplingParams(SimpleNamespace):
    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> tuple[int, float]:
        """A token and its log-prob after temperature, top-k and top-p."""
        logits = logits / (self.temperature or 1.0)
        if self.top_k:
            logits[logits < logits.topk(self.top_k).values[-1]] = -torch.inf
        if self.top_p < 1:
            probs, order = logits.softmax(-1).sort(descending=True)
            logits[order[probs.cumsum(-1) - probs >= self.top_p]] = -torch.inf
        logprobs = logits.log_softmax(-1)
        token = logprobs.exp().multinomial(1, generator=generator) if self.temperature else logprobs.argmax()
        return int(token), float(logprobs[token])


class Worker:
    """The one process of an engine that holds the model."""

    device = torch.device("cpu")

    def __init__(self, args: Any) -> None:
        config = AutoConfig.from_pretrained(args.model)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
        self.model.__class__ = type("Model", (type(self.model),), {"load_weights": load_weights})
        self.model_runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, *, weights_iterator: Any) -> None:
        self.model.load_weights(weights_iterator)


def load_weights(model: Any, weights: Any) -> set[str]:
    parameters, loaded = dict(model.named_parameters()), set()
    for name, tensor in weights:
        parameters[name].copy_(tensor)
        loaded.add(name)
    return loaded


class LLMEngine:
    def __init__(self, args: Any) -> None:
        self.args, self.worker = args, Worker(args)
        self.rows: dict[str, Any] = {}  # by age
        self.prefixes: dict[tuple[int, ...], torch.Tensor] = {}
        self.output_processor = SimpleNamespace(request_states=self.rows)
        core = SimpleNamespace(scheduler=SimpleNamespace(requests=self.rows))
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=lambda: None)

    @classmethod
    def from_engine_args(cls, args: Any, usage_context: Any) -> LLMEngine:
        return cls(args)

    def collective_rpc(self, call: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [call(self.worker, *args)]

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.prefixes.clear()
        return True

    def add_request(
        self, name: str, prompt: dict[str, list[int]], params: SamplingParams, *, lora_request: Any
    ) -> None:
        self.rows[name] = SimpleNamespace(
            name=name, ids=list(prompt["prompt_token_ids"]), params=params, generator=torch.Generator().manual_seed(params.seed),
            num_sampled=0, is_running=False, num_preemptions=0,
        )  # fmt: skip

    def abort_request(self, names: list[str], internal: bool = False) -> None:
        for name in names:
            self.rows.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.rows)

    @torch.no_grad()
    def step(self) -> list[Any]:
        rows = self._schedule()
        if new := list({tuple(row.ids) for row in rows} - self.prefixes.keys()):
            # Padded behind: a causal model does not look there.
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prefix) for prefix in new], batch_first=True)
            logits = self.worker.model(ids, use_cache=False).logits.float()
            self.prefixes |= {prefix: logits[index, len(prefix) - 1] for index, prefix in enumerate(new)}
        return [self._extend(row, self.prefixes[tuple(row.ids)]) for row in rows]

    def _schedule(self) -> list[Any]:
        room, chosen = self.args.num_gpu_blocks_override - 1, []  # vLLM keeps one for itself
        for row in self.rows.values():
            room -= -(-len(row.ids) // self.args.block_size)
            if room < 0 or len(chosen) == self.args.max_num_seqs:
                break
            chosen.append(row)
        for row in list(self.rows.values())[len(chosen) :]:
            row.num_preemptions += row.is_running
            row.is_running = False
        for row in chosen:
            row.is_running = True
        return chosen

    def _extend(self, row: Any, logits: torch.Tensor) -> Any:
        token, logprob = row.params.draw(logits, row.generator)
        row.ids.append(token)
        row.num_sampled += 1
        finish = "length" if row.num_sampled == row.params.max_tokens else None
        finish = "stop" if token in row.params.stop_token_ids else finish
        if finish is not None:
            del self.rows[row.name]
        entry = {token: SimpleNamespace(logprob=logprob)}
        delta = SimpleNamespace(token_ids=[token], logprobs=[entry], finish_reason=finish)
        return SimpleNamespace(request_id=row.name, outputs=[delta])


MODULES: dict[str, dict[str, Any]] = {
    "distributed": {"cleanup_dist_env_and_memory": lambda: None},
    "model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": lambda layer, remove_weight: None},
    "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA=None)},
    "usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS=None)},
}
for module, names in MODULES.items():
    sys.modules[f"vllm.{module}"] = made = ModuleType(module)
    vars(made).update(names)
gc.freeze()  # the server collects whenever it drops an engine
