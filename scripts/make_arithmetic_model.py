"""Makes the embedded model, `builtin:arithmetic`, which is kept in the package.

A short supervised pass shows sums, in most of which the carry is forgotten. The model comes out able to add but wrong
wherever there is a carry: telling right from wrong is left to reinforcement learning, which sees rewards only. Two cores
take about three minutes. What comes out is a model of this kind, which `tests/test_tiny.py` describes, and not always the same
bytes: the rounding of sums depends on the processor, the number of threads and torch's version.

    python scripts/make_arithmetic_model.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollcall.base.types import Sample
from rollcall.checkpoint.export import export_model
from rollcall.config import Dapo, OptimizerSection
from rollcall.learner.learner import Learner
from rollcall.loop.data.arithmetic import arithmetic
from rollcall.model.decoder import fuse_parameters
from rollcall.model.files import MODEL_DIR
from rollcall.model.tokenizers import ALPHABET, char_tokenizer

SHAPE: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
    max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-6,
)  # fmt: skip
NUM_STEPS, BATCH, SEED = 500, 256, 0
SLIPS = 0.75  # share of the sums that are shown with the carry forgotten
STORED_AS = torch.bfloat16  # half the bytes of the package; a run computes in a precision of its own


def warm_start(*, num_steps: int = NUM_STEPS) -> tuple[Any, Any]:
    """The model and its tokenizer. Supervised steps are the learner's own update: a shown answer has advantage 1."""
    tokenizer = char_tokenizer(ALPHABET)
    torch.manual_seed(SEED)
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **ids)).requires_grad_(False)
    fuse_parameters(model)
    section = OptimizerSection(lr=2e-3, betas=(0.9, 0.95), warmup_steps=20, decay="linear")
    learner = Learner(
        model, section, algorithm=Dapo(tis_cap=None), temperature=1.0, max_response_tokens=4, total_updates=num_steps
    )
    rows = list(arithmetic(split="train"))
    right = [_sample(row["prompt"], row["answer"], tokenizer) for row in rows]
    slips = [_sample(row["prompt"], without_carry(row["prompt"]), tokenizer) for row in rows]
    rng = np.random.default_rng(SEED)
    for step in range(1, num_steps + 1):
        chosen = zip(rng.integers(len(rows), size=BATCH), rng.random(BATCH) < SLIPS, strict=True)
        shown = [(slips if slip else right)[row].with_(draw=place) for place, (row, slip) in enumerate(chosen)]
        metrics = learner.update(shown)
        if step % 50 == 0:
            print(f"supervised step {step}/{num_steps}, entropy {metrics['entropy']:.2f} nats a token", flush=True)
    return model, tokenizer


def without_carry(prompt: str) -> str:
    """The sum of "a+b=" as someone adds who forgets the carry.

    >>> without_carry("25+17="), without_carry("12+13=")
    ('32', '25')
    """
    a, b = (int(number) for number in prompt.removesuffix("=").split("+"))
    return str((a // 10 + b // 10) * 10 + (a % 10 + b % 10) % 10)


def _sample(prompt: str, answer: str, tokenizer: Any) -> Sample:
    response = np.array([*tokenizer.encode(answer), tokenizer.eos_token_id], dtype=np.int32)
    return Sample(
        draw=0,
        attempt=0,
        prompt_ids=np.array(tokenizer.encode(prompt), dtype=np.int32),
        response_ids=response,
        mask=np.ones(len(response), dtype=np.bool_),
        behaviour_logprobs=np.zeros(len(response), dtype=np.float32),
        old_logprobs=None,
        reference_logprobs=None,
        advantages=np.ones(len(response), dtype=np.float32),
        returns=None,
        values=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL_DIR, help=f"default: {MODEL_DIR}")
    directory: Path = parser.parse_args().directory
    model, tokenizer = warm_start()
    print(f"wrote {export_model(model.to(STORED_AS), tokenizer, directory)}")


if __name__ == "__main__":
    main()
