"""A checkpoint that is written while the run goes on: waited for where it is needed, and never lost in silence."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollcall.base.errors import CheckpointError
from rollcall.base.wait import speaking
from rollcall.loop.record import Saves


class Disk:
    """A save that takes until it is told to end."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None

    def save(self) -> Path:
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return Path("step-000004")


def nobody(step: int, path: Path) -> None:
    raise AssertionError("no checkpoint is committed here")


def test_a_save_is_begun_and_told_of_once_when_it_is_committed() -> None:
    told: list[tuple[int, Path]] = []
    saves, disk = Saves(lambda *saved: told.append(saved)), Disk()
    saves.poll()
    saves.settle()
    saves.begin(4, disk.save)
    saves.poll()
    assert told == [], "it is still being written"
    disk.go.set()
    for _ in range(2):
        saves.settle()
        saves.poll()
        assert told == [(4, Path("step-000004"))]


def test_who_needs_a_checkpoint_waits_for_it_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.loop.record.FIRST_WORD_S", 0.0)
    saves, disk, said = Saves(lambda step, path: None), Disk(), []

    def voice(text: str) -> None:
        said.append(text)
        disk.go.set()

    saves.begin(4, disk.save)
    with speaking(voice):
        saves.settle()
    assert said[0].startswith("waiting for the checkpoint of step 4, which is still being written")


def test_a_failure_is_told_to_all_who_ask_for_one_of_them_may_have_left() -> None:
    saves, disk = Saves(nobody), Disk()
    disk.error = OSError("No space left on device")
    saves.begin(4, disk.save)
    disk.go.set()
    for ask in (saves.settle, saves.poll, saves.settle):
        with pytest.raises(OSError, match="No space left"):
            ask()


def test_after_a_failure_was_told_the_last_save_of_a_stopped_run_may_begin() -> None:
    told: list[tuple[int, Path]] = []
    saves, broken, whole = Saves(lambda *saved: told.append(saved)), Disk(), Disk()
    broken.error = OSError("No space left on device")
    saves.begin(4, broken.save)
    assert not saves.forget_failed(), "it is still being written"
    broken.go.set()
    with pytest.raises(OSError, match="No space left"):
        saves.settle()
    assert saves.forget_failed()
    saves.begin(5, whole.save)
    whole.go.set()
    saves.settle()
    assert [step for step, _ in told] == [5]


def test_a_save_that_never_ends_is_not_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.loop.record.LONGEST_S", 0.0)
    saves, disk = Saves(nobody), Disk()
    saves.begin(4, disk.save)
    try:
        with pytest.raises(CheckpointError, match="the checkpoint of step 4 has still not been written after"):
            saves.settle()
    finally:
        disk.go.set()
