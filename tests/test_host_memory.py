"""Freed memory stays with the process, seen by the kernel's count of page faults."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

glibc_only = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries than glibc are left as they are"
)
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

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


@glibc_only
def test_a_large_tensor_that_is_made_again_costs_no_page_faults() -> None:
    assert faults("keep") < 1000 < faults("leave"), "80 MiB are 20,480 pages"


LARGE = """
import re, torch
from pathlib import Path
from rollcall.host_memory import keep_freed_memory

keep_freed_memory()
kept = torch.zeros(80 << 20, dtype=torch.uint8).fill_(1)
print(re.search(r"AnonHugePages: *(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])
"""


@glibc_only
@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[madvise]" not in LARGE_PAGES.read_text(),
    reason="this kernel gives large pages to everyone or to nobody, not to who asks",
)
def test_a_large_tensor_is_in_large_pages() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) >= 20 << 10  # KiB; the kernel may be short of some
