"""Freed memory stays with the process, seen by the kernel's count of page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading, torch
from rollcall.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def work():
    for _ in range(20):  # the first few find no hole of their size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(80 << 20, dtype=torch.uint8).fill_(1)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
thread = threading.Thread(target=work)  # learners are called from threads
thread.start()
thread.join()
print(found[-1])
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries than glibc are left as they are")
def test_a_large_tensor_that_is_made_again_costs_no_page_faults() -> None:
    assert faults("keep") < 1000 < faults("leave"), "80 MiB are 20,480 pages"
