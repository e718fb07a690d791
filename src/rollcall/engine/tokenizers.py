"""Checks that all processes of a run have the same tokenizer, because each loads it from its own node's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def tokenizer_mark(tokenizer: Any) -> str:
    """Return a mark that is equal for tokenizers that tokenise alike and have the same end token. Without a Rust tokenizer it covers
    only the vocabulary and the special tokens."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None:
        described = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    else:
        # Each call sets padding and truncation itself.
        described = {
            key: part for key, part in json.loads(rust.to_str()).items() if key not in ("padding", "truncation")
        }
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=8)
    digest.update(f"{sorted(tokenizer.all_special_ids)}\0{tokenizer.eos_token_id}".encode())
    return digest.hexdigest()


def refuse_other_tokenizers(ours: str, marks: Mapping[str, str], *, path: str) -> None:
    """``marks`` maps a description of each holder to its mark; prompts are tokenised with ours."""
    if others := [who for who, mark in marks.items() if mark != ours]:
        raise ValueError(
            f"the tokenizer of {path} differs between {', '.join(others)} and the controller, which makes the prompts; "
            "put the same files there, or the model on a folder that all nodes share"
        )
