"""A run that is debugged: its directory, and terminals that come to what has stopped."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollcall.process.debug import attach, here
from rollcall.process.debug.attach import End, converse, reach
from rollcall.process.debug.board import BOARD, Waiting

WAIT_S = 120.0


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a run whose controller is this process, which has no terminal."""
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(here, "has_terminal", lambda: False)
    monkeypatch.setattr(attach, "_alone_since", None)
    monkeypatch.setattr(attach, "_has_given_up", False)
    here._examined.cache_clear()
    here.warn_ignored.cache_clear()
    for name in (here.POST_MORTEM, here.RAY_DEBUG, "PYTHONBREAKPOINT"):
        monkeypatch.delenv(name, raising=False)
    with BOARD.of_run(tmp_path):
        here.serve()
        yield tmp_path


def wait_for(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def talk(waits: Waiting, *lines: str) -> End:
    with reach(waits) as connection:
        return converse(connection, typed=lines, ask=nobody)


def nobody(prompt: str) -> str:
    raise EOFError


def at_a_terminal(command: Sequence[str], *, cwd: Path, env: dict[str, str], typed: Sequence[str]) -> str:
    """What the command shows on a terminal where each line is typed at the next prompt."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(command[0], list(command), {**os.environ, **env, "TERM": "dumb"})
    shown, seen, left = "", 0, list(typed)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # its other side is closed
                break
        if left and (prompt := re.compile(r"\(Pdb\) ").search(shown, seen)):
            seen, text = prompt.end(), left.pop(0)
            os.write(terminal, text.encode() if text == "\x03" else f"{text}\n".encode())
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown
