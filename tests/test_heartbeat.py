"""A counter that moves shows that its owner lives, on the clock of the one who looks."""

from __future__ import annotations

import pytest

from rollcall.base import lease
from rollcall.base.lease import Heartbeat


def test_a_counter_that_moves_is_told_from_a_new_owner_and_from_one_that_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(lease.time, "monotonic", lambda: now)
    beat = Heartbeat()
    beat.see("a", 7)
    now = 5.0
    beat.see("a", 7)
    assert (beat.has_moved, beat.silent_s) == (False, 5.0)
    beat.see("a", 8)
    now = 6.0
    assert (beat.has_moved, beat.silent_s) == (True, 1.0)
    beat.see("b", 1)
    now = 8.0
    assert (beat.has_moved, beat.silent_s) == (False, 2.0), "what the one before it did says nothing of this one"
