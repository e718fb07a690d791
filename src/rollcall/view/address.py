"""Creates one-time addresses for a page, and ``page.json`` in a run directory, which says where the run's page is served.

Only its owner can read that file. The secret in it creates addresses, so `rollcall tunnel` can open the page from elsewhere."""

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
    """Creates and checks the keys in addresses. Any process that knows the secret can create keys."""

    def __init__(self, secret: str | None = None) -> None:
        self.secret = secret or secrets.token_urlsafe(32)
        self._used: set[str] = set()
        self._lock = threading.Lock()

    def new(self) -> str:
        nonce = secrets.token_urlsafe(9)
        return f"{nonce}.{_sign(self.secret, nonce)}"

    def use(self, key: str) -> bool:
        """Use up a key; return whether it was ours and not used before."""
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
    host: str  # the server listens on this host's loopback
    port: int
    secret: str

    def address(self, port: int | None = None) -> str:
        """Return an address that works once. ``port`` is the tunnel's port, if there is a tunnel."""
        return f"http://127.0.0.1:{port or self.port}{OPEN}{Keys(self.secret).new()}"

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / PAGE_FILE, json.dumps(asdict(self)), durable=False, private=True)


def parse_record(text: str) -> PageRecord | None:
    """Parse the contents of ``page.json``; return None if they are not valid."""
    try:
        return TypeAdapter(PageRecord).validate_json(text)
    except ValidationError:
        return None
