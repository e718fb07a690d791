"""A real HTTP server for rewards that a service gives: it answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """What a judge reads."""
        return self.body["messages"][0]["content"]


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # what Content-Length says, if not the truth


@dataclass(slots=True)
class Service:
    reply: Callable[[Asked], Reply]
    port: int = 0
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


def said(text: str, *, finish: str = "stop") -> Reply:
    """A chat completion."""
    return Reply(json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}).encode())


def scored(score: float) -> Reply:
    return said(json.dumps({"reason": "as the rubric says", "score": score}))


@contextmanager
def serving(reply: Callable[[Asked], Reply], *, port: int = 0) -> Iterator[Service]:
    service = Service(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = Asked(path=self.path, headers=dict(self.headers), body=body)
            service.asked.append(asked)
            reply = service.reply(asked)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
            self.end_headers()
            self.wfile.write(reply.body)
            self.close_connection = reply.length is not None or self.close_connection

        def log_message(self, *_: object) -> None:
            return None

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:  # a client that left early
            return None

    server = Server(("127.0.0.1", port), Handler)
    service.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
