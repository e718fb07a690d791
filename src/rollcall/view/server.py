"""The server of the page: Starlette on the loopback interface.

``Api`` answers questions in JSON, ``Guard`` decides who may ask. Charts are drawn by Plotly's own script, which is served from the
installed ``plotly`` package.
"""

from __future__ import annotations

import gzip
import os
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rollcall.net.http_door import http_server, listen
from rollcall.view.access import Guard
from rollcall.view.address import OPEN, Keys
from rollcall.view.api import ADDRESSES, Api, answering, as_json
from rollcall.view.shown_runs import ShownRuns
from rollcall.words import counted

HOST = "127.0.0.1"
KINDS = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}  # fmt: skip


def make_app(places: ShownRuns, *, keys: Keys, on_open: Callable[[], None] = lambda: None) -> ASGIApp:
    api = Api(places)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        api.close()

    routes = [Route(f"/api/{name}", answering(getattr(api, name))) for name in ADDRESSES]
    routes += [Route("/", _page_file), Route("/page/{name}", _page_file), Route("/plotly.js", _plotly)]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=2)],
        exception_handlers={HTTPException: _refused},
    )
    return Guard(app, keys=keys, on_open=on_open)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_json({"error": "there is nothing at this address"}, status=error.status_code)


def _page_file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    kind = KINDS.get(name.rpartition(".")[2])
    found = next((one for one in files("rollcall.view.page").iterdir() if one.name == name), None)
    if kind is None or found is None:
        raise HTTPException(404)
    return Response(found.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


@lru_cache(maxsize=1)
def _plotly_script() -> bytes:
    """Compressed once: it is the largest part of the page."""
    return gzip.compress((files("plotly") / "package_data" / "plotly.min.js").read_bytes(), 6)


def _plotly(request: Request) -> Response:
    # Its address has no version in it, so a browser keeps it for a session of work and not for longer.
    headers = {"content-encoding": "gzip", "cache-control": "private, max-age=14400"}
    return Response(_plotly_script(), media_type=KINDS["js"], headers=headers)


class PageServer:
    """``run`` serves until the process is interrupted, or ``stop`` is called."""

    def __init__(self, places: ShownRuns, *, port: int = 0, keys: Keys | None = None) -> None:
        self.keys = keys or Keys()
        self._socket = listen(HOST, port)
        self.port: int = self._socket.getsockname()[1]
        self.on_open: Callable[[], None] = lambda: None
        app = make_app(places, keys=self.keys, on_open=lambda: self.on_open())
        self._server = http_server(app, lifespan="on")

    def new_address(self) -> str:
        return f"http://{HOST}:{self.port}{OPEN}{self.keys.new()}"

    def run(self) -> None:
        with suppress(OSError):  # not allowed here; the page then takes part as any other process
            os.nice(10)  # a run on the same machine goes first
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True


def serve(shown: ShownRuns, *, port: int, open_browser: bool, tell: Callable[[str], None]) -> None:
    """For a person at a terminal: prints an address, and another one when it was used."""
    server = PageServer(shown, port=port)
    tell(f"showing {counted(len(shown.all()), 'run')}; Ctrl-C ends the page")
    address = server.new_address()
    print(address, flush=True)
    server.on_open = lambda: tell(f"opened; for another browser: {server.new_address()}")
    if open_browser and not webbrowser.open(address):
        tell("no browser was found; open the address yourself")
    server.run()
