"""The embedded model: a character-level decoder of about a million parameters.

It is warm-started by a short supervised pass and kept in a cache. The pass shows sums in most of which the carry is
forgotten, so the model comes out able to add but wrong wherever there is a carry: telling right from wrong is left to
reinforcement learning, which sees rewards only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollcall.types import Sample

SPECIAL = ("<eos>", "<pad>", "<unk>", "<bos>")
ALPHABET = "0123456789+="
SHAPE = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
    max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-6,
)  # fmt: skip
STEPS, BATCH, SEED = 500, 256, 0  # of the supervised pass
SLIPS = 0.75  # share of the sums it shows with the carry forgotten


def char_tokenizer(alphabet: str) -> Any:
    """One token per character. Text survives a round trip: no merges, no normalisation, no added spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )


def resolve_model(path: str, *, say: Callable[[str], None]) -> str:
    """A model directory for ``builtin:NAME``, made and cached on first use; any other path as it is."""
    if not path.startswith("builtin:"):
        return path
    if path != "builtin:arithmetic":
        raise ValueError(f"model.path={path} is not built in; there is builtin:arithmetic")
    return str(arithmetic_model(say=say))


def cache_dir() -> Path:
    return Path(os.environ.get("ROLLCALL_CACHE", "~/.cache/rollcall")).expanduser()


def arithmetic_model(*, say: Callable[[str], None]) -> Path:
    """The cached directory of the warm-started model; its name holds everything that made it."""
    from rollcall.data.make import arithmetic

    rows = list(arithmetic(split="train", mostly_carries=True))
    recipe = json.dumps([SHAPE, STEPS, BATCH, SEED, SLIPS, ALPHABET, rows], sort_keys=True)
    directory = cache_dir() / f"arithmetic-{hashlib.blake2b(recipe.encode(), digest_size=6).hexdigest()}"
    if (directory / "config.json").exists():
        return directory
    say("making the embedded model: a short supervised pass over sums (once, then cached)")
    _warm_start(rows, directory, say=say)
    say(f"embedded model is in {directory}")
    return directory


def _warm_start(rows: list[dict[str, Any]], directory: Path, *, say: Callable[[str], None]) -> None:
    """Supervised steps are the learner's own update: every right or wrong answer shown is a sample of advantage 1."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollcall.checkpoint.export import export_model
    from rollcall.config import Dapo, OptimizerSection
    from rollcall.decoder import fuse_parameters
    from rollcall.learner.learner import Learner

    tokenizer = char_tokenizer(ALPHABET)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **ids)).requires_grad_(False)  # type: ignore[arg-type]
    fuse_parameters(model)
    section = OptimizerSection(lr=2e-3, betas=(0.9, 0.95), warmup_steps=20, decay="linear")
    learner = Learner(
        model, section, algorithm=Dapo(tis_cap=None), temperature=1.0, max_response_tokens=4, total_updates=STEPS
    )
    right = [_sample(row["prompt"], row["answer"], tokenizer) for row in rows]
    slips = [_sample(row["prompt"], without_carry(row["prompt"]), tokenizer) for row in rows]
    rng = np.random.default_rng(SEED)
    for step in range(1, STEPS + 1):
        shown = [
            (slips if slip else right)[row].with_(draw=place)
            for place, (row, slip) in enumerate(
                zip(rng.integers(len(rows), size=BATCH), rng.random(BATCH) < SLIPS, strict=True)
            )
        ]
        metrics = learner.update(shown)
        if step % 50 == 0:
            say(f"  supervised step {step}/{STEPS}, entropy {metrics['entropy']:.2f} nats a token")
    export_model(model, tokenizer, directory, dtype=None)


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
