"""Addresses of a page that work once, and ``page.json`` in a run directory: where the run's page is served while it runs.

Only its owner can read that file. The secret in it makes addresses, so `rollcall tunnel` can open the page from elsewhere."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rollcall.base.atomic import write_atomic

OPEN = "/open/"
PAGE_FILE = "page.json"


class Keys:
    """Keys of addresses. Another process that knows the secret can make one too."""

    def __init__(self, secret: str | None = None) -> None:
        self.secret = secret or secrets.token_urlsafe(32)
        self._used: set[str] = set()
        self._lock = threading.Lock()

    def new(self) -> str:
        nonce = secrets.token_urlsafe(9)
        return f"{nonce}.{_sign(self.secret, nonce)}"

    def use(self, key: str) -> bool:
        """Whether it is one of ours and unused until now."""
        nonce, _, mark = key.partition(".")
        if not hmac.compare_digest(mark.encode(), _sign(self.secret, nonce).encode()):
            return False
        with self._lock:
            fresh = nonce not in self._used
            self._used.add(nonce)
        return fresh


def _sign(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRecord:
    host: str  # it listens on the loopback there
    port: int
    secret: str

    def address(self, port: int | None = None) -> str:
        """An address that works once. ``port`` is that of a tunnel, if there is one."""
        return f"http://127.0.0.1:{port or self.port}{OPEN}{Keys(self.secret).new()}"

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / PAGE_FILE, json.dumps(asdict(self)), durable=False, private=True)


def parse_record(text: str) -> PageRecord | None:
    """None if it is not such a file."""
    try:
        return TypeAdapter(PageRecord).validate_json(text)
    except ValidationError:
        return None
