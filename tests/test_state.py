"""What a node remembers of its clusters: one command at a time, and nothing left of a cluster that is down."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from rollcall.base.errors import ClusterError
from rollcall.nodes import state as module
from rollcall.nodes.state import STATE_DIR, sole_owner, state_dir


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_cluster_that_is_down_leaves_neither_lock_nor_folder(root: Path) -> None:
    with sole_owner("one"):
        assert (root / "one/lock").exists()
    assert not root.exists()


def test_a_cluster_that_is_up_keeps_its_lock(root: Path) -> None:
    with sole_owner("one"):
        (state_dir("one") / "node.json").write_text("{}")
    assert sorted(path.name for path in (root / "one").iterdir()) == ["lock", "node.json"]


def test_another_cluster_of_this_node_stays(root: Path) -> None:
    (state_dir("other") / "node.json").write_text("{}")
    with sole_owner("one"):
        pass
    assert [path.name for path in root.iterdir()] == ["other"]


def test_a_second_command_waits_for_the_first(root: Path) -> None:
    inside = threading.Semaphore(0)
    most = []

    def own() -> None:
        with sole_owner("one"):
            inside.release()
            most.append(inside._value)
            inside.acquire()

    commands = [threading.Thread(target=own) for _ in range(4)]
    for command in commands:
        command.start()
    for command in commands:
        command.join()
    assert most == [1, 1, 1, 1] and not root.exists()


def test_a_lock_that_was_removed_is_not_taken_for_the_one_that_is_there(root: Path) -> None:
    path = state_dir("one") / "lock"
    with path.open("w") as removed:
        fcntl.flock(removed, fcntl.LOCK_EX)
        path.unlink()
        with sole_owner("one"):
            assert path.exists()


def test_a_command_that_never_ends_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OWNER_S", 0.0)
    said = "another `rollcall node` or `rollcall down` of cluster 'one'"
    with sole_owner("one"), pytest.raises(ClusterError, match=said), sole_owner("one"):
        pass


def test_a_folder_that_goes_away_while_it_is_looked_for_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, tries = Path.mkdir, []

    def gone_once(path: Path, *arguments: Any, **options: Any) -> None:
        tries.append(path)
        if len(tries) == 1:
            raise FileExistsError(
                path
            )  # as pathlib does when the folder is there at its first look and not at its second
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", gone_once)
    assert state_dir("mine") == root / "mine"
