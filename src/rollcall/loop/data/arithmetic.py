"""The built-in task: sums of two small numbers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Literal

MAX_NUMBER = 49
TEST_FRACTION = 0.1


def arithmetic(*, split: Literal["train", "val"], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums a+b with both numbers up to ``MAX_NUMBER``, each in one split, in a shuffled order.

    a+b and b+a fall on the same side, so the held-out sums are new in either order. They are the same for every ``seed``,
    which decides only the order: the embedded model has seen all the others. Even sums whose units need no carry are left
    out, so that six in ten of the rest need one: a carry is what there is to learn.
    """
    rows: list[tuple[float, int, int]] = []
    for a, b in itertools.product(range(MAX_NUMBER + 1), repeat=2):
        if a % 10 + b % 10 < 10 and (a + b) % 2 == 0:
            continue
        held_out = fraction(f"0:{min(a, b)}+{max(a, b)}") < TEST_FRACTION
        if held_out == (split == "val"):
            rows.append((fraction(f"{seed}:order:{a}+{b}"), a, b))
    for _, a, b in sorted(rows):
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def fraction(text: str) -> float:
    """A number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
