"""What every process of a run does now, all threads: asked on its host, without stopping it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rollcall.groups.reachable import Stacks, stacks_here
from rollcall.inspect.processes import ProcessTarget, ask_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The stacks of each host's processes, and why hosts have not answered."""

    hosts: dict[str, list[Stacks]]
    failed: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        rows = [{"host": host, **asdict(one)} for host, own in self.hosts.items() for one in own]
        return {"processes": rows, "failed": self.failed}


def read_stacks(target: ProcessTarget, *, native: bool, timeout_s: float) -> Report:
    look = partial(stacks_here, run=target.run, native=native)
    answers = ask_hosts(target, look, timeout_s=timeout_s, to="read the stacks of its processes")
    return Report(hosts=answers.found, failed=answers.failed)
