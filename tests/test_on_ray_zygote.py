"""Workers forked from a zygote: stubs are started as Ray starts workers, with a program that stands for Ray's own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollcall.process.ray import zygote

WORKER = """
import json, os, sys
if sys.argv[1] == "tell":
    facts = dict(parent=os.getppid(), group=os.getpgid(0), pid=os.getpid(), argv=sys.argv, folder=os.getcwd(), own=os.environ.get("OWN"),
                 place=sys.path[0], fractions="fractions" in sys.modules)
    print(json.dumps(facts))
    print("to stderr", file=sys.stderr)
elif sys.argv[1] == "exit":
    sys.exit(7)
elif sys.argv[1] == "raise":
    raise ValueError("a worker's own")
elif sys.argv[1] == "stay":
    print(os.getpid(), os.getppid(), flush=True)
    sys.stdin.read()
elif sys.argv[1] == "cuda":
    import torch
    print(torch.ones(2, device="cuda").sum().item())
"""


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Any]:
    """Starts a stub, of one group unless it is told another."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    own_group = uuid.uuid4().hex
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, modules: str = "fractions", group: str = own_group, **env: str) -> subprocess.Popen[str]:
        variables = {zygote.MODULES: modules, zygote.GROUP: group, "RAY_RAYLET_PID": str(raylet.pid)}
        command = [sys.executable, "-m", "rollcall.process.ray.zygote", str(script), *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables, **env},
            cwd=tmp_path,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    raylet.kill()  # the zygotes end with it
    raylet.communicate()


def facts(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=600)
    return json.loads(output)


@contextmanager
def ends(pid: int) -> Iterator[None]:
    """In the block, something ends this process."""
    watch = os.pidfd_open(pid)
    yield
    assert select.select([watch], [], [], 600)[0]
    os.close(watch)


def test_workers_of_a_group_come_from_one_process_that_has_imported_their_modules(stub: Any) -> None:
    one, other = facts(stub("tell")), facts(stub("tell"))
    assert one["parent"] == other["parent"] and one["pid"] != other["pid"]
    assert one["fractions"] and other["fractions"]
    assert facts(stub("tell", group="another"))["parent"] != one["parent"]


def test_a_worker_has_its_own_arguments_variables_folder_streams_and_process_group(stub: Any, tmp_path: Path) -> None:
    facts(stub("tell", OWN="first"))
    process = stub("tell", "--more", OWN="second")
    output, errors = process.communicate(timeout=600)
    told = json.loads(output)
    assert told["argv"] == [str(tmp_path / "worker.py"), "tell", "--more"] and told["own"] == "second"
    assert told["folder"] == told["place"] == str(tmp_path) and errors == "to stderr\n"
    assert told["group"] == told["pid"]  # the raylet ends a worker's whole group, which must not be the zygote's


def test_a_stub_ends_with_its_workers_status(stub: Any) -> None:
    process = stub("raise")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1 and "ValueError: a worker's own" in errors
    assert stub("exit").wait(timeout=600) == 7


def test_a_worker_ends_with_its_stub_and_the_zygote_goes_on(stub: Any) -> None:
    process = stub("stay")
    pid, parent = map(int, process.stdout.readline().split())
    with ends(pid):
        process.kill()
    assert facts(stub("tell"))["parent"] == parent


def test_a_killed_worker_ends_its_stub_with_a_failure(stub: Any) -> None:
    process = stub("stay")
    pid, _ = map(int, process.stdout.readline().split())
    os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=600) not in (0, None)


def test_a_module_that_cannot_be_imported_costs_the_fork_and_not_the_worker(stub: Any) -> None:
    process = stub("tell", modules="no_such_module", group="broken")
    output, errors = process.communicate(timeout=600)
    told = json.loads(output)
    assert told["pid"] == process.pid and not told["fractions"] and "no_such_module" in errors


def test_the_zygote_ends_with_the_raylet_of_its_node(stub: Any) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent = facts(stub("tell", RAY_RAYLET_PID=str(raylet.pid), group="tied"))["parent"]
    assert Path(f"/proc/{parent}").exists()
    with ends(parent):
        raylet.kill()
        raylet.communicate()


@pytest.mark.gpu
def test_a_forked_worker_can_use_the_card(stub: Any) -> None:
    process = stub("cuda", modules="rollcall.run.worker")
    output, errors = process.communicate(timeout=600)
    assert output == "2.0\n", errors
