"""Runs every suite of this project and ends with one table, ready for docs/log.md: `make everything`.

Each suite is its `make` target. First comes what it needs: packages of Debian (as root), environments of
scripts/setup_peers.sh. What cannot be had is a reason to skip in the table. The results of a commit stay in
.everything/COMMIT: a second `make everything` runs the suites that are missing there. So the tree must be clean.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LAB = {"ip": "iproute2", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge",
       "sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync"}  # fmt: skip
CONTAINERS = {"podman": "podman", "crun": "crun", "catatonit": "catatonit"}


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str  # of its make target
    programs: dict[str, str]  # program -> the package of Debian that has it
    peers: tuple[str, ...] = ()


SUITES = [
    Suite(name="test", programs={}),
    Suite(name="view", programs={"chromium": "chromium"}),
    Suite(name="gpu", programs={}),
    Suite(name="launchers", programs=LAB, peers=("skypilot", "dstack")),
    Suite(name="vllm", programs={"g++": "g++"}, peers=("vllm",)),
    Suite(name="slow", programs=LAB | CONTAINERS | {"g++": "g++"}, peers=("trl", "textarena", "gymnasium", "openenv", "verifiers")),
    Suite(name="chaos", programs=LAB),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    passed: int
    failed: int
    skipped: Counter[str]  # reason -> how many


def main(suites: Sequence[Suite] = SUITES) -> int:
    commit = output("git", "rev-parse", "--short", "HEAD")
    if not commit:
        print("results are kept by commit, and this folder is no checkout of git; clone the repository")
        return 2
    if changed := output("git", "status", "--porcelain"):
        print(f"results are kept by commit, and the tree has changes; commit or stash them first:\n{changed}")
        return 2
    folder = ROOT / ".everything" / commit
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, suite in enumerate(suites, start=1):
        report = folder / f"{suite.name}.xml"
        say(f"suite {number} of {len(suites)}: {suite.name}" + (f", found in {report}" if report.exists() else ""))
        complaint = None
        if not report.exists():
            prepare(suite)
            complaint = run(suite, report)
        rows.append((suite.name, read(report) if report.exists() else None, complaint))
    text = table(rows, commit=commit, machine=machine())
    (folder / "table.md").write_text(text)
    say(f"the table for docs/log.md, also in {folder / 'table.md'}")
    print(text, end="")
    return int(any(result is None or result.failed for _, result, _ in rows))


def prepare(suite: Suite) -> None:
    packages = [package for program, package in suite.programs.items() if shutil.which(program) is None]
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {', '.join(packages)}")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for package in packages:  # one that Debian does not have here must not keep the others away
            subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", package], env=env)
    for peer in suite.peers:
        if subprocess.run([str(ROOT / "scripts/setup_peers.sh"), str(peers_folder()), peer]).returncode:
            say(f"{peer} could not be installed; tests that need it skip themselves")


def run(suite: Suite, report: Path) -> str | None:
    """Returns why there is no report. A suite that was interrupted leaves its part of one, which does not count."""
    partial = report.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    env, vllm = dict(os.environ), peers_folder() / "vllm/bin/python"
    if vllm.exists():
        env.setdefault("ROLLCALL_VLLM_PYTHON", str(vllm))
    ended = subprocess.run(["make", suite.name, f"REPORT=--junitxml={partial}"], cwd=ROOT, env=env)
    if not partial.exists():
        return f"`make {suite.name}` ended with status {ended.returncode} before its tests did"
    if ended.returncode and not read(partial).failed:
        return f"`make {suite.name}` ended with status {ended.returncode}, and no test failed"
    partial.rename(report)
    return None


def read(report: Path) -> Result:
    """Counts of a report in JUnit's form. An error around a test is a failure; a test may have both."""
    passed, failed, skipped = 0, 0, Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped[" ".join(skip.get("message", "").split())] += 1
        else:
            passed += 1
    return Result(passed=passed, failed=failed, skipped=skipped)


def table(rows: Sequence[tuple[str, Result | None, str | None]], *, commit: str, machine: str) -> str:
    lines = ["| suite | commit | machine | passed | failed | skipped |", "|---|---|---|---|---|---|"]
    for name, result, complaint in rows:
        if result is None:
            cells = ["0", f"not run: {complaint}", ""]
        else:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in result.skipped.most_common())
            total = result.skipped.total()
            cells = [f"{result.passed:,}", f"{result.failed:,}", f"{total:,} ({reasons})" if total else "0"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (name, commit, machine, *cells)) + " |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words = f"{os.cpu_count()} {platform.machine()} cores, {memory:.0f} GiB"
    cards = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if shutil.which("nvidia-smi") else ""
    return ", ".join([words, *(f"{count} {name}" for name, count in Counter(cards.splitlines()).items())])


def peers_folder() -> Path:
    return Path(os.environ.get("ROLLCALL_PEERS") or ROOT / ".peers").absolute()


def output(*command: str) -> str:
    """What it prints; nothing when it fails."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "" if ended.returncode else ended.stdout.strip()


def say(words: str) -> None:
    print(f"== {words}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; `make everything` on the same commit continues with this suite")
