"""Helpers for wording messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT]i?)B?|B)", re.IGNORECASE)

ANOTHER_RUN = "choose another run.dir, or start over with --fresh (the old directory is moved aside)"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "node"), counted(2, "finished group"), counted(0, "node"), counted(1234, "prompt"), counted(2, "process")
    ('1 node', '2 finished groups', '0 nodes', '1,234 prompts', '2 processes')
    """
    return f"{count:,} {plural(noun, count)}"


def plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"


def all_of(count: int, noun: str) -> str:
    """
    >>> all_of(3, "step"), all_of(1, "step")
    ('all 3 steps', 'the only step')
    """
    return f"the only {noun}" if count == 1 else f"all {counted(count, noun)}"


def are(count: int) -> str:
    """Return the verb that follows ``counted`` or ``all_of``."""
    return "is" if count == 1 else "are"


def size(num_bytes: int) -> str:
    """
    >>> size(3_813_888), size(15_200_000_000), size(512)
    ('3.81 MB', '15.20 GB', '512 bytes')
    """
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.2f} {unit}"
    return counted(num_bytes, "byte")


def parse_size(text: str) -> int:
    """Parse a size with a unit. Raises ValueError if it is not valid.

    >>> parse_size("5GB"), parse_size("512MiB"), parse_size("1000B")
    (5000000000, 536870912, 1000)
    """
    match = _SIZE.fullmatch(text.strip())
    power = "KMGT".index(match[2][0].upper()) + 1 if match and match[2] else 0
    num = int(float(match[1]) * (1024 if match[2] and "i" in match[2].lower() else 1000) ** power) if match else 0
    if num < 1:
        raise ValueError(f"{text[:80]!r} is not a size with a unit; write for example 5GB or 512MiB")
    return num


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers, such as slots or ranks, as compact ranges.

    >>> ranges([0, 1, 2, 3, 8])
    '0-3,8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def span(first: int, last: int) -> str:
    """Describe a range of a run's steps in words."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def visible(text: str) -> str:
    """Replace terminal control characters in text from outside, such as from a model, a tool or another machine.

    >>> visible("done\\x1b[2J")
    'done\N{REPLACEMENT CHARACTER}[2J'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
