"""The embedded model: a character-level decoder of about a million parameters.

It is warm-started by a short supervised pass over sums, so that it answers some of them, and kept in a cache: what
it lacks is left to reinforcement learning.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL = ("<eos>", "<pad>", "<unk>", "<bos>")
ALPHABET = "0123456789+="
SHAPE = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=64, tie_word_embeddings=True, rms_norm_eps=1e-6,
)  # fmt: skip
WARM_UP = dict(steps=120, batch=256, lr=2e-3, seed=0)


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

    rows = list(arithmetic(split="train"))
    recipe = json.dumps([SHAPE, WARM_UP, ALPHABET, rows], sort_keys=True)
    directory = cache_dir() / f"arithmetic-{hashlib.blake2b(recipe.encode(), digest_size=6).hexdigest()}"
    if (directory / "config.json").exists():
        return directory
    say("making the embedded model: a short supervised pass over sums (once, then cached)")
    _warm_start(rows, directory, say=say)
    say(f"embedded model is in {directory}")
    return directory


def _warm_start(rows: list[dict[str, Any]], directory: Path, *, say: Callable[[str], None]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rollcall.checkpoint.export import export_model

    tokenizer = char_tokenizer(ALPHABET)
    generator = torch.Generator().manual_seed(int(WARM_UP["seed"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(WARM_UP["seed"]))
        ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **ids))  # type: ignore[arg-type]
    tokens, targets = _supervised_rows(rows, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP["lr"], betas=(0.9, 0.95))
    steps, batch = int(WARM_UP["steps"]), int(WARM_UP["batch"])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = WARM_UP["lr"] * min(1.0, (step + 1) / 20) * (1 - step / steps)
        chosen = torch.randint(len(tokens), (batch,), generator=generator)
        loss = model(input_ids=tokens[chosen], labels=targets[chosen]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 40 == 0:
            say(f"  supervised step {step + 1}/{steps}, loss {float(loss):.3f}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    export_model(model.eval(), tokenizer, directory, dtype=None)


def _supervised_rows(rows: list[dict[str, Any]], tokenizer: Any) -> tuple[Any, Any]:
    """Padded ids and labels; only the answer and its end are learnt."""
    import torch

    texts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [[*tokenizer.encode(row["answer"]), tokenizer.eos_token_id] for row in rows]
    width = max(len(text) + len(answer) for text, answer in zip(texts, answers, strict=True))
    tokens = np.full((len(rows), width), tokenizer.pad_token_id, dtype=np.int64)
    labels = np.full((len(rows), width), -100, dtype=np.int64)
    for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        tokens[index, : len(text) + len(answer)] = text + answer
        labels[index, len(text) : len(text) + len(answer)] = answer
    return torch.from_numpy(tokens), torch.from_numpy(labels)
