"""Runs a user's program as a separate process with limits. When the program ends or this process dies, everything in the program's
session is killed.

This process is either the run itself or a host on a different node (host.py). The shell that starts the program has the read end of a
pipe. When this process dies for any reason, the pipe closes, and a watcher in the shell kills the whole process group.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rollcall.base.process_table import Process, allow_files, environment_of, living, session_of
from rollcall.config.environments import AgentEnvironment
from rollcall.environments.protocol import Ended, EnvironmentFailed, Programs
from rollcall.nodes.processes import signal_processes
from rollcall.process.here import exited, how_it_ended
from rollcall.reward.confine import environment, make_folder, refuse_unset, remove_folder, sweep_folders

MAX_TAIL_BYTES = 1 << 16
LONGEST_VARIABLE = 120_000  # in bytes; Linux limits a variable to 128 KiB
KEY = "OPENAI_API_KEY"  # unique per episode, so it identifies processes that left the program's session
_LIMITED = """ulimit -c 0
ulimit -d {kilobytes} || exit 125
exec 3<&0 </dev/null
{{ read -r _; kill -KILL 0; }} <&3 >/dev/null 2>&1 &
exec 3<&-
{command}
"""


def variables_of(env: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for a process that plays episodes: the usual ones and those named in `environment.env`."""
    refuse_unset(env, key="environment.env")
    return environment(env, folder=tempfile.gettempdir())


class ProgramsHere(Programs):
    """Runs programs as children of this process."""

    tools: dict[str, list[dict[str, Any]]] = {}  # a program sends its own tools with its requests

    def __init__(self, section: AgentEnvironment) -> None:
        self._section, self._variables = section, variables_of(section.env)
        # Each program needs pipes, its episode's connection, and a few more during startup.
        allow_files(8 * section.max_running)
        sweep_folders()  # left by killed processes

    async def find_host(self) -> ProgramsHere:
        return self

    async def run(self, variables: Mapping[str, str], *, stop: asyncio.Event) -> Ended:
        for name, value in variables.items():
            if (size := len(value.encode(errors="surrogateescape"))) > LONGEST_VARIABLE:
                raise EnvironmentFailed(
                    f"{name} has {size:,} bytes, but a variable can hold only {LONGEST_VARIABLE:,}; remove long columns from the data"
                )
        try:
            folder = make_folder()
        except OSError as error:
            raise EnvironmentFailed(f"the program could not get a folder for temporary files: {error}") from None
        try:
            return await self._run_in(folder, variables, stop)
        finally:
            await _in_thread(remove_folder, folder)  # it may contain many files

    async def _run_in(self, folder: str, variables: Mapping[str, str], stop: asyncio.Event) -> Ended:
        variables = past_proxies({**self._variables, "TMPDIR": folder, **variables})
        try:
            process = await _start(self._section, variables)
        except OSError as error:
            raise EnvironmentFailed(f"the program could not be started: {error}") from None
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        tails = {process.stdout: bytearray(), process.stderr: bytearray()}
        readers = [asyncio.create_task(_keep_tail(stream, tail)) for stream, tail in tails.items()]
        ending, stopping = asyncio.create_task(exited(process)), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            stopping.cancel()
            await _kill(process, mark=(KEY, variables[KEY]))
            process.stdin.close()
            await asyncio.wait(readers, timeout=2.0)  # its output may still be arriving
            for reader in readers:
                reader.cancel()
        status = process.returncode
        assert status is not None
        stdout, stderr = (tail.decode(errors="replace") for tail in tails.values())
        return Ended(how=how_it_ended(status) if status else "", stdout=stdout, stderr=stderr)


async def _start(section: AgentEnvironment, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    kilobytes = section.memory_mb << 10 if most == resource.RLIM_INFINITY else min(section.memory_mb << 10, most >> 10)
    script = _LIMITED.format(kilobytes=kilobytes, command=section.run)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", script, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(variables), start_new_session=True
    )


def past_proxies(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with the endpoint's host excluded from proxies. A key must not go through a proxy, and a proxy might be
    unable to reach this node anyway."""
    host = urlsplit(variables.get("OPENAI_BASE_URL", "")).hostname
    found = {name: ",".join(filter(None, [variables.get(name), host])) for name in ("NO_PROXY", "no_proxy")}
    return {**variables, **{name: value for name, value in found.items() if value}}


async def _in_thread(work: Callable[..., None], *args: Any) -> None:
    """Run ``work`` in a thread until it finishes, even if the caller gives up. The thread starts at once, even while the loop is
    closing."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work, *args))


async def _kill(process: asyncio.subprocess.Process, *, mark: tuple[str, str]) -> None:
    """Kill what is left of the program."""
    if process.returncode is not None:
        with suppress(ProcessLookupError, PermissionError):  # owned by another user, for example via `sudo`
            # Its watcher is still in the group, so no other group has this ID.
            os.killpg(process.pid, signal.SIGKILL)
    await _in_thread(kill_leftovers, process.pid, mark)
    await exited(process)


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while data := await stream.read(MAX_TAIL_BYTES):
        tail += data
        del tail[:-MAX_TAIL_BYTES]


def kill_leftovers(leader: int, mark: tuple[str, str]) -> None:
    """Kill everything left in this leader's session, and all processes whose environment contains this variable with this value."""
    name, value = mark
    for _ in range(3):  # they may start new processes while they are being killed
        parents = {process.pid: process.info["ppid"] for process in living()}
        # These include processes whose parent has exited. What they started may be in other sessions.
        found = {pid for pid in parents if session_of(pid) == leader or (environment_of(pid) or {}).get(name) == value}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        # The leader comes first, because a shell that outlives its command would exit by itself with the command's status.
        processes = map(Process.of, sorted(found, key=lambda pid: (pid != leader, pid)))
        if not (victims := [process for process in processes if process is not None]):
            break
        signal_processes(victims, signal.SIGKILL)
