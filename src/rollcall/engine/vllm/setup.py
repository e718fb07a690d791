"""Checks before vLLM starts: where it is installed, whether it can run this model, and how much memory its KV cache gets."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollcall.config import VllmSection
from rollcall.config.lora import MOST_RANK_OF_VLLM
from rollcall.model.adapter import Adapter
from rollcall.model.stored.find import adapter_folder, is_model_dir

PYTHON_VARIABLE = "ROLLCALL_VLLM_PYTHON"
INSTALL = (
    "create an environment for it with `python3 -m venv .vllm && .vllm/bin/pip install vllm` (on a machine without a GPU: "
    "scripts/setup_peers.sh .peers vllm), and set rollout.vllm.python to its Python"
)
PROBE_S = 60.0
PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
CPU_KV_BYTES = 1 << 30  # the upper limit, unless rollout.kv_tokens asks for more
KV_BLOCK = {"cpu": 32, "cuda": 16}  # tokens; vLLM's CPU kernels need multiples of 32
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MOST_RANK_OF_VLLM)  # in vLLM 0.32
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # in vLLM 0.32


class VllmUnavailable(ValueError):
    """vLLM is not installed where the run file says, or cannot run this model. The message says what to do."""


def find_python(given: str | None) -> str:
    """Return vLLM's Python: the one in the run file, the one in $ROLLCALL_VLLM_PYTHON, or this process's own if it can import vLLM."""
    named = given or os.environ.get(PYTHON_VARIABLE)
    source = f"rollout.vllm.python={given}" if given else f"${PYTHON_VARIABLE}={named}"
    if named is None:
        if importlib.util.find_spec("vllm") is None:
            raise VllmUnavailable(f"rollout.engine=vllm, but vLLM is not installed; {INSTALL}")
        return sys.executable
    path = shutil.which(str(Path(named).expanduser()))
    if path is None:
        raise VllmUnavailable(f"{source} is not a program that this machine can run; {INSTALL}")
    # Only check that it is installed: importing it takes half a minute.
    probe = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S)
    if probe.returncode:
        why = probe.stderr.strip().splitlines()[-1:] or ["vllm is not among its packages"]
        raise VllmUnavailable(f"{source} cannot import vLLM ({why[0]}); {INSTALL}")
    return os.path.abspath(path)  # do not resolve it: a virtual environment's Python is a link to its base Python


def make_spec(
    model: nn.Module,
    section: VllmSection,
    *,
    max_running: int,
    kv_tokens: int | None,
    kv_fraction: float,
    device: torch.device | None = None,
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """Derive the child's engine settings from the model. ``device`` is needed for a model on the meta device."""
    config: Any = model.config
    if adapter is not None:
        base = Path(adapter.base)
        if base.is_absolute() and (not is_model_dir(base) or adapter_folder(base) is not None):
            raise VllmUnavailable(
                f"model.path={base} is a checkpoint, but with model.lora, vLLM reads the model itself and needs a model directory; "
                "create one with `rollcall merge`, or use rollout.engine=native"
            )
    first = next(model.parameters())
    device, dtype = device or first.device, first.dtype
    _refuse(config, section, device=device)
    block = KV_BLOCK[device.type]
    # KV heads on each GPU; if there are more GPUs than KV heads, each GPU has one head.
    heads = max(1, config.num_key_value_heads // section.tensor_parallel_size)
    token_bytes: int = 2 * config.num_hidden_layers * heads * _head_dim(config) * dtype.itemsize
    if kv_tokens is None:
        whole = max_running * config.max_position_embeddings
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            kv_tokens = min(int(total * kv_fraction) // token_bytes, whole)
        else:
            kv_tokens = min(max(CPU_KV_BYTES // token_bytes, config.max_position_embeddings), whole)
    # vLLM reserves one block for itself. A window that begins in the middle of a block needs another one.
    blocks = -(-kv_tokens // block) + 1 + bool(getattr(config, "sliding_window", None))
    fields = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    fields.pop("auto_map", None)  # without references to the model's own code
    return {
        "config": fields,
        # With an adapter: the path of the model, and the LoRA rank that vLLM reserves memory for.
        "model": None if adapter is None else adapter.base,
        "lora_rank": 0 if adapter is None else next(rank for rank in LORA_RANKS if rank >= adapter.section.rank),
        "dtype": str(dtype).removeprefix("torch."),
        "max_running": max_running,
        "max_positions": min(config.max_position_embeddings, kv_tokens),
        "kv_tokens": kv_tokens,
        "kv_block": block,
        "kv_blocks": blocks,
        "kv_bytes": blocks * block * token_bytes,
        "tensor_parallel_size": section.tensor_parallel_size,
        "enforce_eager": section.enforce_eager or device.type == "cpu",  # on a CPU, compiling costs more than it saves
        "sleep": section.sleep and device.type == "cuda",
    }


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _refuse(config: Any, section: VllmSection, *, device: torch.device) -> None:
    size, head_dim = section.tensor_parallel_size, _head_dim(config)
    if device.type == "cpu" and head_dim not in CPU_HEAD_DIMS:
        raise VllmUnavailable(
            f"this model has a head dimension of {head_dim}; on a CPU, vLLM has kernels only for {', '.join(map(str, CPU_HEAD_DIMS))}; "
            "use rollout.engine=native"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise VllmUnavailable(
            f"rollout.vllm.tensor_parallel_size={size} does not divide {heads} attention heads and {kv_heads} KV heads; use a "
            "divisor of both"
        )
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise VllmUnavailable(
            f"rollout.vllm.tensor_parallel_size={size} needs {size} GPUs, but this process sees {torch.cuda.device_count()}; "
            "give each rollout process more slots in cluster.component_placement (`0-7:0-3` gives each of 4 processes two)"
        )
