"""What every process of a run does now, all threads: asked on its host, without stopping it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rollcall.groups.reachable import Stacks, stacks_here
from rollcall.inspect.processes import ProcessTarget, ask_hosts

# Of Python's own dump and of py-spy's.
_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+|\d+)(?P<rest>.*)$")
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SPY_FRAME = re.compile(r"^\s+(?P<function>.+) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The stacks of each host's processes, and why hosts have not answered."""

    hosts: dict[str, list[Stacks]]
    failed: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"host": host, **asdict(one), "threads": threads_of(one.text)}
            for host, own in self.hosts.items()
            for one in own
        ]
        return {"processes": rows, "failed": self.failed}


def read_stacks(target: ProcessTarget, *, native: bool, timeout_s: float) -> Report:
    look = partial(stacks_here, run=target.run, native=native)
    answers = ask_hosts(target, look, timeout_s=timeout_s, to="read the stacks of its processes")
    return Report(hosts=answers.found, failed=answers.failed)


def threads_of(text: str) -> list[dict[str, Any]]:
    """Each thread with its frames, the innermost first.

    >>> threads_of('Thread 0x7f (most recent call first):\\n  File "a.py", line 3 in run\\n')
    [{'thread': '0x7f', 'frames': [{'function': 'run', 'file': 'a.py', 'line': 3}]}]
    """
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            name = match["rest"].strip(" :").removesuffix("(most recent call first)").strip()
            threads.append({"thread": f"{match['id']} {name}".strip(), "frames": []})
        elif threads and (match := _FRAME.match(line) or _SPY_FRAME.match(line)):
            number = match["line"]
            frame = {"function": match["function"], "file": match["file"], "line": int(number) if number else None}
            threads[-1]["frames"].append(frame)
    return threads
