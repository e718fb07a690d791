"""What child processes print reaches this process's stderr without secrets, and no word of it is lost."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from scored import a_prompt, completions_of, in_a_directory_with

from rollcall.base.redact import LONGEST_LINE, remember
from rollcall.config import FunctionReward
from rollcall.observe.logs import ChildPrints
from rollcall.reward.scorer import Scorer

MODULE = """
import os

def score(prompt, completion, answer, metadata):
    print("heard", completion)
    os.system("echo child of a reward with s3cret-of-a-row")
    return 1
"""


def test_what_a_reward_prints_is_heard_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    in_a_directory_with(MODULE, path=tmp_path, monkeypatch=monkeypatch)
    remember(["s3cret-of-a-row"])
    with Scorer([FunctionReward(path="my_rewards:score")], num_workers=1, model_rewards={}) as scorer:
        asyncio.run(scorer.score(a_prompt(), completions_of("a", "b")))
        heard, until = "", time.monotonic() + 20
        while "heard b" not in heard and time.monotonic() < until:  # while the worker lives: nothing is held back
            time.sleep(0.01)
            heard += capsys.readouterr().err
    heard += capsys.readouterr().err
    child = "child of a reward with <redacted>"
    assert heard.splitlines() == ["heard a", child, "heard b", child]


def test_a_line_without_an_end_is_not_kept_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollcall.base.redact.LONGEST_LINE", 1 << 18)
    child = ChildPrints()
    for _ in range(16):
        os.write(child.fd, b"x" * (1 << 16))
    heard, until = "", time.monotonic() + 20
    while len(heard) < 1 << 18 and time.monotonic() < until:
        time.sleep(0.01)
        heard += capsys.readouterr().err
    os.write(child.fd, b"\nlast")
    child.close()
    assert len(heard) >= 1 << 18, "printed before the line has ended"
    heard += capsys.readouterr().err
    assert heard.replace("\n", "") == "x" * (1 << 20) + "last"


def test_a_secret_on_the_edge_of_a_part_of_a_line_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    remember(["s3cret-of-a-row"])
    child = ChildPrints()
    text = b"ab" * (LONGEST_LINE // 2 - 3) + b"s3cret-of-a-row" + b"cd" * (1 << 17)
    while text:
        text = text[os.write(child.fd, text) :]
    os.write(child.fd, b"\n")
    child.close()
    heard, until = "", time.monotonic() + 20
    while "d\n" not in heard and time.monotonic() < until:
        heard += capsys.readouterr().err
        time.sleep(0.01)
    heard = heard.replace("\n", "")  # a long line is printed in parts
    assert "s3cret" not in heard and "-a-row" not in heard and "<redacted>" in heard
