"""Serves the page of a running run (`trainer.page`) in a separate process, so that it never disturbs the controller.

The child process prints an address, and a new one whenever the last one has been used; the controller shows them. The child exits when
its stdin closes, which also happens when the controller dies. If the child fails, the run continues.

An address works only once. ``page.json`` in the run directory says where the page is served. It contains a secret, from which `rollcall
tunnel` creates addresses to open the page from other machines. Only its owner can read the file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rollcall.base.atomic import write_atomic
from rollcall.base.redact import is_secret
from rollcall.base.wait import warn
from rollcall.base.words import are

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
        """Use up a key. Returns whether the key is valid and had not been used before."""
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
    host: str  # the server listens on this host's loopback interface
    port: int
    secret: str

    def address(self, port: int | None = None) -> str:
        """Return an address that works once. ``port`` is the tunnel's port, if there is a tunnel."""
        return f"http://127.0.0.1:{port or self.port}{OPEN}{Keys(self.secret).new()}"

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / PAGE_FILE, json.dumps(asdict(self)), durable=False, private=True)


def parse_record(text: str) -> PageRecord | None:
    """Parse the contents of ``page.json``. Returns None if they are not valid."""
    try:
        return TypeAdapter(PageRecord).validate_json(text)
    except ValidationError:
        return None


def refuse_without_packages() -> None:
    """Raise an error if the packages of the optional extra are not installed."""
    missing = [name for name in ("starlette", "uvicorn", "plotly") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the page needs {', '.join(missing)}, which {are(len(missing))} not installed; run: pip install 'rollcall-rl[view]'"
        )


@contextmanager
def serving_page(run_dir: Path, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of this run directory while the block runs."""
    refuse_without_packages()
    record, is_over = run_dir / PAGE_FILE, threading.Event()
    # The child does not need any secrets, so leave them out of its environment, which can be read in /proc. Start it in its own session,
    # so that it does not receive Ctrl-C.
    env = {name: value for name, value in os.environ.items() if not is_secret(name)}
    child = subprocess.Popen(
        [sys.executable, "-m", "rollcall.view.server", str(run_dir)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    lines = child.stdout

    def listen() -> None:
        for line in lines:
            tell(line.rstrip())
        if child.wait() and not is_over.is_set():
            record.unlink(missing_ok=True)  # nothing is listening on its port any longer
            what = f"the process that serves the page of {run_dir}"
            warn(f"{what} exited with status {child.returncode}; the run continues without it")

    threading.Thread(target=listen, name="page", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        child.stdin.close()
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        record.unlink(missing_ok=True)
