"""An adapter's base model: the fingerprint of its weights, saved with the adapter, and the settings that must not change.

The same adapter on different weights, or on weights that are used differently, is a different model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollcall.base.errors import ModelFilesError
from rollcall.config.yaml import read_small
from rollcall.model.files import read_model_config
from rollcall.model.stored.find import PROBE, adapter_folder
from rollcall.model.stored.tensors import name_of

PIECE = 1 << 19  # elements processed at once, to limit memory use
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that folding loses no information
_MASK = (1 << 64) - 1
# The dtypes in which a model can be loaded. float32 weights may be rounded to the other two on loading.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Keys in config.json that determine how weights are used. Shapes are checked with the weights.
_OF_COMPUTING = (
    "hidden_act", "rms_norm_eps", "rope_parameters", "sliding_window", "layer_types", "num_attention_heads", "num_key_value_heads",
    "tie_word_embeddings",
)  # fmt: skip


def base_identities(tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype) -> dict[str, str]:
    """Return fingerprints of all weights under their decoder names, however they are sharded. There is one for each dtype in which the
    weights can be compared: their own ``dtype`` and, for float32, the dtypes to which they may be rounded."""
    return _identities(tensors, _DTYPES.values() if dtype == torch.float32 else [dtype])


def _identities(tensors: Iterable[tuple[str, Tensor]], dtypes: Iterable[torch.dtype]) -> dict[str, str]:
    found: dict[torch.dtype, list[str]] = {dtype: [] for dtype in dtypes}
    for name, tensor in tensors:  # iterate only once, because ranks may have to gather each tensor
        for dtype, sums in found.items():
            sums.append(f"{name} {_identity(tensor.detach(), dtype)}")
    return {
        name_of(dtype): blake2b(" ".join(sorted(sums)).encode(), digest_size=8).hexdigest()
        for dtype, sums in found.items()
    }


def _identity(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return a number that identifies the tensor's values and is the same on every device. Unlike ``checksum``, which sums words, it
    changes when words are reordered."""
    total, factors = 0, _factors().to(tensor.device)
    for piece in _pieces(tensor):
        size = piece.numel() * dtype.itemsize
        words = torch.zeros(-(-size // 4), dtype=torch.int32, device=piece.device)
        words.view(dtype)[: piece.numel()] = piece.reshape(-1)
        # 32-bit words: with 64-bit words, two sign flips would go unnoticed, since 2**63 times any odd number is 2**63. Sums wrap.
        total = (total * _FACTOR + int((words.to(torch.int64) * factors[: len(words)]).sum()) + size) & _MASK
    return total


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield runs of rows. A row longer than a piece is split too."""
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    width = math.prod(rows.shape[1:])
    if width > PIECE:
        for row in rows:
            yield from _pieces(row)
    else:
        yield from rows.split(max(1, PIECE // max(width, 1)))


@cache
def _factors() -> Tensor:
    """Return an odd number for each position in a piece (SplitMix64, doi:10.1145/2714064.2660195)."""
    z = np.arange(1, PIECE + 1, dtype=np.uint64) * np.uint64(_FACTOR)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def refuse_other_model(
    folder: Path, model: Any, tensors: Iterable[tuple[str, Tensor]], *, base: str, where: str, advice: str = ""
) -> None:
    """Refuse a model whose config or weights differ from the one that the adapter in ``folder`` was trained on. ``model`` and
    ``tensors`` are the current contents of ``base``. ``where`` names the adapter in messages. ``advice`` suggests an alternative to
    restoring the model."""
    path = folder / "config.json"
    if path.is_file():  # peft does not write one
        read_model_config(path)
        try:
            before = used_of(type(model.config).from_json_file(path))
        except Exception as error:  # transformers raises many kinds
            raise ModelFilesError(
                f"{path} is not a model's config.json ({type(error).__name__}: {error}); restore the file"
            ) from None
        now = used_of(model.config)
        if other := [f"{key}: {one} -> {now[key]}" for key, one in before.items() if one != now[key]]:
            raise ModelFilesError(
                f"{where} is an adapter for a model whose config.json differs from the one in {base} ({'; '.join(other)}); restore the "
                f"original model at that path{advice}"
            )
    saved, own = {} if is_adapter(base) else _noted(folder, where=where), name_of(model.dtype)
    if own in saved:
        kind = own
    elif saved and model.dtype == torch.float32:
        kind = next(iter(saved))
    else:
        return  # saved by another program, or the weights were rounded to two dtypes that cannot be compared
    if saved[kind] != _identities(tensors, [_DTYPES[kind]])[kind]:
        raise ModelFilesError(
            f"{where} is an adapter that was not trained on the weights in {base}: they have changed since it was saved, or it belongs to a "
            f"different model; restore the original model at that path{advice}"
        )


def used_of(config: Any) -> dict[str, Any]:
    return {key: getattr(config, key, None) for key in _OF_COMPUTING}


def _noted(folder: Path, *, where: str) -> Mapping[str, str]:
    """Return the fingerprints saved with an adapter, or an empty mapping if it has no probe file."""
    path = folder / PROBE
    if not path.exists():
        return {}
    try:
        found = json.loads(read_small(path))
        base = found.get("base") or {}
        if not {found["dtype"], *base} <= _DTYPES.keys() or not all(isinstance(one, str) for one in base.values()):
            raise ValueError("its dtype or its fingerprints are not valid")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(
            f"{where}: {PROBE} is damaged ({type(error).__name__}: {error}), so Rollcall cannot tell which weights the adapter was trained on; "
            "restore the file, or delete it to use the adapter without this check"
        ) from None
    return base


def is_adapter(base: str) -> bool:
    """Return whether an adapter's base is itself an adapter in a local folder. The merged weights then differ in their last bits between
    devices, so they have no fingerprint. The model at the end of the chain has one, which is compared when that model is loaded."""
    path = Path(base).expanduser()
    return path.is_dir() and adapter_folder(path) is not None
