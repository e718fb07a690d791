"""Requests to an ASGI app without a server and a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Keeps cookies as a browser does."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.cookies: dict[str, str] = {}

    def get(
        self, path: str, /, *, method: str = "GET", headers: Mapping[str, str] | None = None, **query: Any
    ) -> Answer:
        own = {"host": "127.0.0.1:1234", **(headers or {})}
        if self.cookies:
            own.setdefault("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        answer = asyncio.run(self._ask(path, urlencode(query, doseq=True), method=method, headers=own))
        if "set-cookie" in answer.headers:
            name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer

    async def _ask(self, path: str, query: str, *, method: str, headers: Mapping[str, str]) -> Answer:
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": query.encode(), "headers": raw, "server": ("127.0.0.1", 1234),
            "client": ("127.0.0.1", 50000), "root_path": "",
        }  # fmt: skip
        said: list[Any] = []
        asked = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return asked.pop() if asked else await asyncio.Future()  # it waits for the answer

        async def send(message: Any) -> None:
            said.append(message)

        await self.app(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in said[0]["headers"]}
        return Answer(status=said[0]["status"], headers=found, body=b"".join(one.get("body", b"") for one in said[1:]))
