"""Where a page keeps what it computed: in the user's cache folder, never in a run directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rollcall.wait import warn


def index_path(run_dir: Path) -> Path | None:
    """The file for the index of this run directory; None: the cache folder cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "rollcall" / "view"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.blake2b(os.fsencode(run_dir), digest_size=12).hexdigest()
        path = folder / f"{name}.sqlite"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        return path
    except OSError as error:
        warn(
            f"{folder} cannot be written ({error.strerror}); the index of {run_dir} is kept in memory and made again next time"
        )
        return None
