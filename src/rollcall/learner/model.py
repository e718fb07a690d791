"""Loading models for training: transformers modules with packed attention, laid out for the native engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcall.learner import attention
from rollcall.types import MicroBatch


class ModelError(ValueError):
    """The model path cannot be used; the message says why."""


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device=cuda, but torch sees no CUDA device; use model.device=cpu or auto")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def load_causal_lm(path: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    """AutoModelForCausalLM with packed attention, in eval mode (no dropout anywhere in training)."""
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, path, device=device, dtype=dtype)


def load_tokenizer(path: str, *, chat_template: str | None) -> Any:
    """The tokenizer, with an eos token (needed to stop) and a pad token (taken from eos when absent)."""
    from transformers import AutoTokenizer

    check_model_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ModelError(f"model.path={path} has no tokenizer that transformers can load: {_first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path} has no eos token, so no completion could ever stop; set eos_token in its "
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def stop_token_ids(tokenizer: Any, model_config: Any, generation_config: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's eos and those of the model's generation config."""
    ids: set[int] = {tokenizer.eos_token_id}
    for source in (model_config, generation_config):
        eos = getattr(source, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    return tuple(sorted(ids))


def check_model_path(path: str) -> None:
    """Refuse a local directory that is not a model, before transformers takes it for a hub name."""
    local = Path(path)
    looks_local = local.exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if looks_local and not local.is_dir():
        raise ModelError(f"model.path={path} is not a directory; give a transformers model directory or a hub name")
    if looks_local and not (local / "config.json").exists():
        raise ModelError(f"model.path={path} has no config.json, so it is not a transformers model directory")


def _load(auto_class: Any, path: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    check_model_path(path)
    try:
        model = auto_class.from_pretrained(path, dtype=dtype, attn_implementation=attention.NAME)
    except Exception as error:
        raise ModelError(f"model.path={path} cannot be loaded: {_first_line(error)}") from error
    model.config.use_cache = False
    return model.to(device).eval()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer; they share one graph, with the number of packed tokens left open."""
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=True)


def packed_hidden(model: Any, batch: MicroBatch) -> Tensor:
    """Hidden states [N, C] of a micro-batch after the final norm."""
    device = model.device
    outputs = model.model(
        input_ids=torch.from_numpy(batch.token_ids).to(device)[None],
        position_ids=torch.from_numpy(batch.positions).to(device)[None],
        use_cache=False,
        packed=attention.layout_of(batch, device=device, dtype=model.dtype),
    )
    return outputs.last_hidden_state[0]
