"""What Ray prints of its raylets in a driver, without what the run says itself.

A raylet that ends prints a C++ stack of 20 lines, and Ray (2.60) shows it to every driver; its own words for a lost node come on
top. The run names the node and what it does about it.
"""

from __future__ import annotations

import re
from typing import Any

# A frame such as `/lib/libc.so.6(+0x27744) [0xffffb4ae7744]`, and what stands above the frames.
_LEFT_OUT = re.compile(
    r"\(\S*\+0x[0-9a-f]+\) \[0x[0-9a-f]+\]|\*\*\* StackTrace|\*\*\* SIG\w+ received|@ +0x[0-9a-f]+|has been marked dead because"
)


def hide_stacks() -> None:
    """From now on, in this process."""
    from ray._private import worker

    show = worker.print_worker_logs
    if getattr(show, "__module__", "") == __name__:
        return

    def show_without_stacks(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [line for line in data["lines"] if not _LEFT_OUT.search(line)]}
        show(data, *args, **kwargs)

    worker.print_worker_logs = show_without_stacks
