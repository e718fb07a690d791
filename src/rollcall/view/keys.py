"""Addresses of a page that work once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading

OPEN = "/open/"


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
