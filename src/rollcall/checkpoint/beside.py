"""What the files beside the weights must say, whatever the log-probs are: configs, tokenizer, chat templates.

A wrong tokenizer or a wrong stop token changes no log-prob of given tokens, and a config that is a little wrong may change them
by less than rounding does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

ENDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# A merge or another precision may change these fields of config.json.
_FREE = ("dtype", "torch_dtype", "_name_or_path", "transformers_version")


def describe_beside(files: Mapping[str, bytes]) -> dict[str, str]:
    """A checksum of each file by its name; of configs only what a conversion or a user may not change."""
    return {
        name: blake2b(_meaning(name, data), digest_size=16).hexdigest()
        for name, data in sorted(files.items())
        if name.endswith(ENDS)
    }


def differing(folder: Path, beside: Mapping[str, str]) -> list[str]:
    """The files that are not as ``beside`` describes them; a template that it does not know is one of them."""
    names = {*beside, *(path.name for path in folder.glob("*.jinja"))} if beside else set()
    there = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    now = describe_beside(there)
    return sorted(name for name in names if now.get(name) != beside.get(name))


def _meaning(name: str, data: bytes) -> bytes:
    if name not in ("config.json", "generation_config.json"):
        return data
    try:
        fields = json.loads(data)
        kept = {
            key: value
            for key, value in fields.items()
            if (key not in _FREE if name == "config.json" else key.endswith("_token_id"))
        }
    except (ValueError, AttributeError, RecursionError):
        return data
    return json.dumps(kept, sort_keys=True).encode()
