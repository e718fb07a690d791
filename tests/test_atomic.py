"""Writes that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollcall.base.atomic import create_atomic, fsync_tree, replacing, staging, swap_in, write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", "one")
    write_atomic(tmp_path / "a.json", b"two", durable=False)
    assert (tmp_path / "a.json").read_text() == "two"
    assert names(tmp_path) == ["a.json"]


def test_a_write_that_fails_half_way_keeps_the_old_content_and_leaves_nothing(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", "old")
    with pytest.raises(OSError, match="disk"), replacing(tmp_path / "a.json") as file:
        file.write(b"ne")
        raise OSError("the disk")
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_only_the_owner_reads_a_private_file_and_the_umask_decides_for_another(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "token", "secret", private=True)
        write_atomic(tmp_path / "plain", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "plain").stat().st_mode & 0o777 == 0o644


def test_a_file_is_created_once(tmp_path: Path) -> None:
    assert create_atomic(tmp_path / "lease", b"mine")
    assert not create_atomic(tmp_path / "lease", b"yours")
    assert (tmp_path / "lease").read_bytes() == b"mine"
    assert names(tmp_path) == ["lease"]


def test_a_folder_takes_the_place_of_an_older_one_when_it_is_finished(tmp_path: Path) -> None:
    final = tmp_path / "model"
    for text in ("old", "new"):
        with staging(final) as tmp:
            (tmp / "weights").write_text(text)
            fsync_tree(tmp)
            swap_in(tmp, final)
    with pytest.raises(KeyError), staging(final) as tmp:
        (tmp / "weights").write_text("half")
        raise KeyError
    assert (final / "weights").read_text() == "new"
    assert names(tmp_path) == ["model"]
