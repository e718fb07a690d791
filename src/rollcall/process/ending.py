"""Waits for a process and describes how it ended: its exit status, and the stack that it dumped."""

from __future__ import annotations

import asyncio
import re
import signal

from rollcall.base.words import visible

_THREAD = re.compile(r"(Current )?[Tt]hread 0x[0-9a-f]+\b")
_FRAME = re.compile(r"  File (\".*\"), line (\d+) in (.*)")
_OWN_FRAMES = (
    "rollcall/process/child",
    "rollcall/reward/worker",
    "rollcall/reward/user_function",
    "runpy",
    "/asyncio/",
)


async def exited(process: asyncio.subprocess.Process) -> None:
    """Wait until it exits. asyncio's own wait (3.11) lasts until its output is closed, but leftover processes may keep it open."""
    ending = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({ending}, timeout=0.5)
    finally:
        ending.cancel()


def plain_stack(dump: str) -> str:
    """Turn faulthandler's dump into a Python traceback: newest call last, without our own frames and threads."""
    said: list[str] = []
    threads: list[tuple[bool, list[str]]] = []
    for line in dump.splitlines():
        if header := _THREAD.match(line):
            threads.append((bool(header[1]), []))
        elif call := _FRAME.match(line):
            is_own = any(name in call[1] for name in _OWN_FRAMES)
            if threads and not is_own:
                threads[-1][1].insert(0, f"  File {call[1]}, line {call[2]}, in {call[3]}")
        elif line.startswith("Fatal Python error"):
            said.append(line)
    threads = [thread for thread in threads if thread[1]]
    for is_current, frames in sorted(threads, key=lambda thread: thread[0]):  # the current thread comes last
        which = "in the main thread:" if is_current else "in another thread:"
        said += frames if len(threads) == 1 else [which, *frames]
    return visible("\n".join(said))


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    hint = ", perhaps for lack of memory" if returncode == -signal.SIGKILL else ""
    try:
        return f"{signal.Signals(-returncode).name}{hint}"
    except ValueError:  # the kernel has more signals than Python has names for
        return f"signal {-returncode}"
