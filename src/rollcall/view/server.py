"""The page's server: Starlette on the loopback interface. ``Api`` answers requests in JSON; ``Guard`` decides who gets an answer.

Only a browser that has opened an address from this server sees the page. An address works once (``/open/KEY``) and sets a cookie;
without the cookie, every answer is 401. A Host header that does not name this machine's loopback is refused, because another site could
point its name to our address (DNS rebinding) and read the answers. The browser loads scripts and data only from this server.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollcall.base.wait import warn
from rollcall.base.words import counted
from rollcall.nodes.http_server import http_server, listen
from rollcall.view.api import ADDRESSES, Api, ShownRuns, answering, as_json
from rollcall.view.page_process import OPEN, PAGE_FILE, Keys, PageRecord

HOST = "127.0.0.1"
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; font-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
# Not a redirect, because a browser that came from another page would not send the strict cookie with a redirect.
OPENED = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>Rollcall</title><link rel="icon" href="/page/icon.svg">'
PAGE = Path(__file__).with_name("page")


def make_app(places: ShownRuns, *, keys: Keys, on_open: Callable[[], None] = lambda: None) -> ASGIApp:
    api = Api(places)
    routes = [Route(f"/api/{name}", answering(name, getattr(api, name))) for name in ADDRESSES]
    routes += [
        Route("/", lambda request: FileResponse(PAGE / "index.html")),
        Mount("/page", StaticFiles(directory=PAGE)),
        Route("/plotly.js", _plotly),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=2)],
        exception_handlers={HTTPException: _refused},
    )
    return Guard(app, keys=keys, on_open=on_open)


def _refused(request: Request, error: Any) -> Response:
    return as_json({"error": "there is nothing at this address"}, status=error.status_code)


def _plotly(request: Request) -> Response:
    script = files("plotly") / "package_data" / "plotly.min.js"
    # The address contains no version, so browsers may cache the script only for some hours.
    return FileResponse(str(script), headers={"cache-control": "private, max-age=14400"})


class Guard:
    """Wraps the app and refuses requests without the cookie. Calls ``on_open`` each time an address has been used."""

    def __init__(self, app: ASGIApp, *, keys: Keys, on_open: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._keys = keys
        self._on_open = on_open
        self._session = secrets.token_urlsafe(32)
        # Cookies ignore ports. With the same cookie name, two servers would log each other out.
        self._cookie = f"rollcall-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        hosts = Headers(scope=scope).getlist("host")
        answer: Response | None
        if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0]):
            answer = _page(421, "This server answers only to 127.0.0.1 and localhost.")
        elif (answer := self._opened(scope)) is None and not self._is_known(Request(scope)):
            how = "Open this page with the newest address that Rollcall printed. Each address works once."
            answer = _page(401, how)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    own[name] = value
                own.setdefault("cache-control", "no-store")
                if answer is not None:
                    own["connection"] = "close"  # do not keep a connection to a refused client open
            await send(message)

        await (answer or self._app)(scope, receive, with_headers)

    def _opened(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if not path.startswith(OPEN) or not self._keys.use(path.removeprefix(OPEN)):
            return None
        answer = HTMLResponse(OPENED)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        self._on_open()
        return answer

    def _is_known(self, request: Request) -> bool:
        return hmac.compare_digest(request.cookies.get(self._cookie, "").encode(), self._session.encode())


def _page(status: int, text: str) -> Response:
    body = f'<!doctype html><meta charset="utf-8"><title>Rollcall</title><p>{text}</p>'
    return HTMLResponse(body, status_code=status)


class PageServer:
    """Serves the page. ``run`` returns when the process is interrupted or ``stop`` is called."""

    def __init__(self, places: ShownRuns, *, port: int = 0) -> None:
        self.keys = Keys()
        self._socket = listen(HOST, port)
        self.port: int = self._socket.getsockname()[1]
        self.on_open: Callable[[], None] = lambda: None
        self._server = http_server(make_app(places, keys=self.keys, on_open=lambda: self.on_open()))

    def new_address(self) -> str:
        return f"http://{HOST}:{self.port}{OPEN}{self.keys.new()}"

    def run(self) -> None:
        with suppress(OSError):  # if this is not allowed, keep the normal priority
            os.nice(10)  # a run on the same machine has priority
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True


def serve(shown: ShownRuns, *, port: int, open_browser: bool, tell: Callable[[str], None]) -> None:
    """Serve the page for a user at a terminal: print an address, and a new one whenever the last one has been used."""
    server = PageServer(shown, port=port)
    tell(f"showing {counted(len(shown.all()), 'run')}; stop with Ctrl-C")
    address = server.new_address()
    print(address, flush=True)
    server.on_open = lambda: tell(f"the page was opened; to open it in another browser: {server.new_address()}")
    if open_browser and not webbrowser.open(address):
        tell("no browser was found; open the address yourself")
    server.run()


def main(run_dir: Path) -> None:
    """Serve the page of a running run, as the child process of its controller (``page_process.py``)."""
    server = PageServer(ShownRuns([run_dir], is_one=True))
    record = PageRecord(host=socket.gethostname(), port=server.port, secret=server.keys.secret)

    def show_address() -> None:
        print(f"page           {record.address()}   (on {record.host}; works once)", flush=True)

    def write_record() -> None:
        while not run_dir.is_dir():  # the controller creates it
            time.sleep(0.5)
        try:
            record.write(run_dir)
        except OSError as error:
            why = f"{run_dir / PAGE_FILE} cannot be written ({error.strerror})"
            warn(f"{why}, so `rollcall tunnel` cannot find the page")

    def watch() -> None:
        sys.stdin.read()  # until the controller exits
        server.stop()

    server.on_open = show_address
    show_address()
    for task in (write_record, watch):
        threading.Thread(target=task, daemon=True).start()
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
