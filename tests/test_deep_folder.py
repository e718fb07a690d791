"""A reward's private folder is removed whatever hostile code has made of it."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from rollcall.reward import confine

DEPTH = 3000  # levels; a path to the bottom is longer than the kernel takes


def make_deep(folder: Path) -> None:
    """Folders in each other, with a file and a link out on the way; the last one is closed to its owner."""
    folder.mkdir()
    at = os.open(folder, os.O_RDONLY)
    for level in range(DEPTH):
        name = f"a-folder-of-level-{level}"
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        if level % 1000 == 0:
            os.symlink(folder.parent / "kept", "link", dir_fd=at)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.close(at)
        at = below
    os.fchmod(at, 0)
    os.close(at)


@pytest.mark.parametrize("name", ["plain", "deep"])
def test_a_folder_is_removed_however_deep_and_links_are_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    if name == "deep":
        make_deep(tmp_path / name)
    else:
        (tmp_path / name / "inner").mkdir(parents=True)
    confine.remove_folder(str(tmp_path / name))
    assert not (tmp_path / name).exists() and (tmp_path / "kept" / "file").exists()


def test_what_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(confine.shutil, "rmtree", lambda folder, ignore_errors: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **how: None)
    monkeypatch.setattr(logging.getLogger("rollcall"), "propagate", True)
    confine.remove_folder(str(tmp_path))
    assert f"{tmp_path}, a reward's private folder, cannot be removed" in caplog.text
