"""Addresses of a page that work once, and where a run's page is served: ``page.json`` in its directory, while the run goes on.

The file is readable by its owner only. The secret in it makes addresses, so a process that may read it can open the page, as
`rollcall tunnel` does."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from rollcall.durable.atomic import write_atomic

OPEN = "/open/"
PAGE_FILE = "page.json"


class Keys:
    """They are made from a secret, so another process that knows it can make one too."""

    def __init__(self, secret: str | None = None) -> None:
        self.secret = secret or secrets.token_urlsafe(32)
        self._used: set[str] = set()
        self._lock = threading.Lock()

    def new(self) -> str:
        nonce = secrets.token_urlsafe(9)
        return f"{nonce}.{_sign(self.secret, nonce)}"

    def use(self, key: str) -> bool:
        """Whether it is one of ours that nobody has used."""
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
    host: str  # that serves it, on its loopback
    port: int
    secret: str
    pid: int

    def address(self, port: int | None = None) -> str:
        """One that works once. ``port``: of a tunnel to it."""
        return f"http://127.0.0.1:{port or self.port}{OPEN}{Keys(self.secret).new()}"

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / PAGE_FILE, json.dumps(asdict(self)), durable=False, private=True)


def parse_record(text: str) -> PageRecord | None:
    """None: it is not such a file."""
    try:
        found = json.loads(text)
        record = PageRecord(
            host=str(found["host"]), port=int(found["port"]), secret=str(found["secret"]), pid=int(found["pid"])
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if 0 < record.port < 65536 and record.secret else None
