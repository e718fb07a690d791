"""Conversations with the endpoint, all at once, from a process of their own: as lean a client as Python allows.

`benchmarks.episodes --way endpoint` starts it. Each line on stdin is one round: ``{"host", "port", "key", "path", "episodes": [{"prompt",
"sampled", "observed"}]}``; the answer is a line with the number of tokens that were sampled. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


class Line:
    """A connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, path: str, key: str) -> None:
        self._reader, self._writer = reader, writer
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        )

    async def post(self, body: Any) -> Any:
        data = json.dumps(body).encode()
        self._writer.write(f"{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        answer = json.loads(await self._reader.readexactly(length))
        assert head.startswith(b"HTTP/1.1 200"), answer
        return answer

    def close(self) -> None:
        self._writer.close()


async def talk(line: Line, episode: dict[str, Any], *, seed: int) -> int:
    ids, count = list(episode["prompt"]), 0
    observed = [*episode["observed"], []]
    for turn, (num_sampled, answer) in enumerate(zip(episode["sampled"], observed, strict=True)):
        params = {"max_tokens": num_sampled, "temperature": 1.0, "seed": seed * 100 + turn}
        choice = (await line.post({"token_ids": ids, "sampling_params": params}))["choices"][0]
        count += len(choice["token_ids"])
        ids += [*choice["token_ids"], *answer]
    return count


async def play(round: dict[str, Any]) -> int:
    async def one(number: int, episode: dict[str, Any]) -> int:
        line = Line(
            *await asyncio.open_connection(round["host"], round["port"], limit=1 << 24),
            path=round["path"],
            key=round["key"],
        )
        try:
            return await talk(line, episode, seed=number)
        finally:
            line.close()

    return sum(await asyncio.gather(*(one(number, episode) for number, episode in enumerate(round["episodes"]))))


def main() -> None:
    for text in sys.stdin:
        print(asyncio.run(play(json.loads(text))), flush=True)


if __name__ == "__main__":
    main()
