"""A user's program as a process of its own: with limits, in a session that ends with it, and never longer than this process.

The shell that starts it holds the read end of a pipe. When this process dies, however that happens, the pipe ends, and the shell's
watcher kills the whole group.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from rollcall.process import Process, process_ids, read_row
from rollcall.reward.ending import how_it_ended

MAX_TAIL_BYTES = 1 << 16
DRAIN_S = 2.0  # for output that is on its way when the program has ended
KILL_ROUNDS = 3  # it may start others while it is killed
_LOOK_S = 0.5
_LIMITED = """ulimit -c 0
ulimit -d {kilobytes} || exit 125
exec 3<&0 </dev/null
{{ read -r _; kill -KILL 0; }} <&3 >/dev/null 2>&1 &
exec 3<&-
{command}
"""


class Program:
    """Made by ``start``."""

    def __init__(self, process: asyncio.subprocess.Process, *, mark: bytes) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self._mark = mark
        self._tails = (bytearray(), bytearray())
        streams = zip((process.stdout, process.stderr), self._tails, strict=True)
        self._readers = [asyncio.create_task(_keep_tail(stream, tail)) for stream, tail in streams]

    @classmethod
    async def start(cls, command: str, *, variables: Mapping[str, str], memory_mb: int, own: str) -> Program:
        """``own`` names a variable whose value no other process has: what leaves the program's session is known by it."""
        script = _LIMITED.format(kilobytes=memory_mb << 10, command=command)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", script, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(variables), start_new_session=True
        )
        return cls(process, mark=f"{own}={variables[own]}".encode())

    @property
    def stdout(self) -> str:
        """Its end."""
        return self._tails[0].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._tails[1].decode(errors="replace")

    @property
    def ended(self) -> str:
        """How, in words; empty: with status 0."""
        status = self._process.returncode
        return "" if status == 0 else "it still runs" if status is None else how_it_ended(status)

    async def wait(self) -> None:
        """Until it has ended. asyncio's own wait (3.11) goes on until nobody holds its output, which what it left behind may."""
        ending = asyncio.ensure_future(self._process.wait())
        try:
            while self._process.returncode is None:
                await asyncio.wait({ending}, timeout=_LOOK_S)
        finally:
            ending.cancel()

    async def end(self) -> None:
        """Kill what is left of it, and take in what it has printed."""
        if self._process.returncode is not None:
            _kill_group(self._process.pid)  # its watcher is still in it, so no other group has this number
        kill_leftovers(self._process.pid, mark=self._mark)
        await self.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait(self._readers, timeout=DRAIN_S)
        for reader in self._readers:
            reader.cancel()


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while data := await stream.read(MAX_TAIL_BYTES):
        tail += data
        del tail[:-MAX_TAIL_BYTES]


def kill_leftovers(leader: int, *, mark: bytes | None = None) -> None:
    """All that is left of the session that this process leads, and who has ``mark`` among its variables."""
    for _ in range(KILL_ROUNDS):
        victims = _leftovers(leader, mark)
        for victim in victims:
            _kill(victim)
        if not victims:
            break


def _leftovers(leader: int, mark: bytes | None) -> list[Process]:
    """The processes of its session, also those whose parent has ended, and what they have started in other sessions."""
    rows = [row for pid in process_ids() if (row := read_row(pid)) is not None and row.state != "Z"]
    found = {row.process.pid: row.process for row in rows if row.session == leader or _has(row.process.pid, mark)}
    is_new = True
    while is_new:
        below = {row.process.pid: row.process for row in rows if row.parent in found}
        is_new = not below.keys() <= found.keys()
        found |= below
    return list(found.values())


def _has(pid: int, mark: bytes | None) -> bool:
    try:
        return mark is not None and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # somebody else's, or gone
        return False


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _kill(process: Process) -> None:
    if process.is_alive():
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
