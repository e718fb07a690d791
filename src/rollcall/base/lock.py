"""A lock file that one process at a time can hold. The holder may remove it along with its folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def take_lock(path: Path) -> IO[bytes] | None:
    """Lock the file and return it; closing it releases the lock. Returns None if another process holds the lock."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between open and lock; another process could then lock a new one.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except (BlockingIOError, PermissionError):  # PermissionError: on some network file systems
            file.close()
            return None
        except FileNotFoundError:
            pass  # removed: look again
        except BaseException:
            file.close()
            raise
        file.close()
