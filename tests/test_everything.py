"""`make everything`, with stand-ins for `make` and `git`: it runs each suite once for a commit, and its table names all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_path import own_path

from scripts import everything
from scripts.everything import Suite

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><skipped message="needs a | card"/></testcase>
<testcase name="d"><skipped message="needs a | card"/></testcase>
<testcase name="e"><skipped message="needs root"/></testcase>{more}
</testsuite></testsuites>"""
FAILED = '<testcase name="f"><failure message="no"/><error message="nor that"/></testcase>'
MAKE = """#!/bin/sh
cd {folder}; echo "$1" >> calls
report=${{2#REPORT=--junitxml=}}
case $1 in good) cat good.xml > $report ;; bad) cat bad.xml > $report; exit 2 ;; cut) cat good.xml > $report; exit 2 ;; *) exit 2 ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.xml").write_text(REPORT.format(more=""))
    (tmp_path / "bad.xml").write_text(REPORT.format(more=FAILED))
    programs = {
        "make": MAKE.format(folder=tmp_path),
        "git": f"#!/bin/sh\ncase $1 in rev-parse) echo abc1234 ;; status) cat {tmp_path}/changed ;; esac\n",
    }
    (tmp_path / "changed").touch()
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", own_path(tmp_path / "bin"))
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    monkeypatch.setattr(everything, "machine", lambda: "2 cores")
    return tmp_path


def suites(*names: str) -> list[Suite]:
    return [Suite(name=name, programs={}) for name in names]


def test_the_table_has_every_suite_and_the_reasons_for_what_was_skipped(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert everything.main(suites("good", "bad", "cut", "never")) == 1
    rows = capsys.readouterr().out.splitlines()[-6:]
    skipped = "3 (2: needs a \\| card; 1: needs root)"
    assert rows == [
        "| suite | commit | machine | passed | failed | skipped |",
        "|---|---|---|---|---|---|",
        f"| good | abc1234 | 2 cores | 2 | 0 | {skipped} |",
        f"| bad | abc1234 | 2 cores | 2 | 1 | {skipped} |",
        "| cut | abc1234 | 2 cores | 0 | not run: `make cut` ended with status 2, and no test failed |  |",
        "| never | abc1234 | 2 cores | 0 | not run: `make never` ended with status 2 before its tests did |  |",
    ]
    assert (checkout / ".everything/abc1234/table.md").read_text().splitlines() == rows


def test_a_second_start_runs_what_is_missing_of_the_commit(checkout: Path) -> None:
    everything.main(suites("good", "bad", "never"))
    assert everything.main(suites("good", "bad", "never")) == 1
    assert (checkout / "calls").read_text().split() == ["good", "bad", "never", "never"]
    assert everything.main(suites("good")) == 0


def test_a_tree_with_changes_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "changed").write_text(" M Makefile\n")
    assert everything.main(suites("good")) == 2
    assert "commit or stash them first:\nM Makefile" in capsys.readouterr().out
    assert not (checkout / ".everything").exists()
