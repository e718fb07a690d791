"""Keeps secrets out of everything that is printed, logged or saved.

A secret is the value of a variable whose name marks it as secret (``is_secret``), or a value passed to ``remember``: the cluster's token,
a key in a run file, or a key that came with a job. A password or token in a URL is always a secret. ``guard_streams`` redacts everything
that the ``rollcall`` command writes to stdout and stderr, and also removes terminal control sequences. Code that writes files must call
``redact`` or ``redact_env`` itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

REDACTED = "<redacted>"
SHORTEST = 6  # characters; shorter values occur too often in ordinary text
LONGEST_SECRET = 1 << 16  # characters, including the name; a PEM key has a few thousand
LONGEST_LINE = 1 << 20  # characters of an unfinished line that are buffered

_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")
_NOT_THE_VALUE = ("PATH", "FILE", "DIR", "URL")  # HF_TOKEN_PATH says where a secret is, but is not a secret itself
# A variable and its value, as printed by a shell or `env`.
_ASSIGNMENT = re.compile(r"\b([A-Z][A-Z0-9_]*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s'\",;]+)")
_EXAMPLE = re.compile(r"\.\.\.|VALUE[\].]*")  # placeholders in help texts: TOKEN=..., [KEY=VALUE]... or [KEY=VALUE...]
# References that a shell expands: KEY=$KEY, KEY="${KEY}", KEY=$(cat file), and https://$KEY@host.
_REFERENCE = re.compile(
    r"\b[A-Z][A-Z0-9_]*=(\"?)\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|\([^()]*\))\1(?![\w$-])"
    r"|(?<=//)(?:[\w.-]*:)?\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})@"
)
# An assignment in YAML, even if it is not quite valid; the value ends at the next comma, bracket or line end.
_YAML_ASSIGNMENT = re.compile(r"\b([A-Za-z][A-Za-z0-9_]*)(['\"]?\s*[:=]\s*)(\"[^\"\n]*\"|'[^'\n]*'|[^\n,}\]]+)")
# scheme://user:password@host, or with one slash, as in a path. A user without a password is a token for http and https
# (https://TOKEN@host), but not in ssh://git@host. The bound on the scheme's length avoids quadratic time on long runs of letters.
_URL_PASSWORD = re.compile(r"\b([a-z][a-z0-9+.-]{0,40}:/{1,2}[^\s/:@?#'\"]*:)[^\s/?#'\"]+@", re.IGNORECASE)
_URL_TOKEN = re.compile(r"\b(https?://)[^\s/:@?#'\"]+@", re.IGNORECASE)
_URL_QUERY = re.compile(r"(?<=[?&])([A-Za-z][A-Za-z0-9_.-]*)=[^\s&#'\"]+")
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature", "x-amz-security-token")  # in a signed URL
# Escape sequences (CSI, OSC, others), control characters except tab, line feed and carriage return, lone surrogates, and invisible
# Unicode characters that reorder text or hide in it. Soft hyphens and the joiners for scripts and emoji (200C, 200D) are kept.
_CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|[ -~])?|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    r"\ud800-\udfff\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)

_remembered: set[str] = set()


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a variable with this name contains a secret.

    >>> [is_secret(name) for name in ("WANDB_API_KEY", "HF_TOKEN", "PGPASSWORD", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH")]
    [True, True, True, False, False]
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if words[-1] in _NOT_THE_VALUE:
        return False
    return any(word.endswith(_ENDINGS) or word.startswith("SECRET") for word in words)


def remember(values: Iterable[str]) -> None:
    """Redact these values in this process from now on. If a value is a URL, its password is also redacted outside the URL."""
    for value in values:
        passwords = (match[0][len(match[1]) : -1] for match in _URL_PASSWORD.finditer(value))
        _remembered.update(each for each in (value, *passwords) if len(each) >= SHORTEST and each != REDACTED)


def hide_from_proc(names: Iterable[str]) -> None:
    """Erase these variables from ``/proc/self/environ``, which all of the user's processes can read. ``os.environ`` keeps them."""
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return  # on systems other than Linux, other processes cannot read the environment
    place, end = int(fields[47]), int(fields[48])  # env_start and env_end, see proc(5)
    hidden = {os.fsencode(name) for name in names}
    for entry in ctypes.string_at(place, end - place).split(b"\0") if place else ():
        name, _, value = entry.partition(b"=")
        if name in hidden and value:
            if name in os.environb:
                os.putenv(name, os.environb[name])  # stores a copy, so that C code still finds the value
            ctypes.memset(place + len(name) + 1, 0, len(value))
        place += len(entry) + 1


def redact(text: str) -> str:
    """Remove from the text the secrets that this process knows, secret values in ``SOME_KEY=value``, and passwords in URLs.

    >>> redact("cannot read s3://me:hunter2@host/rows.jsonl")
    'cannot read s3://me:<redacted>@host/rows.jsonl'
    """
    own = {value for name, value in os.environ.items() if len(value) >= SHORTEST and is_secret(name)}
    if values := frozenset(own | _remembered):
        text = _pattern(values).sub(REDACTED, text)
    if ":/" in text:
        text = redact_urls(text)
    return _ASSIGNMENT.sub(_without_value, text) if "=" in text else text


def redact_end(text: str, count: int) -> str:
    """Return the last ``count`` characters, redacted. A secret that begins before them is redacted too, so its end is not shown."""
    return redact(text[-(count + LONGEST_SECRET) :])[-count:]


def redact_urls(text: str) -> str:
    """Remove the passwords, tokens and signatures in URLs from the text."""
    text = _URL_PASSWORD.sub(rf"\g<1>{REDACTED}@", text)
    text = _URL_TOKEN.sub(rf"\g<1>{REDACTED}@", text)
    return _URL_QUERY.sub(
        lambda match: f"{match[1]}={REDACTED}" if is_secret(match[1]) or match[1].lower() in _SIGNATURES else match[0],
        text,
    )


