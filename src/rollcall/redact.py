"""Secrets stay out of what is printed, logged and saved.

A secret is the value of a variable whose name says so (``is_secret``), or a value that someone gave to ``remember``: the
cluster's token, a key in a run file, a key that came with a job. ``guard_streams`` puts the redaction under stdout and
stderr of the ``rollcall`` command, so that no verb, library or traceback has to think of it; what is written to files goes
through ``redact`` or ``redact_env`` where it is written.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.parse
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TextIO

REDACTED = "<redacted>"
SHORTEST = 6  # characters; a shorter value is found in ordinary text too often to be told from it

_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")
_NOT_THE_VALUE = ("PATH", "FILE", "DIR", "URL")  # HF_TOKEN_PATH says where a secret is, and is none
# A variable with its value as a shell or `env` prints it, whoever's it is.
_ASSIGNMENT = re.compile(r"\b([A-Z][A-Z0-9_]*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s'\",;]+)")
_EXAMPLE = re.compile(r"\.\.\.|VALUE(\]\.\.\.)?")  # what help writes for a value: TOKEN=... and [KEY=VALUE]...
_YAML_ASSIGNMENT = re.compile(r"\b([A-Z][A-Z0-9_]*)(['\"]?\s*[:=]\s*)([^\s,}]+)")

_remembered: set[str] = set()


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret.

    >>> [is_secret(name) for name in ("WANDB_API_KEY", "HF_TOKEN", "PGPASSWORD", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH")]
    [True, True, True, False, False]
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if words[-1] in _NOT_THE_VALUE:
        return False
    return any(word.endswith(_ENDINGS) or word.startswith("SECRET") for word in words)


def remember(values: Iterable[str]) -> None:
    """Redact these values from now on, in this process."""
    _remembered.update(value for value in values if len(value) >= SHORTEST and value != REDACTED)


def redact(text: str) -> str:
    """The text without the secrets that this process knows, and without the values in ``SOME_KEY=value``."""
    values = _values()
    if values:
        text = _pattern(values).sub(REDACTED, text)
    return _ASSIGNMENT.sub(_without_value, text) if "=" in text else text


def redact_source(text: str) -> str:
    """The same for a piece of a run file that could not be read, so that nobody knows yet what is in it."""
    return _YAML_ASSIGNMENT.sub(
        lambda match: f"{match[1]}{match[2]}{REDACTED}" if is_secret(match[1]) else match[0], redact(text)
    )


def hides(name: str, value: str) -> bool:
    """Whether a variable is to be kept from others: by its name, or because a secret is part of its value."""
    return is_secret(name) or redact(value) != value


def redact_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with the secrets among them redacted, however short they are."""
    return {name: REDACTED if hides(name, value) else value for name, value in environment.items()}


def redact_run(run: dict[str, Any]) -> dict[str, Any]:
    """A run file's sections with the secrets of ``cluster.env`` and ``cluster.node_env`` redacted."""
    cluster = run.get("cluster")
    if not cluster:
        return run
    nodes = {rank: redact_env(environment) for rank, environment in cluster["node_env"].items()}
    return {**run, "cluster": {**cluster, "env": redact_env(cluster["env"]), "node_env": nodes}}


def secrets_of_run(raw: Mapping[str, Any]) -> dict[str, str]:
    """The secrets in a run file's sections, which need not be valid, by the name of their variable."""
    cluster = raw.get("cluster")
    if not isinstance(cluster, dict):
        return {}
    nodes = cluster.get("node_env")
    places = (cluster.get("env"), *(nodes.values() if isinstance(nodes, dict) else ()))
    variables = (
        (str(name), str(value)) for place in places if isinstance(place, dict) for name, value in place.items()
    )
    return {name: value for name, value in variables if is_secret(name)}


def guard_streams() -> None:
    """From now on nothing that this process writes to ``sys.stdout`` or ``sys.stderr`` holds a secret."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


class GuardedStream:
    """A text stream that redacts what is written to it; in all else it is the stream beneath."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


class Redactor:
    """Redacts a text that arrives in pieces: a piece's end that may be the beginning of a secret waits for the next."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        text = self._held + piece
        cut = len(text) - _overlap(text, _values())
        # An assignment is redacted as a whole or not at all: its line must be complete.
        line = text.rfind("\n") + 1
        if line < cut and _ASSIGNMENT.search(text, line):
            cut = line
        self._held = text[cut:]
        return redact(text[:cut])

    def end(self) -> str:
        held, self._held = self._held, ""
        return redact(held)


def _overlap(text: str, values: frozenset[str]) -> int:
    """How many characters at the end of ``text`` begin one of the values without finishing it."""
    longest = 0
    for value in values:
        for length in range(min(len(value) - 1, len(text)), longest, -1):
            if text.endswith(value[:length]):
                longest = length
                break
    return longest


def _without_value(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if is_secret(match[1]) and not _EXAMPLE.fullmatch(match[2]) else match[0]


def _values() -> frozenset[str]:
    own = {value for name, value in os.environ.items() if len(value) >= SHORTEST and is_secret(name)}
    return frozenset(own | _remembered)


@lru_cache(maxsize=16)
def _pattern(values: frozenset[str]) -> re.Pattern[str]:
    spellings = {
        spelling
        for value in values
        for spelling in (value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""))
    }
    return re.compile("|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)))
