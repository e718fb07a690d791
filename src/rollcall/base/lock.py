"""A file that one process at a time holds locked. The holder may remove it, with the folder that it is in."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def take_lock(path: Path) -> IO[bytes] | None:
    """The locked file, which is held until it is closed; None if another process holds it."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed it between these two: then another process can lock a new one.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except (BlockingIOError, PermissionError):  # the second from some network file systems
            file.close()
            return None
        except FileNotFoundError:
            pass  # removed: look again
        except BaseException:
            file.close()
            raise
        file.close()
