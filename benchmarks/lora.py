"""What an adapter costs: milliseconds of a sync into the native engine, its bytes against the model's, and decoding with it.

python -m benchmarks.lora --device cuda --shape 7b          the bar is a sync of 50 ms on one card
python -m benchmarks.lora --shape 135m --rank 8 --turns 5   on a CPU

A sync is ``update_weights`` of an engine whose learner shares the process: the new values are copied into the buffers that captured
graphs read, and the device has finished. Decoding is the same requests without and with the adapter.

SmolLM2-135M learning sums with rank 8, against full training, in as many steps:
    rollcall train examples/smollm2_sums.yaml
    rollcall train examples/smollm2_sums.yaml run.dir=runs/smollm2-sums-lora model.lora.rank=8 model.lora.alpha=16 actor.lr=3e-4
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import QWEN, QWEN_1_5B, QWEN_7B, SMOLLM2, TINY, print_result
from rollcall.config.lora import LoraSection
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.protocol import Request, Sampling
from rollcall.model.adapter import Adapter
from rollcall.model.decoder import Decoder, fuse_parameters

SHAPES: dict[str, dict[str, Any]] = {"0.8m": TINY, "135m": SMOLLM2, "0.5b": QWEN, "1.5b": QWEN_1_5B, "7b": QWEN_7B}
BAR_MS = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20, help="syncs, of which the median counts")
    parser.add_argument("--rows", type=int, default=64, help="completions that are decoded at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    args = parser.parse_args()
    model = make_model(args.shape, device=torch.device(args.device))
    decoder = Decoder.of(model)
    lora = LoraSection(rank=args.rank, alpha=2 * args.rank)
    adapter = Adapter.make(decoder, lora, seed=0, device=decoder.device, base="none")
    plain = decode_s(engine_of(model, None, args), args)
    engine = engine_of(model, adapter, args)
    adapted = decode_s(engine, args)
    syncs = [sync_ms(engine, adapter, version=turn + 1) for turn in range(args.turns)]
    num_bytes = sum(tensor.nbytes for tensor in decoder.named_tensors().values())
    tokens = args.rows * args.tokens
    print_result(
        "lora",
        workload=f"{args.shape}, rank {args.rank}, all linear modules",
        device=args.device,
        ours={
            "sync_ms": round(statistics.median(syncs), 3),
            "slowest_sync_ms": round(max(syncs), 3),
            "bar_ms": BAR_MS,
            "adapter_mib": round(sum(each.nbytes for each in adapter.named_tensors().values()) / 2**20, 2),
            "model_mib": round(num_bytes / 2**20, 2),
            "tokens_per_s_without": round(tokens / plain),
            "tokens_per_s_with": round(tokens / adapted),
        },
        peer=None,
        ratio=None,
    )


def make_model(shape: str, *, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config: Any = Qwen2Config(**SHAPES[shape], vocab_size=49152, tie_word_embeddings=True)
    with device:
        model: Any = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval().requires_grad_(False)
    fuse_parameters(model)
    return model


class NoText:
    """A tokenizer whose text nobody reads."""

    def decode(self, token_ids: Any, **how: Any) -> str:
        return ""


def engine_of(model: Any, adapter: Adapter | None, args: argparse.Namespace) -> NativeEngine:
    room = args.rows * (args.tokens + 64)
    adapters = None if adapter is None else {"policy": adapter}
    return NativeEngine(model, NoText(), max_running=args.rows, kv_tokens=room, adapters=adapters)


def decode_s(engine: NativeEngine, args: argparse.Namespace) -> float:
    """The second time: kernels are compiled and graphs captured in the first."""
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=args.tokens, stop_token_ids=(), stop_strings=())
    took = 0.0
    for turn in range(2):
        started = time.perf_counter()
        for row in range(args.rows):
            ids = np.arange(4 + row, 36 + row, dtype=np.int32)
            engine.submit(Request(id=f"{turn}-{row}", prompt_ids=ids, seed=row, sampling=sampling))
        while engine.num_unfinished:
            engine.step()
        took = time.perf_counter() - started
    return took


def sync_ms(engine: NativeEngine, adapter: Adapter, *, version: int) -> float:
    for tensor in adapter.named_tensors().values():
        tensor.add_(1e-3)
    wait()
    started = time.perf_counter()
    engine.update_weights(version)
    wait()
    return 1000 * (time.perf_counter() - started)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
