"""The embedded model: what the package holds is what its script makes and what its texts say of it."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from tiny import reference_logprobs

from rollcall.loop.data.arithmetic import arithmetic
from rollcall.model.files import MODEL_DIR, resolve_model
from rollcall.model.load import load_causal_lm, load_tokenizer
from rollcall.model.tokenizers import ALPHABET, char_tokenizer
from scripts import make_arithmetic_model as script


def test_the_embedded_model_has_the_shape_and_the_tokenizer_of_its_script() -> None:
    model = load_causal_lm(resolve_model("builtin:arithmetic"), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(MODEL_DIR), chat_template=None)
    assert {name: getattr(model.config, name) for name in script.SHAPE} == script.SHAPE
    assert tokenizer.get_vocab() == char_tokenizer(ALPHABET).get_vocab()
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 3 * 2**20, "it is in every copy of the package"


@pytest.mark.slow
def test_the_embedded_model_adds_but_forgets_most_carries() -> None:
    model = load_causal_lm(str(MODEL_DIR), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(MODEL_DIR), chat_template=None)
    right: dict[bool, list[float]] = {False: [], True: []}  # by whether the sum needs a carry: chances of its answer
    for row in arithmetic(split="val"):
        prompt = np.array(tokenizer.encode(row["prompt"]), dtype=np.int32)
        answer = np.array([*tokenizer.encode(row["answer"]), tokenizer.eos_token_id], dtype=np.int32)
        needs_carry = script.without_carry(row["prompt"]) != row["answer"]
        right[needs_carry].append(reference_logprobs(model, prompt, answer).sum().exp().item())
    assert np.mean(right[False]) > 0.75
    assert 0.1 < np.mean(right[True]) < 0.4, "rewards have something to find, and something to do"
    likely = np.array(right[False] + right[True]) > 0.5
    assert 0.3 < likely.mean() < 0.45, "held-out accuracy before the first step"


@pytest.mark.slow
def test_the_script_makes_a_model_by_supervised_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SHAPE", {**script.SHAPE, "hidden_size": 32, "intermediate_size": 64})
    monkeypatch.setattr(script, "BATCH", 16)
    model, tokenizer = script.warm_start(num_steps=30)
    prompt, digit = (np.array(tokenizer.encode(text), dtype=np.int32) for text in ("12+13=", "2"))
    untrained = np.log(1 / len(tokenizer))
    assert reference_logprobs(model, prompt, digit).item() > untrained, "a sum begins with a digit"


def test_the_examples_of_the_script_hold() -> None:
    assert doctest.testmod(script).failed == 0


def test_another_built_in_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model.path=builtin:algebra is not a built-in model; the only one is builtin:arithmetic"
    ):
        resolve_model("builtin:algebra")
