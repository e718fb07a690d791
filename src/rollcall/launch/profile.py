"""A profile: a file of ``NAME=VALUE`` lines with network variables for the nodes, as in `launch.profile`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rollcall.config.yaml import read_small
from rollcall.launch.errors import LaunchError, reason
from rollcall.launch.rendered import VARIABLE

MOST_BYTES = 1 << 20


def read_profile(path: Path) -> dict[str, str]:
    """Empty lines and lines that begin with ``#`` are skipped. A value with spaces stands in quotes; nothing is expanded."""
    try:
        lines = read_small(path, most=MOST_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"launch.profile={path} cannot be read: {reason(error)}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, rest = text.partition("=")
        try:
            words = shlex.split(rest)
        except ValueError:
            words = ["", ""]
        if not equals or not VARIABLE.fullmatch(name) or len(words) > 1:
            raise LaunchError(
                f"line {number} of launch.profile={path} is {line.strip()!r}; write NAME=VALUE, with a value that has spaces "
                "in quotes"
            )
        found[name] = words[0] if words else ""
    return found