def redact_source(text: str) -> str:
    """Like ``redact``, for a piece of a run file that could not be parsed."""
    return _YAML_ASSIGNMENT.sub(
        lambda match: f"{match[1]}{match[2]}{REDACTED}" if names_secret(match[1]) else match[0], redact(text)
    )


def names_secret(key: str) -> bool:
    return is_secret(key) and key not in ("prompt_key", "answer_key")  # these name columns


def hides(name: str, value: str) -> bool:
    """Whether a variable must not be shown, because of its name or because its value contains a secret."""
    return is_secret(name) or redact(value) != value


def shell_hides(command: str) -> bool:
    """Whether a shell command contains a secret, rather than just a reference to one.

    >>> [shell_hides(line) for line in ("HF_TOKEN=hf_abcdef get", "HF_TOKEN=$MINE get", "git clone https://me:pass@host/x")]
    [True, False, True]
    """
    rest = _REFERENCE.sub("", command)
    return redact(rest) != rest


def redact_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Redact the secrets among the variables, however short they are."""
    return {name: REDACTED if hides(name, value) else value for name, value in environment.items()}


def redact_run(run: dict[str, Any]) -> dict[str, Any]:
    """Redact the secrets in a run file's sections: in ``cluster.env``, in ``cluster.node_env``, and in URLs among the paths. Prompts,
    templates and stop strings stay unchanged, because a URL in them is ordinary text."""

    def shown(section: dict[str, Any], *keys: str) -> dict[str, Any]:
        return {**section, **{key: redact_urls(section[key]) for key in keys if section.get(key)}}

    model, data = shown(run["model"], "path"), shown(run["data"], "train", "val")
    run = {**run, "model": model, "data": data, "reward": [shown(reward, "path") for reward in run["reward"]]}
    if cluster := run.get("cluster"):
        nodes = {rank: redact_env(environment) for rank, environment in cluster["node_env"].items()}
        run["cluster"] = {**cluster, "env": redact_env(cluster["env"]), "node_env": nodes}
    return run


def secrets_of_run(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the secrets among a run file's cluster variables, by name. The sections need not be valid: variables written as a
    string, as a list of ``NAME=value`` or in the wrong place contain the same secrets."""
    return {name: value for name, value in _assignments(raw.get("cluster"), "") if is_secret(name)}


def _assignments(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield each leaf of a nested value with its name, and the assignments in strings. Everything below a secret name is secret."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and "value" in value:  # as Kubernetes writes a variable
            yield from _assignments(value["value"], value["name"])
        for key, each in value.items():
            yield from _assignments(each, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _assignments(each, name)
    elif isinstance(value, str):
        yield name, value
        for match in _YAML_ASSIGNMENT.finditer(value):
            yield match[1], match[3].strip("'\" ")
    # Python does not print longer numbers; they are refused later.
    elif not isinstance(value, int) or value.bit_length() < 10_000:
        yield name, str(value)


def guard_streams() -> None:
    """From now on, keep secrets and terminal control sequences out of this process's ``sys.stdout`` and ``sys.stderr``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the stream is closed; no file that is opened later may get its descriptor number
            stream = open(os.devnull, "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
        if not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


class OutputError(OSError):
    """Writing to standard output or standard error failed."""


class GuardedStream:
    """A text stream that redacts secrets and removes terminal control sequences from everything written to it. Otherwise it behaves
    like the stream that it wraps. ``styled`` returns a stream for a trusted writer, which keeps escape codes."""

    def __init__(self, stream: TextIO, *, is_styled: bool = False) -> None:
        self._stream, self._is_styled = stream, is_styled

    @property
    def styled(self) -> GuardedStream:
        return GuardedStream(self._stream, is_styled=True)

    def write(self, text: str) -> int:
        self._try(self._stream.write, redact(text if self._is_styled else harmless(text)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *args: str) -> None:
        try:
            action(*args)
        except BrokenPipeError:
            raise  # the reader has closed the pipe
        except OSError as error:
            name = "standard error" if self._stream is sys.__stderr__ else "standard output"
            text = f"cannot write to {name} ({error.strerror}); free space on its disk, or redirect it elsewhere"
            raise OutputError(error.errno, text) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


def harmless(text: str) -> str:
    """Remove escape sequences and other characters that control a terminal; newlines and tabs are kept.

    >>> harmless("done\\x1b[31m in red\\x1b]0;title\\x07")
    'done in red'
    """
    return _CONTROLS.sub("", text)


class Redactor:
    """Redacts text that arrives in pieces. Buffers a line until it ends, so that a secret is redacted as a whole. If a line gets very
    long, passes on all but its last ``LONGEST_SECRET`` characters."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        text = self._held + piece
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        if len(text) - cut > LONGEST_LINE:
            text = redact(text)  # redact before cutting, because the cut may be inside a secret
            cut = len(text) - LONGEST_SECRET
        self._held = text[cut:]
        return redact(text[:cut])

    def end(self) -> str:
        held, self._held = self._held, ""
        return redact(held)


def _without_value(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if is_secret(match[1]) and not _EXAMPLE.fullmatch(match[2]) else match[0]


@lru_cache(maxsize=16)
def _pattern(values: frozenset[str]) -> re.Pattern[str]:
    # A multi-line secret may arrive line by line.
    parts = {part for value in values for part in (value, *value.splitlines()) if len(part) >= SHORTEST}
    spellings = {
        spelling for value in parts for spelling in (value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""))
    }
    return re.compile("|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)))
