"""Answers the calls of a ``Worker`` (process/worker.py) in an event loop. Calls run concurrently and are answered as they finish.

The environment host (host.py) and the verifiers server (packages/verifiers.py) use this module, so it imports only the standard library.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from rollcall.nodes.framing import DONE, HEAD, JSON, LENGTH, PART, RAISED, frame
from rollcall.process.child import raised_body

BEAT_S = 5.0  # a longer call sends an empty part at this interval to show that its process is alive


async def answer_calls(
    connection: socket.socket,
    do: Callable[[str, list[Any]], Awaitable[Any]],
    *,
    dumps: Callable[[Any], bytes] = JSON.dumps,
) -> None:
    """Call ``do`` with each method and its arguments until the caller hangs up. Then cancel the calls that are still running."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(sock=connection)
    running: set[asyncio.Task[None]] = set()

    def say(number: int, kind: int, body: bytes) -> None:
        writer.write(frame(HEAD.pack(number, kind) + body))

    async def answer(number: int, method: str, arguments: list[Any]) -> None:
        def beat() -> None:
            nonlocal timer
            say(number, PART, b"null")
            timer = loop.call_later(BEAT_S, beat)

        timer = loop.call_later(BEAT_S, beat)
        try:
            kind, body = DONE, dumps(await do(method, arguments))
        except Exception as error:  # noqa: BLE001 - the caller decides how to handle it
            kind, body = RAISED, raised_body(error)
        finally:
            timer.cancel()
        say(number, kind, body)

    try:
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            message = await reader.readexactly(size)
            number, _ = HEAD.unpack_from(message)
            task = asyncio.create_task(answer(number, *json.loads(message[HEAD.size :])))
            running.add(task)
            task.add_done_callback(running.discard)
    except (OSError, EOFError):
        pass  # the caller hung up, or its node died
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        writer.close()
