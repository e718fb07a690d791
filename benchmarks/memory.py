"""`rollcall plan`'s estimate of memory against what a step of the learner really takes, on one CUDA device.

python -m benchmarks.memory                                  all sizes, with and without activation checkpointing
python -m benchmarks.memory --size 1.5b --tokens 32768       one size, another micro-batch
python -m benchmarks.memory --size 0.5b --engine             with the native engine in the same process
python -m benchmarks.memory --size 7b actor.activation_checkpointing=true     any key of the run file

One line of JSON for each case. `ratio` is the estimate over the measured peak of torch's allocator; without the CUDA context and
what the allocator cannot reuse, which `reserved_gib` shows. Logits are not kept from the forward, which the learner does only where
memory is left over (--keep-logits). The bar is 0.9 to 1.1.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import QWEN, QWEN_1_5B, QWEN_7B, TINY, hardware
from rollcall.base.types import Sample
from rollcall.config import Config, parse_config
from rollcall.config.overrides import apply_override
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.protocol import Request, Sampling
from rollcall.learner import logprobs
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner
from rollcall.model.decoder import fuse_parameters
from rollcall.plan.judge import plan_run
from rollcall.plan.memory import GIB, RoleMemory, SlotMemory
from rollcall.run.build import build_learner

PROMPT, RESPONSE, GROUP = 128, 512, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    shape: dict[str, int]
    vocab: int
    tied: bool
    cases: tuple[tuple[int, bool | str], ...]  # tokens of a micro-batch, and activation_checkpointing
    actor: dict[str, Any]


SIZES = {
    "tiny": Size(shape=TINY, vocab=512, tied=True, cases=((2048, False), (2048, True)), actor={}),
    "0.5b": Size(shape=QWEN, vocab=151936, tied=True, cases=((16384, False), (32768, False), (32768, True)), actor={}),
    "1.5b": Size(
        shape=QWEN_1_5B,
        vocab=151936,
        tied=True,
        cases=((16384, False), (32768, False), (32768, True)),
        actor={},
    ),
    # AdamW's float32 state of 7.6 billion weights and their masters is more than a card of 141 GB.
    "7b": Size(
        shape=QWEN_7B,
        vocab=152064,
        tied=False,
        cases=((4096, False), (16384, True)),
        actor={"master_weights": False},
    ),
}

SETTINGS = (False, True, "offload")  # of activation_checkpointing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=[*SIZES], action="append", help="may be given several times; absent: all three"
    )
    parser.add_argument("--tokens", type=int, help="of a micro-batch, instead of the size's own")
    parser.add_argument("--engine", action="store_true", help="the native engine samples in the same process first")
    parser.add_argument("--keep-logits", action="store_true", help="as a run does where a card has room")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: only that the script runs")
    parser.add_argument("overrides", nargs="*", help="keys of the run file, such as actor.compile=false")
    args = parser.parse_args()
    if not args.keep_logits:
        logprobs._has_room = lambda rows, weight: False
    for name in args.size or ["0.5b", "1.5b", "7b"]:
        cases = SIZES[name].cases if args.tokens is None else [(args.tokens, each) for each in SETTINGS]
        for tokens, recompute in cases:
            with tempfile.TemporaryDirectory() as folder:
                case = Case(name, tokens=tokens, recompute=recompute, folder=Path(folder), args=args)
                print(json.dumps(case.measure()), flush=True)
            torch._dynamo.reset()
            _free()


class Case:
    def __init__(
        self, name: str, *, tokens: int, recompute: bool | str, folder: Path, args: argparse.Namespace
    ) -> None:
        self.name, self.size = name, SIZES[name]
        self.tokens, self.recompute = tokens, recompute
        self.device = torch.device(args.device)
        self.engine = args.engine
        self.model_config = folder / "config.json"
        self.model_config.write_text(json.dumps(self._sizes()))
        self.config = self._config(args.overrides)

    def _sizes(self) -> dict[str, Any]:
        return {
            "model_type": "qwen2", "vocab_size": self.size.vocab, "tie_word_embeddings": self.size.tied,
            "max_position_embeddings": 32768, "rope_theta": 1e6, **self.size.shape,
        }  # fmt: skip

    def _config(self, overrides: list[str]) -> Config:
        rows = {"samples_per_prompt": GROUP, "max_response_tokens": RESPONSE, "max_running": 256}
        fields: dict[str, Any] = {
            "model": {"device": self.device.type, "dtype": "float32" if self.device.type == "cpu" else "bfloat16"},
            "data": {"max_prompt_tokens": PROMPT, "prompts_per_step": 32},
            "rollout": rows | {"kv_tokens": 256 * (PROMPT + RESPONSE)},
            "actor": {
                "tokens_per_microbatch": self.tokens, "activation_checkpointing": self.recompute, **self.size.actor,
            },
        }  # fmt: skip
        for override in overrides:
            apply_override(fields, override, root=Config)
        return parse_config(fields)

    def measure(self) -> dict[str, Any]:
        estimate, entry = self._estimate()
        told = {
            "benchmark": "memory", "size": self.name, "tokens_per_microbatch": self.tokens, "recompute": self.recompute,
            "engine": self.engine, "estimate_gib": _gib(estimate), "estimated_parts": _parts(entry.roles),
        }  # fmt: skip
        try:
            measured = self._run()
        except torch.OutOfMemoryError as error:
            return told | {"failed": str(error).splitlines()[0], "hardware": hardware(self.device.type)}
        peak = measured.get("peak_gib")
        ratio = round(estimate / GIB / peak, 3) if peak else None
        return told | measured | {"ratio": ratio, "hardware": hardware(self.device.type)}

    def _estimate(self) -> tuple[int, SlotMemory]:
        card = torch.cuda.get_device_properties(0).total_memory / GIB if self.device.type == "cuda" else None
        run = plan_run(self.config, card_gib=card, model_config=self.model_config)
        (entry,) = run.memory
        if not self.engine:
            entry = SlotMemory(slots=entry.slots, roles=tuple(r for r in entry.roles if r.role == "actor"), runtime=0)
        return entry.total - entry.runtime, entry

    def _run(self) -> dict[str, float]:
        model = self._model()
        _peak(self.device, reset=True)
        learner: Learner = build_learner(self.config, model, gang=Gang.alone(), adapter=None)
        engine = None
        if self.engine:
            engine = NativeEngine(model, _Words(), max_running=256, kv_tokens=self.config.rollout.kv_tokens)
        samples = self._samples()
        if engine is not None:
            self._sample(engine)
        learner.update(samples)  # compiles, and makes the optimizer's state
        _free()
        held = _allocated(self.device)
        _peak(self.device, reset=True)
        if engine is not None:
            self._sample(engine)
        began = time.perf_counter()
        learner.update(samples)  # its metrics are read, so it has ended
        return {"held_gib": held, "update_s": round(time.perf_counter() - began, 3), **_peak(self.device)}

    def _model(self) -> Any:
        """Random weights, made on the device."""
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = self._sizes()
        config = AutoConfig.for_model(
            fields.pop("model_type"), rope_parameters={"rope_type": "default", "rope_theta": fields.pop("rope_theta")}, **fields
        )  # fmt: skip
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        with torch.device(self.device):
            torch.set_default_dtype(dtype)
            try:
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            finally:
                torch.set_default_dtype(torch.float32)
        model = model.eval().requires_grad_(False)
        fuse_parameters(model)
        return model

    def _samples(self) -> list[Sample]:
        """Three full micro-batches and a part of a fourth: gradients are summed while the next is computed."""
        rng = np.random.default_rng(0)
        groups = -(-7 * self.tokens // 2) // (PROMPT + GROUP * RESPONSE) + 1
        return [self._row(rng, draw, attempt) for draw in range(groups) for attempt in range(GROUP)]

    def _row(self, rng: np.random.Generator, draw: int, attempt: int) -> Sample:
        prompt = np.random.default_rng(draw).integers(0, self.size.vocab, PROMPT).astype(np.int32)
        return Sample(
            draw=draw, attempt=attempt, prompt_ids=prompt,
            response_ids=rng.integers(0, self.size.vocab, RESPONSE).astype(np.int32),
            mask=np.ones(RESPONSE, dtype=np.bool_),
            behaviour_logprobs=np.full(RESPONSE, -10.0, dtype=np.float32), old_logprobs=None, reference_logprobs=None,
            advantages=np.full(RESPONSE, rng.normal(), dtype=np.float32), returns=None, values=None,
        )  # fmt: skip

    def _sample(self, engine: NativeEngine) -> None:
        rng = np.random.default_rng(1)
        for index in range(32):
            ids = rng.integers(0, self.size.vocab, PROMPT).astype(np.int32)
            sampling = Sampling(
                temperature=1.0, top_p=1.0, top_k=0, max_tokens=RESPONSE, stop_token_ids=(), stop_strings=()
            )
            for seed in range(GROUP):
                engine.submit(Request(id=f"{index}/{seed}", prompt_ids=ids, seed=seed, sampling=sampling))
        while engine.num_unfinished:
            engine.step()


class _Words:
    """A tokenizer whose text nobody reads."""

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def _parts(roles: tuple[RoleMemory, ...]) -> dict[str, float]:
    names = ("weights", "optimizer", "gradients", "activations", "kv")
    return {name: _gib(sum(getattr(role, name) for role in roles)) for name in names}


def _gib(count: int) -> float:
    return round(count / GIB, 2)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _allocated(device: torch.device) -> float:
    return _gib(torch.cuda.memory_allocated()) if device.type == "cuda" else 0.0


def _peak(device: torch.device, *, reset: bool = False) -> dict[str, float]:
    if device.type == "cpu":
        return {}
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return {
        "peak_gib": _gib(torch.cuda.max_memory_allocated()),
        "reserved_gib": _gib(torch.cuda.max_memory_reserved()),
    }


if __name__ == "__main__":
    main()
