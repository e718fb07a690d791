"""Restricts which files this process may open (landlock, Linux 5.13 and later). No code in the process can undo it.

It needs no privileges and no library. ``restrict`` applies to the calling thread and to threads and processes that it starts later,
so call it before any thread starts. Files that are already open stay open. The numbers of the system calls and of the access rights
come from the kernel and are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

from rollcall.reward.seccomp import no_new_privileges

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FIRST_VERSION = (1 << 13) - 1  # the rights in version 1: the ones above, and creating and removing files of every kind
# version -> the right that it added: linking across folders, truncating, device ioctls
_LATER = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _LATER[3] | _LATER[5]


def version() -> int:
    """Return the kernel's landlock version, or 0 if landlock is missing or disabled."""
    if sys.platform != "linux":
        return 0
    return max(0, _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION)))


def why_missing() -> str:
    """Return why this machine has no landlock, or ""."""
    if sys.platform != "linux":
        return f"{sys.platform} has no landlock"
    return "" if version() else "the kernel has no landlock"


def restrict(*, readable: Iterable[str], writable: Iterable[str]) -> str:
    """Allow this process to open only these files and folders. Return why this failed, or ""."""
    if missing := why_missing():
        return missing
    known = version()
    every = _FIRST_VERSION | sum(right for since, right in _LATER.items() if since <= known)
    handled = struct.pack("<Q", every)
    ruleset = _call(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), ctypes.c_uint32(0))
    if ruleset < 0:
        return f"the kernel refused landlock: {os.strerror(ctypes.get_errno())}"
    try:
        for paths, rights in ((readable, _READ_FILE | _READ_DIR), (writable, every & ~_EXECUTE)):
            for path in paths:
                _allow(ruleset, path, rights)
        if no_new_privileges() or _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
            return f"the kernel refused landlock: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    return ""


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow access to a path. Skip a path that does not exist."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FOR_FILES
        rule = struct.pack("<Qi", rights, opened)
        if _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
