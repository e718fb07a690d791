"""What goes into a checkpoint's manifest beside what the store knows: the files that processes elsewhere have written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one process has written of a checkpoint, and what it tells of the whole of it."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: size, blake2b, kind, node, host, place
    facts: dict[str, Any] = field(default_factory=dict)


def join_written(everyone: Iterable[Written]) -> Written:
    joined = Written()
    for one in everyone:
        joined.files.update(one.files)
        joined.facts.update(one.facts)
    return joined


def kind_of(name: str) -> str:
    """What a file of a whole checkpoint is for.

    >>> kind_of("model/model.safetensors"), kind_of("model/config.json"), kind_of("actor.pt"), kind_of("state.json")
    ('weights', 'model', 'optimizer', 'state')
    """
    if name.startswith("model/"):
        return "weights" if name.endswith(".safetensors") else "model"
    return "state" if name == "state.json" else "optimizer"
