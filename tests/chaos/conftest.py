"""The table that `make chaos` ends with: what each run that was broken came to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.arena import ROWS

LOG = "ROLLCALL_CHAOS_LOG"  # a file that gets a JSON line of each run, and of each failure
PROPERTY = "chaos"

_shown: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def _report_rows(record_property: Any) -> Iterator[None]:
    """With the test's report, which comes to the process that shows the table from whichever ran the test."""
    yield
    for row in ROWS:
        record_property(PROPERTY, row)
    ROWS.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Each run's line as soon as it has ended, and why a test failed: a session may be cut short."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    lines: list[Any] = []
    if report.when == "teardown":
        lines += [row for name, row in report.user_properties if name == PROPERTY]
        _shown.extend(lines)
    if report.failed:
        lines.append({"failed": report.nodeid, "why": report.longreprtext})
    if lines and (path := os.environ.get(LOG)):
        with Path(path).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _shown:
        return
    names = list(_shown[0])
    cells = [names, *([("-" if row[name] is None else str(row[name])) for name in names] for row in _shown)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    terminalreporter.section("runs that were broken on purpose; - is a run that did not come to its end")
    for row in cells:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
