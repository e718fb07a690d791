"""What becomes of a hostile input: success, a clean refusal, or a failure of ours.

Failures are an exception that is no refusal (a traceback to the user), a case that does not end, output without measure or with
escape codes, a refusal that does not name the file, and nonsense that is accepted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

CPU_S = 10  # of one case, before it counts as a hang; a case takes milliseconds
WALL_S = 100  # for a case that waits without computing, on a busy machine
MOST_OUTPUT = 20_000  # characters of a refusal


class Hang(BaseException):
    """Not an Exception: nothing that is tested may catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    case: str
    kind: str  # traceback, hang, flood, escape, vague, nonsense
    detail: str

    def __str__(self) -> str:
        return f"{self.case}: {self.kind}: {self.detail}"


@contextmanager
def watchdog() -> Iterator[None]:
    """Raises Hang in the block when it takes too long; the block runs in the main thread."""

    def ring(*_: Any) -> None:
        raise Hang

    before = [signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)


def judge(case: str, call: Callable[[], str | None], *, named: str = "") -> Failure | None:
    """``call`` returns what is wrong with what it accepted, or None. A refusal is an error of this package's own kinds;
    ``named`` is the file's name that has to be in it."""

    def failure(kind: str, detail: str) -> Failure:
        return Failure(case=case, kind=kind, detail=detail[:300])

    try:
        with watchdog():
            nonsense = call()
    except Hang:
        return failure("hang", f"{CPU_S} s of CPU or {WALL_S} s")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what a user would get
        text = str(error)
        if not type(error).__module__.startswith("rollcall."):
            return failure("traceback", f"{type(error).__module__}.{type(error).__name__}: {text}")
        if len(text) > MOST_OUTPUT:
            return failure("flood", f"{len(text)} characters: {text[:200]}")
        return failure("vague", text) if named not in text or not text.strip() else None
    return failure("nonsense", nonsense) if nonsense else None


def judge_command(
    case: str, arguments: list[str], *, named: str = "", accepted: Callable[[str], str | None] = lambda text: None
) -> Failure | None:
    """The same for a command line, in this process. ``accepted`` looks at what a command that succeeded printed."""
    from rollcall.cli.main import app

    def failure(kind: str, detail: str) -> Failure:
        return Failure(case=f"{case} {' '.join(arguments)[:200]!r}", kind=kind, detail=detail[:300])

    try:
        with watchdog():
            result = CliRunner().invoke(app, arguments, prog_name="rollcall")
    except Hang:
        return failure("hang", f"{CPU_S} s of CPU or {WALL_S} s")
    if isinstance(result.exception, Hang):
        return failure("hang", f"{CPU_S} s of CPU or {WALL_S} s")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return failure("traceback", f"{type(result.exception).__name__}: {result.exception}")
    if "Traceback" in result.stderr:
        return failure("traceback", result.stderr[-300:])
    if "\x1b" in result.output:
        return failure("escape", result.output[:300])
    if result.exit_code == 0:
        nonsense = accepted(result.stdout)
        return failure("nonsense", nonsense) if nonsense else None
    if result.exit_code not in (1, 2):
        return failure("traceback", f"status {result.exit_code}: {result.stderr[-200:]}")
    if len(result.output) > MOST_OUTPUT:
        return failure("flood", f"{len(result.output)} characters")
    if not result.output.strip() or (result.exit_code == 1 and named not in result.output):
        return failure("vague", result.output)
    return None
