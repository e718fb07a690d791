"""The config files of a model: configs, tokenizer, chat templates. They must stay as saved, whatever the log-probs are.

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


def describe_config_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """A checksum of each file by its name; of configs only what a conversion or a user may not change."""
    return {
        name: blake2b(_meaning(name, data), digest_size=16).hexdigest()
        for name, data in sorted(files.items())
        if name.endswith(ENDS)
    }


def changed_config_files(folder: Path, described: Mapping[str, str]) -> list[str]:
    """The files that are not as ``describe_config_files`` found them; a new template is one of them."""
    names = {*described, *(path.name for path in folder.glob("*.jinja"))} if described else set()
    there = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    now = describe_config_files(there)
    return sorted(name for name in names if now.get(name) != described.get(name))


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
