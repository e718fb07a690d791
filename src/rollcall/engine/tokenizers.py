"""Whether all processes of a run have the same tokenizer: each loads it from the files of its node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def tokenizer_mark(tokenizer: Any) -> str:
    """Equal for tokenizers that make the same tokens of a text and end at the same one. Of one without a Rust tokenizer only the
    vocabulary is seen."""
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None:
        described = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    else:
        # How it pads and cuts is set by each call.
        described = {
            key: part for key, part in json.loads(rust.to_str()).items() if key not in ("padding", "truncation")
        }
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=8)
    digest.update(f"{sorted(tokenizer.all_special_ids)}\0{tokenizer.eos_token_id}".encode())
    return digest.hexdigest()


def refuse_other_tokenizers(ours: str, marks: Mapping[str, str], *, path: str) -> None:
    """``marks`` is by who has it, in words; prompts are tokenised with ours."""
    if others := [who for who, mark in marks.items() if mark != ours]:
        raise ValueError(
            f"the tokenizer of {path} differs between {', '.join(others)} and the controller, which makes the prompts; "
            "put the same files there, or the model on a folder that all nodes share"
        )
