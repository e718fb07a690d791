"""Where the page of a run is served: ``page.json`` in its directory, readable by its owner only, while the run goes on.

The secret in it makes addresses that work once, so a process that may read the file can open the page, as `rollcall tunnel` does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rollcall.durable.atomic import write_atomic
from rollcall.view.keys import OPEN, Keys

FILE = "page.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRecord:
    host: str  # that serves it, on its loopback
    port: int
    secret: str
    pid: int

    def address(self, port: int | None = None) -> str:
        """One that works once. ``port``: of a tunnel to it."""
        return f"http://127.0.0.1:{port or self.port}{OPEN}{Keys(self.secret).new()}"

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / FILE, json.dumps(asdict(self)), durable=False, private=True)


def parse_record(text: str) -> PageRecord | None:
    """None: it is not such a file."""
    try:
        found = json.loads(text)
        record = PageRecord(
            host=str(found["host"]), port=int(found["port"]), secret=str(found["secret"]), pid=int(found["pid"])
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if 0 < record.port < 65536 and record.secret else None
