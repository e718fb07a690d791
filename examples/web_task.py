"""A task in a real browser: order something in a small shop. Clicking and typing are tools, and pages are read as accessibility trees.

    pip install playwright          # and a Chromium; Debian: apt install chromium

Each episode has a browser of its own, in the environment's process, and that process serves the shop to it. A browser that dies fails its
episode; the next one gets a new browser.
"""

from __future__ import annotations

import html
import os
import random
import shutil
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from playwright.async_api import Browser, Page, Playwright, async_playwright

CHROMIUM = os.environ.get("ROLLCALL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
PRODUCTS = ["green tea", "black tea", "coffee", "cocoa", "honey", "sugar"]
NO_LIMIT_MS = 0  # environment.call_timeout_s is the limit


class Shop(ThreadingHTTPServer):
    """The pages, and what was ordered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.orders: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Pages(BaseHTTPRequestHandler):
    server: Shop

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        given = dict(urllib.parse.parse_qsl(address.query))
        product = html.escape(given.get("product", ""))
        if address.path == "/product":
            body = (
                f"<h1>{product}</h1><form action=/order><input type=hidden name=product value='{product}'>"
                "<label>Quantity <input name=quantity></label><button>Order</button></form><a href=/>Back</a>"
            )
        elif address.path == "/order":
            self.server.orders.append((given.get("product", ""), given.get("quantity", "")))
            body = f"<h1>Thank you</h1><p>You ordered {html.escape(given.get('quantity', ''))} of {product}.</p>"
        else:
            links = "".join(f"<li><a href='/product?product={name}'>{name}</a></li>" for name in PRODUCTS)
            body = f"<h1>Shop</h1><ul>{links}</ul>"
        page = f"<!doctype html><title>Shop</title>{body}".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class WebTask:
    """`environment: {type: class, path: "examples.web_task:WebTask"}` with `data: {train: "builtin:environment"}`"""

    def __init__(self) -> None:
        self._shop = Shop()
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._page: Page | None = None
        self._wanted = ("", "")

    async def reset(self, index: int = 0, **row: Any) -> str:
        chance = random.Random(index)  # the same order for all attempts of a group
        self._wanted = (chance.choice(PRODUCTS), str(chance.randint(2, 9)))
        self._shop.orders.clear()
        if self._browser is None or not self._browser.is_connected():
            self._playwright = self._playwright or await async_playwright().start()
            options = ["--no-sandbox"] if os.geteuid() == 0 else []
            self._browser = await self._playwright.chromium.launch(
                executable_path=CHROMIUM,
                args=[*options, "--disable-gpu", "--disable-dev-shm-usage"],
                timeout=NO_LIMIT_MS,
            )
        if self._page is not None and not self._page.is_closed():
            await self._page.context.close()
        self._page = await (await self._browser.new_context()).new_page()
        self._page.set_default_timeout(NO_LIMIT_MS)
        await self._page.goto(self._shop.url)
        product, quantity = self._wanted
        return f"Order {quantity} of {product}.\n\n{await self._read()}"

    async def click(self, name: str) -> str:
        """Click a link or a button.

        Args:
            name: Its name, as the page shows it.
        """
        page = self._open_page()
        found = page.get_by_role("link", name=name, exact=True).or_(page.get_by_role("button", name=name, exact=True))
        if await found.count() == 0:
            raise ValueError(f"the page has no link or button named {name!r}")
        await found.first.click()
        await page.wait_for_load_state()
        return await self._read()

    async def type(self, field: str, text: str) -> str:
        """Type into a field, in place of what it holds.

        Args:
            field: The name of the field, as the page shows it.
            text: What to type.
        """
        found = self._open_page().get_by_role("textbox", name=field, exact=True)
        if await found.count() == 0:
            raise ValueError(f"the page has no field named {field!r}")
        await found.first.fill(text)
        return await self._read()

    def get_reward(self) -> float:
        """1 for exactly the order that was asked for."""
        if self._browser is None or not self._browser.is_connected():
            raise RuntimeError("the browser died")  # tools report this to the model; here it fails the episode
        return float(self._shop.orders == [self._wanted])

    def _open_page(self) -> Page:
        assert self._page is not None
        return self._page

    async def _read(self) -> str:
        return await self._open_page().locator("body").aria_snapshot()
