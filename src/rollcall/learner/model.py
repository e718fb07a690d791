"""Loading models and tokenizers, and the learner's forward over packed rows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.attention import layout_of, packed_attention
from rollcall.decoder import Decoder, fuse_parameters
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
    if name == "bfloat16" and device.type == "cpu" and not has_bfloat16():
        raise ModelError(
            "model.dtype=bfloat16 needs a CUDA device or a CPU that computes in it (AVX-512, ARM with bf16), which this one "
            "does not: use model.dtype=float32 or auto"
        )
    return getattr(torch, name)


def has_bfloat16() -> bool:
    """Whether torch has matrix products in bfloat16 for this CPU; without AMX or the like they may not be faster."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def load_causal_lm(path: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    """AutoModelForCausalLM with its parameters fused; a holder of weights, whose own forward is not used."""
    from transformers import AutoModelForCausalLM

    check_model_path(path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except Exception as error:
        raise ModelError(f"model.path={path} cannot be loaded: {_first_line(error)}") from error
    model = model.to(device).eval().requires_grad_(False)
    fuse_parameters(model)
    return model


def outline_causal_lm(path: str, *, dtype: torch.dtype) -> Any:
    """What ``load_causal_lm`` gives, without the weights: they are on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    check_model_path(path)
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise ModelError(f"model.path={path} cannot be loaded: {_first_line(error)}") from error
    with suppress(OSError):  # most small models have none
        model.generation_config = GenerationConfig.from_pretrained(path)
    model = model.eval().requires_grad_(False)
    fuse_parameters(model)
    return model


def empty_copy(model: Any) -> Any:
    """The same module in host memory, its weights not filled in; ``model`` may be on the meta device."""
    with torch.device("meta"):
        copy = type(model)(model.config).to(model.dtype)
    copy = copy.to_empty(device="cpu").eval().requires_grad_(False)
    copy.tie_weights()
    copy.generation_config = model.generation_config
    fuse_parameters(copy)
    return copy


def load_tokenizer(path: str, *, chat_template: str | None) -> Any:
    """The tokenizer, with an eos token (needed to stop) and a pad token (taken from eos when absent)."""
    from transformers import AutoTokenizer

    check_model_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ModelError(
            f"model.path={path} has no tokenizer that transformers can load: {_first_line(error)}"
        ) from error
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
    # A tokenizer class may bring an eos of its own that the model has no output for.
    known = tuple(sorted(stop for stop in ids if stop < model_config.vocab_size))
    if not known:
        raise ModelError(
            f"the eos ids {sorted(ids)} are outside the model's {model_config.vocab_size} tokens, so no completion could "
            "ever stop; set eos_token in the tokenizer_config.json to a token that the model knows"
        )
    return known


def check_model_path(path: str) -> None:
    """Refuse a local directory that is not a model, before transformers takes it for a hub name."""
    local = Path(path)
    looks_local = local.exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if looks_local and not local.is_dir():
        raise ModelError(f"model.path={path} is not a directory; give a transformers model directory or a hub name")
    if looks_local and not (local / "config.json").exists():
        raise ModelError(f"model.path={path} has no config.json, so it is not a transformers model directory")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def packed_hidden(decoder: Decoder, batch: MicroBatch, *, recompute: bool = False) -> Tensor:
    """Hidden states [N, C] of a micro-batch after the final norm."""
    device = decoder.device
    layout = layout_of(batch, device=device, dtype=decoder.dtype)
    decoder.grow_rope(int(batch.positions.max()) + 1)
    scale = decoder.head_dim**-0.5

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, layout, scale=scale, window=decoder.layers[index].window)

    token_ids = torch.from_numpy(batch.token_ids).to(device)
    positions = torch.from_numpy(batch.positions).to(device)
    return decoder.forward(token_ids, positions, attend, recompute=recompute)
