"""The built-in task: sums of two small numbers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Literal

MAX_NUMBER = 49
TEST_FRACTION = 0.1


def arithmetic(*, split: Literal["train", "val"], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield sums a+b with both numbers up to ``MAX_NUMBER``, in a shuffled order. Each sum belongs to one split.

    a+b and b+a are in the same split, so held-out sums are new in either order. The held-out sums are the same for every ``seed``,
    because the embedded model has seen all the others; ``seed`` only changes the order. Even sums without a carry from the units digit
    are left out, so that six in ten of the remaining sums need a carry. Carrying is the part that the model has to learn.
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
    """Map a string to a number in [0, 1), deterministically."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
