"""A PATH with a test's own programs and those of every shell: what else this machine has cannot be found on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

BASICS = (
    "awk base64 basename bash cat chmod cp cut date dirname env find flock grep head hostname id ln ls mkdir mkfifo mktemp mv "
    "readlink rm rmdir sed seq setsid sh sleep sort stat tail tar tee touch tr true uname wc yes"
)


def own_path(folder: Path) -> str:
    """``folder``, which gets links to the basic programs beside what is in it."""
    for name in BASICS.split():
        found = shutil.which(name, path=os.defpath)
        if found is not None and not (folder / name).exists():
            (folder / name).symlink_to(found)
    return str(folder)
