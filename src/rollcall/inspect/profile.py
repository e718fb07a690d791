"""A profile of the processes of a role, while they work: torch's profiler, or py-spy's samples.

Each host profiles its own processes, all at once, and sends the files back. The run does not wait for it: torch's profiler runs in
a thread of the process, py-spy looks at it from outside.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.durable.atomic import write_atomic
from rollcall.errors import ClusterError
from rollcall.groups.reachable import END_S, START_S, About, ProfileError, profile_process, py_spy, reachable_here
from rollcall.inspect.processes import ProcessTarget, ask_hosts


class Format(StrEnum):
    TORCH = "torch"  # a Chrome trace
    SPEEDSCOPE = "speedscope"
    FLAMEGRAPH = "flamegraph"  # an SVG


_ENDINGS = {Format.TORCH: "trace.json.gz", Format.SPEEDSCOPE: "speedscope.json", Format.FLAMEGRAPH: "svg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """One process on its host."""

    title: str
    pid: int
    data: bytes
    error: str  # empty: ``data`` is its profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    files: list[Path]
    failed: dict[str, str]  # why, by process or host

    def as_json(self) -> dict[str, Any]:
        return {"files": [str(path) for path in self.files], "failed": self.failed}


def profile_role(target: ProcessTarget, *, role: str, seconds: float, kind: Format, out: Path) -> Result:
    """One file for each process of the role, in the folder ``out``."""
    work = partial(profile_here, run=target.run, role=role, seconds=seconds, kind=kind)
    timeout_s = seconds + START_S + END_S
    answers = ask_hosts(target, work, timeout_s=timeout_s, to=f"profile its processes of role {role}")
    failed = dict(answers.failed)
    files: list[Path] = []
    others: set[str] = set()
    for host, (found, roles) in answers.found.items():
        others |= set(roles)
        for one in found:
            if one.error:
                failed[f"{one.title} (process {one.pid}) on {host}"] = one.error
                continue
            name = re.sub("[^a-z0-9]+", "-", f"{one.title} {host.partition(' (')[0]} {one.pid}".lower()).strip("-")
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{name}.{_ENDINGS[kind]}"
            write_atomic(path, one.data, durable=False)
            files.append(path)
    if not files and not failed:
        there = ", ".join(sorted(others))
        raise ClusterError(
            f"no process of role {role} runs there; the roles that do are: {there}"
            if there
            else "no process of a run was found there; is it running (`rollcall status RUN_DIR`), and as this user?"
        )
    return Result(files=files, failed=failed)


def profile_here(*, run: str | None, role: str, seconds: float, kind: Format) -> tuple[list[Profiled], list[str]]:
    """The processes of the role on this host, and all roles that are here."""
    known = reachable_here(run=run)
    chosen = {pid: about for pid, about in known.items() if role in about.roles}
    with ThreadPoolExecutor(max_workers=max(len(chosen), 1)) as pool:
        found = pool.map(lambda item: _profiled(*item, seconds=seconds, kind=kind), chosen.items())
        return list(found), sorted({role for about in known.values() for role in about.roles})


def _profiled(pid: int, about: About, *, seconds: float, kind: Format) -> Profiled:
    try:
        made = (
            profile_process(pid, seconds=seconds) if kind is Format.TORCH else _sample(pid, seconds=seconds, kind=kind)
        )
        return Profiled(title=about.title, pid=pid, data=made, error="")
    except (ProfileError, OSError) as error:
        return Profiled(title=about.title, pid=pid, data=b"", error=str(error))


def _sample(pid: int, *, seconds: float, kind: Format) -> bytes:
    with tempfile.TemporaryDirectory(prefix="rollcall-profile-") as folder:
        path = Path(folder) / "profile"
        command = [
            py_spy(),
            "record",
            "--pid",
            str(pid),
            "--duration",
            str(max(round(seconds), 1)),
            "--format",
            kind.value,
        ]
        command += ["--output", str(path), "--nonblocking", "--threads"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + END_S, errors="replace")
        except subprocess.TimeoutExpired:
            raise ProfileError(f"py-spy did not end within {seconds + END_S:g} s") from None
        if done.returncode or not path.exists():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
            raise ProfileError(f"py-spy failed: {lines[-1]}")
        return path.read_bytes()
