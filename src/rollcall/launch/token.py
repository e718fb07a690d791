"""The token of a launch whose nodes share no folder: made once, kept beside the record, readable only by its owner."""

from __future__ import annotations

import secrets
from pathlib import Path

from rollcall.durable.atomic import write_atomic
from rollcall.redact import remember

FILE = "token"


def launch_token(folder: Path) -> str:
    path = folder / FILE
    if not path.exists():
        write_atomic(path, secrets.token_hex(32), private=True)
    token = path.read_text().strip()
    remember([token])
    return token
