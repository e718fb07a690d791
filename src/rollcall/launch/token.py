"""The token of a launch whose nodes share no folder: made once, kept beside the record, readable only by its owner."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from rollcall.config.yaml import read_small
from rollcall.durable.atomic import write_atomic
from rollcall.launch.errors import LaunchError
from rollcall.redact import remember

FILE = "token"
_TOKEN = re.compile("[0-9a-f]{64}")  # it is a word of shell on the hosts


def launch_token(folder: Path) -> str:
    path = folder / FILE
    if not path.exists():
        write_atomic(path, secrets.token_hex(32), private=True)
    token = read_small(path, most=1024).decode(errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise LaunchError(
            f"{path} holds no token of a launch; end the launch with `rollcall launch down {folder.name}`"
        )
    remember([token])
    return token
