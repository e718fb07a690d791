"""The table that `make chaos` ends with: what each run that was broken came to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from chaos.arena import ROWS

LOG = "ROLLCALL_CHAOS_LOG"  # a file that gets a JSON line of each run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    names = list(ROWS[0])
    cells = [names, *([("-" if row[name] is None else str(row[name])) for name in names] for row in ROWS)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    terminalreporter.section("runs that were broken on purpose; - is a run that did not come to its end")
    for row in cells:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Each run's line as soon as it has ended: a session may be cut short."""
    path = os.environ.get(LOG)
    if path is None:
        return
    with Path(path).open("a") as file:
        for row in ROWS[_written["rows"] :]:
            file.write(json.dumps(row) + "\n")
    _written["rows"] = len(ROWS)


_written = {"rows": 0}
