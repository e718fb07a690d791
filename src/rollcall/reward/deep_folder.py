"""Removes a folder however deep hostile code has made it.

Walking down such a folder takes a call and an open file for each level, and a path to its bottom is longer than the kernel
takes. So nothing is walked: each folder inside the top one is emptied by moving the folders in it up beside it, until none
is left. Names are looked up in folders that are held open and links are never followed, so a process that still runs there
cannot lead the removal elsewhere.
"""

from __future__ import annotations

import os
import stat
import uuid

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_deep(folder: str) -> None:
    """OSError if something of it stays."""
    top = os.open(folder, _FOLDER)
    try:
        while names := os.listdir(top):
            for name in names:
                if _is_folder(name, top):
                    _lift(name, top)
                else:
                    os.unlink(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _lift(name: str, top: int) -> None:
    """Remove a folder in ``top``, after its own folders have become folders in ``top``."""
    _open_up(name, top)
    inner = os.open(name, _FOLDER, dir_fd=top)
    try:
        for below in os.listdir(inner):
            if _is_folder(below, inner):
                _open_up(below, inner)  # a folder that cannot be written cannot be moved
                os.rename(below, uuid.uuid4().hex, src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _open_up(name: str, parent: int) -> None:
    """Let this user list and change a folder of theirs."""
    if not hasattr(os, "O_PATH"):  # macOS
        os.chmod(name, 0o700, dir_fd=parent)
        return
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
