"""Disks that are full."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from pathlib import Path

import pytest


def small_disk(path: Path, *, size: str) -> Path:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {made.stderr.strip()}")
    return path


def unmount(path: Path) -> None:
    for _ in range(20):
        gc.collect()  # what torch had open when a write failed is closed with the error
        if subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} stays mounted")
