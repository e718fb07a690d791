"""Tiny models and tokenizers for tests: every architecture that the native engine runs, small enough for a CPU."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollcall.model.load import has_bfloat16
from rollcall.model.tokenizers import char_tokenizer

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="compiling for a CPU needs a C++ compiler (g++, or CXX)"
)
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="this CPU does not compute in bfloat16")
SHAPE: dict[str, Any] = dict(
    vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, bos_token_id=None, eos_token_id=0, pad_token_id=1,
)  # fmt: skip

ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=True)),
    "qwen2-untied": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=False)),
    "qwen2-sliding": (Qwen2Config, Qwen2ForCausalLM, dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, dict(tie_word_embeddings=True, head_dim=16)),
    "qwen3-untied": (Qwen3Config, Qwen3ForCausalLM, dict(tie_word_embeddings=False, head_dim=16)),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, dict(attention_bias=True, mlp_bias=True)),
    "llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(
            rope_parameters=dict(
                rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "mistral-sliding": (MistralConfig, MistralForCausalLM, dict(sliding_window=6)),
    "mistral-full": (MistralConfig, MistralForCausalLM, dict(sliding_window=None, tie_word_embeddings=True)),
}  # fmt: skip


def make_model(name: str = "qwen2-tied", *, seed: int = 0, scale: float = 3.0, **shape: Any) -> Any:
    """A random model whose distributions are far from uniform, so that mistakes show in log-probs."""
    key = repr((name, seed, scale, sorted(shape.items())))
    if key not in _made:
        _made[key] = _make_model(name, seed=seed, scale=scale, shape=shape), torch.get_rng_state()
    model, state = _made[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


_made: dict[str, tuple[Any, torch.Tensor]] = {}  # each model once, and the state of torch's random numbers after that


def _make_model(name: str, *, seed: int, scale: float, shape: dict[str, Any]) -> Any:
    config_class, model_class, extra = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **extra, **shape})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
            elif "norm" not in parameter_name:
                parameter.normal_(0, 0.2)
    return model


def make_tokenizer() -> Any:
    """Character-level, 40 tokens: eos, pad, unk, bos, then digits, letters and signs."""
    return char_tokenizer("0123456789+-*/=() abcdefghijklmnopqr")


def save_model(directory: Path, name: str = "qwen2-tied", *, seed: int = 0, **shape: Any) -> Path:
    """A model directory as transformers writes it, with a tokenizer that fits."""
    directory.mkdir(parents=True, exist_ok=True)
    key = repr((name, seed, sorted(shape.items())))
    if key not in _saved:
        tokenizer = make_tokenizer()
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, seed=seed, scale=1.0, **{"vocab_size": len(tokenizer), **shape}).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            _saved[key] = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    for file, data in _saved[key].items():
        (directory / file).write_bytes(data)
    return directory


_saved: dict[str, dict[str, bytes]] = {}  # the files of each once


def random_prompts(
    count: int, *, lengths: tuple[int, int] = (3, 12), vocabulary: int = 40, seed: int = 0
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(4, vocabulary, size=rng.integers(*lengths, endpoint=True)).astype(np.int32) for _ in range(count)
    ]


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: np.ndarray, response: np.ndarray, *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the response by transformers' own forward, without a cache."""
    ids = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))[None].to(model.device)
    logits = model(ids, use_cache=False).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


@contextmanager
def compiles() -> Iterator[None]:
    """What is inside must have compiled something."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def a_tokenizer(*, chat_template: str | None = None) -> Any:
    """Bytes as tokens, with a <bos> that it puts before every text it encodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(["<bos>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    tokenizer.chat_template = chat_template
    return tokenizer
