"""Several hosts on one machine, for tests: see `lab.lab` for what a host is, `lab.cluster` for Rollcall on them.

with Lab(hosts=4, shared=tmp_path / "shared") as lab:
    lab.hosts[0].run(["hostname"]).stdout  # "node0\n"
"""

from lab.command import Command, CommandTimeout, LabError
from lab.lab import Host, HostProcess, Lab, missing_for_lab, needs_lab

__all__ = [
    "Command", "CommandTimeout", "Host", "HostProcess", "Lab", "LabError", "missing_for_lab", "needs_lab",
]  # fmt: skip
