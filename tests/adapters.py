"""LoRA adapters of tiny models."""

from __future__ import annotations

from typing import Any

import torch

from rollcall.config.lora import LoraSection
from rollcall.model.adapter import Adapter, add_to_weights
from rollcall.model.decoder import Decoder
from rollcall.model.load import load_causal_lm

CPU = torch.device("cpu")


ALL = LoraSection(rank=3, alpha=6)


def make_adapter(model: Any, lora: LoraSection = ALL, *, seed: int = 0, full: bool = True) -> Adapter:
    """``full``: its B is not zero, so that mistakes show."""
    adapter = Adapter.make(Decoder.of(model), lora, seed=seed, device=model.device, base="base")
    if full:
        draws = torch.Generator().manual_seed(seed + 1)
        for name, tensor in adapter.named_tensors().items():
            if name.endswith("_B"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draws))
    return adapter


def merged_of(path: str, adapter: Adapter) -> Any:
    model = load_causal_lm(path, device=CPU, dtype=torch.float32)
    add_to_weights(model, adapter.named_tensors(), gain=adapter.section.gain)
    return model
