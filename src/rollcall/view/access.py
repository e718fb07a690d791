"""Who may see the page: a browser that was opened with an address from this server, and nobody else.

An address works once (``/open/KEY``). It sets a cookie, and without that cookie every answer is 401. A name in the Host header
that is not this machine's loopback is refused: a page of someone else could otherwise give its own name our address (DNS
rebinding) and read the answers. Only reading methods are answered, and every answer carries a strict policy: the browser runs no
script and loads nothing but from this server.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollcall.view.address import OPEN, Keys

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
# Not a redirect: where the address was opened from another page, the browser would not send a strict cookie along.
OPENED = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>Rollcall</title><link rel="icon" href="/page/icon.svg">'


class Guard:
    """Around the app. ``on_open`` is called after an address was used."""

    def __init__(self, app: ASGIApp, *, keys: Keys, on_open: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._keys = keys
        self._on_open = on_open
        self._session = secrets.token_urlsafe(32)
        # Cookies do not know ports: each server has its own name, or two of them would log each other out.
        self._cookie = f"rollcall-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers) or self._opened(scope)
        if answer is None and not self._is_known(headers):
            answer = _page(
                401, "This page needs the address that Rollcall printed. Each address works once: look for the newest."
            )

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    own[name] = value
                own.setdefault("cache-control", "no-store")
                if answer is not None:
                    own["connection"] = "close"  # a stranger keeps none
            await send(message)

        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0]):
            return _page(421, "This server answers only to 127.0.0.1 and localhost.")
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", status_code=405)
        return None

    def _opened(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if not path.startswith(OPEN) or not self._keys.use(path.removeprefix(OPEN)):
            return None
        answer = HTMLResponse(OPENED)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        self._on_open()
        return answer

    def _is_known(self, headers: Headers) -> bool:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        own = cookies.get(self._cookie)
        return own is not None and hmac.compare_digest(own.value.encode(), self._session.encode())


def _page(status: int, text: str) -> Response:
    body = f'<!doctype html><meta charset="utf-8"><title>Rollcall</title><p>{text}</p>'
    return HTMLResponse(body, status_code=status)
