"""One way to wait: what is said, when, and when it is over."""

from __future__ import annotations

import pytest

from rollcall.base import wait as module
from rollcall.base.wait import SHORTEST_S, Wait, speaking


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_wait_speaks_first_after_a_while_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(), list[str]()
    monkeypatch.setattr(module, "time", clock)
    wait = Wait(20, first_s=2, every_s=5)
    with speaking(said.append):
        while wait.again("waiting for rank 1", after_s=1):
            pass
    assert said == [f"waiting for rank 1 ({seconds} s)" for seconds in (2, 7, 12, 17)]
    assert (wait.waited_s, wait.left_s, wait.until_word_s) == (20, SHORTEST_S, SHORTEST_S)


def test_a_wait_without_an_end_says_at_once_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    wait = Wait(first_s=0)
    wait.tell("waiting for the head")
    wait.tell("not yet again")
    assert capsys.readouterr().err == "waiting for the head\n"
    assert not wait.is_over and wait.left_s == float("inf")
