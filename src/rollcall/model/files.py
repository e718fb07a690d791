"""Checks a model directory's config.json before a model is built from it. If a size is impossible, the error names its key.

transformers accepts any value: it builds a million layers one by one, fails with a traceback on a negative size, and uses up
the machine's memory for a size far larger than the weights on disk. Do not import torch here: `rollcall plan` uses this module.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rollcall.base.errors import ModelFilesError
from rollcall.config.yaml import read_small
from rollcall.model.stored.find import ADAPTER_CONFIG, checkpoint_of, config_folder, is_model_dir, verl_folder

MODEL_DIR = Path(__file__).parent / "embedded" / "arithmetic"  # the embedded model (``tokenizers.py``)
MAX_CONFIG_BYTES = 1 << 24
MAX_DEPTH = 50
# The largest accepted values; known models are at least a factor of eight below them.
LARGEST = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
# The smallest and largest accepted values of config numbers that are used in computations, at any nesting level of the config.
RANGES = {
    "rms_norm_eps": (0, 1),
    "layer_norm_eps": (0, 1),
    "rope_theta": (1, 1e15),
    "rope_local_base_freq": (1, 1e15),
    "factor": (1, 1e6),  # scaling factor for positions
}


def resolve_model(path: str) -> str:
    """Resolve ``builtin:NAME`` to its directory and a Rollcall or verl run directory to its newest checkpoint; keep other paths."""
    if not path.startswith("builtin:"):
        local = Path(path).expanduser()
        if not local.is_dir() or is_model_dir(local):
            return path
        # Resolve the path here, so that all processes load the same checkpoint even if that run is still going.
        found = checkpoint_of(local) or verl_folder(local)
        return path if found is None else str(found)
    if path != "builtin:arithmetic":
        raise ValueError(f"model.path={path} is not a built-in model; the only one is builtin:arithmetic")
    return str(MODEL_DIR)


def model_folder(path: str) -> Path | None:
    """Return the folder with config.json and tokenizer for a local ``model.path``: a model directory, or a Rollcall, verl or
    PyTorch checkpoint. Return None if the path is not local or has no such folder."""
    local = Path(path).expanduser()
    return config_folder(local) if local.is_dir() else None


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json. Refuse sizes that no model can have."""
    try:
        fields = json.loads(read_small(path, most=MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ModelFilesError(f"{path} is not a model's config.json: it contains a {type(fields).__name__}, not a map")
    _check_numbers(fields, path, depth=0)
    for key, most in LARGEST.items():
        value = fields.get(key)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise ModelFilesError(
                f"{path}: {key}={value!r:.60} is not valid: it must be a whole number from 1 to {most}; restore the file"
            )
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ModelFilesError(
            f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; restore the file"
        )
    ends, vocab = fields.get("eos_token_id"), fields.get("vocab_size")
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and vocab and not (_is_number(end) and 0 <= end < vocab):
            raise ModelFilesError(
                f"{path}: eos_token_id={end!r:.60} is not one of the model's {vocab} tokens (vocab_size); restore the file"
            )
    return fields


def check_model_dir(folder: Path) -> None:
    """Refuse a directory whose config.json describes a larger model than its weight files can contain."""
    fields = read_model_config(folder / "config.json")
    if (folder / ADAPTER_CONFIG).exists():
        return  # the weights are in a different folder
    hidden, vocab, layers, inner = (
        fields.get(key) or 0 for key in ("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size")
    )
    smallest = hidden * vocab + 2 * layers * hidden * inner  # the embedding and two MLP matrices per layer
    files = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    if strange := next((file for file in files if file.exists() and not file.is_file()), None):
        raise ModelFilesError(f"{strange} is not a regular file; replace it with the file itself")
    size = sum(file.stat().st_size for file in files if file.is_file())
    if size and smallest / 4 > size:  # even quantised weights take at least half a byte each
        raise ModelFilesError(
            f"{folder / 'config.json'} describes a model with more than {smallest:,} weights, but its weight files have only "
            f"{size:,} bytes: one of them is damaged or belongs to another model; restore it"
        )


def _check_numbers(value: Any, path: Path, *, depth: int, where: str = "") -> None:
    if depth > MAX_DEPTH:
        raise ModelFilesError(f"{path}: {where} has lists and maps nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ModelFilesError(f"{path}: {where}={value} is not a finite number; restore the file")
    if isinstance(value, dict):
        for key, each in value.items():
            at = f"{where}.{key[:60]}" if where else key[:60]
            _check_numbers(each, path, depth=depth + 1, where=at)
            least, most = RANGES.get(key, (0, 0))
            if most and each is not None and not (_is_number(each) and least <= each <= most):
                raise ModelFilesError(
                    f"{path}: {at}={each!r:.60} is not valid: it must be a number from {least:g} to {most:g}; restore the file"
                )
    elif isinstance(value, list):
        for each in value:
            _check_numbers(each, path, depth=depth + 1, where=where)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
