"""The model that an adapter was trained on: its checksum, which is saved with the adapter, and what else must not change.

An adapter on other weights, or on weights that are used in another way, is another model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.config.yaml import read_small
from rollcall.errors import ModelFilesError
from rollcall.model.checksum import checksum
from rollcall.stored.find import PROBE

MOST_BYTES = 1 << 28  # of a probe
# What config.json says of how weights are used. Their shapes are checked as such.
_OF_COMPUTING = (
    "hidden_act", "rms_norm_eps", "rope_parameters", "sliding_window", "layer_types", "num_attention_heads", "num_key_value_heads",
    "tie_word_embeddings",
)  # fmt: skip


def base_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of all weights by the decoder's names, however they are divided."""
    sums = [f"{name} {checksum([tensor.detach().reshape(-1).view(torch.uint8)])}" for name, tensor in tensors]
    return blake2b(" ".join(sorted(sums)).encode(), digest_size=8).hexdigest()


def refuse_other_base(
    folder: Path, model: Any, tensors: Iterable[tuple[str, Tensor]], *, base: str, where: str, advice: str = ""
) -> None:
    """``folder`` holds an adapter, ``model`` and its ``tensors`` are what is in ``base`` now. ``where`` names the adapter in messages;
    ``advice`` says what else can be done than to put the model back."""
    saved, dtype = _noted(folder)
    if not saved:
        return  # another program's adapter, or an older one
    if model.dtype not in (dtype, torch.float32):
        return  # they were rounded in another way
    if saved != base_checksum((name, tensor.to(dtype)) for name, tensor in tensors):
        raise ModelFilesError(
            f"{where} holds an adapter of other weights than those in {base}: they have changed since it was saved; put the model back there "
            f"as it was{advice}"
        )


def refuse_other_config(before: Any, now: Any, *, base: str, where: str, advice: str = "") -> None:
    """The configs of the model that the adapter was trained on and of what is in ``base`` now."""
    pairs = {key: (getattr(before, key, None), getattr(now, key, None)) for key in _OF_COMPUTING}
    if other := [f"{key}: {one} -> {two}" for key, (one, two) in pairs.items() if one != two]:
        raise ModelFilesError(
            f"{where} holds an adapter of a model with another config.json than that in {base} ({'; '.join(other)}): put the model back there "
            f"as it was{advice}"
        )


def _noted(folder: Path) -> tuple[str, torch.dtype]:
    """The checksum that was saved with an adapter, and in which type the weights were; an empty one: none was."""
    try:
        found = json.loads(read_small(folder / PROBE, most=MOST_BYTES))
        base, dtype = found.get("base"), getattr(torch, str(found.get("dtype")), None)
    except (OSError, ValueError, AttributeError, RecursionError):
        return "", torch.float32
    return (base, dtype) if isinstance(base, str) and isinstance(dtype, torch.dtype) else ("", torch.float32)
