"""An adapter in vLLM: every version is loaded by vLLM's own LoRA, and its log-probs are those of the merged model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import make_adapter, merged_of
from engine_contract import finish, requests_for, submit
from tiny import make_tokenizer, random_prompts, reference_logprobs, save_model

from rollcall.config import VllmSection
from rollcall.config.lora import LoraSection
from rollcall.engine.vllm.child import Child
from rollcall.engine.vllm.engine import VllmEngine
from rollcall.engine.vllm.setup import PYTHON_VARIABLE, VllmUnavailable, find_python, make_spec
from rollcall.engine.weights.protocol import RefusedUpdateError
from rollcall.model.load import load_causal_lm

CPU = torch.device("cpu")
SHAPE = dict(hidden_size=128, head_dim=32)  # vLLM's kernels for CPUs begin at heads of 32


@pytest.mark.vllm
def test_vllm_samples_from_every_version_of_the_adapter(tmp_path: Path) -> None:
    try:
        child = Child(find_python(None), num_threads=1)
    except VllmUnavailable as error:
        pytest.skip(f"{error}, or in {PYTHON_VARIABLE}")
    child.wait_until_ready()
    path = save_model(tmp_path / "model", "llama-tied", **SHAPE)
    model = load_causal_lm(str(path), device=CPU, dtype=torch.float32)
    adapter = replace(make_adapter(model, LoraSection(rank=4, alpha=8)), base=str(path))
    engine = VllmEngine(
        model, make_tokenizer(), child, section=VllmSection(), max_running=8, kv_tokens=None, adapter=adapter
    )
    try:
        prompts = random_prompts(3)
        for version in (0, 1, 2):
            if version:
                for tensor in adapter.named_tensors().values():
                    tensor.mul_(1.3)
                engine.update_weights(version)
            other = merged_of(str(path), adapter)
            submit(engine, *requests_for(prompts, max_tokens=8))
            for name, completions in finish(engine).items():
                for completion in completions:
                    expected = reference_logprobs(other, prompts[int(name[1:])], completion.token_ids)
                    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-3)
        with pytest.raises(RefusedUpdateError, match="stale"):
            engine.update_weights(1)
    finally:
        engine.close()


def test_vllm_refuses_what_it_cannot_load_with_an_adapter(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "llama-tied", **SHAPE)
    model = load_causal_lm(str(path), device=CPU, dtype=torch.float32)
    how = dict(max_running=4, kv_tokens=64, kv_fraction=0.3)
    stray = replace(make_adapter(model, LoraSection(rank=4)), base=str(tmp_path))
    with pytest.raises(VllmUnavailable, match="is a checkpoint, but with model.lora, vLLM reads the model itself"):
        make_spec(model, VllmSection(), adapter=stray, **how)  # type: ignore[arg-type]
    spec = make_spec(model, VllmSection(), adapter=replace(stray, base=str(path)), **how)  # type: ignore[arg-type]
    assert spec["lora_rank"] == 8 and spec["model"] == str(path)
