"""The `rollcall` command in a process of its own that is forked, with torch and transformers imported, instead of started.

What it prints, how it ends and what it leaves are those of a started one; importing, which would be most of its work, is
done once for all tests.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
WAIT_S = 600.0
NO_HUB = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{tempfile.gettempdir()}/rollcall-tests-have-no-hub"}  # read by importing
CLONE_NEWNET = 0x40000000


def fork_context() -> Any:
    """A multiprocessing context whose processes have everything imported. A process of tests has one of this kind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    places = os.pathsep.join(filter(None, [f"{ROOT}/src", f"{ROOT}/tests", os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {**NO_HUB, "PYTHONPATH": places}):
        forkserver.ensure_running()
    return context


def rollcall(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``rollcall ARGUMENTS`` in the folder, with these environment variables besides those of the tests."""
    command = start(*arguments, cwd=cwd, variables=variables)
    status = command.wait()
    return subprocess.CompletedProcess(arguments, status, command.stdout, command.stderr)


def start(*arguments: str, cwd: Path, variables: Mapping[str, str] | None = None, has_network: bool = True) -> Command:
    """The same while it goes on, in a session of its own."""
    own = {**NO_HUB, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, **(variables or {})}
    folder = tempfile.TemporaryDirectory()
    output, errors = Path(folder.name, "stdout"), Path(folder.name, "stderr")
    for path in (output, errors):
        path.touch()
    process = fork_context().Process(
        target=_command, args=(arguments, str(cwd), environment, str(output), str(errors), has_network)
    )
    process.start()
    return Command(arguments, process, folder)


class Command:
    """A command that runs, by the names of `subprocess.Popen`."""

    def __init__(self, arguments: tuple[str, ...], process: Any, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._words = f"rollcall {' '.join(arguments)}"
        self._process = process
        self._folder = folder
        self.pid: int = process.pid

    @property
    def stdout(self) -> str:
        """What it has said until here."""
        return Path(self._folder.name, "stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(self._folder.name, "stderr").read_text()

    def poll(self) -> int | None:
        """Its status, negative by a signal; None: it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join(timeout=WAIT_S)
        status = self.poll()
        if status is None:
            self.kill()
            raise AssertionError(f"{self._words} did not end within {WAIT_S:g} s:\n{self.stdout}\n{self.stderr}")
        return status

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def can_cut_the_network() -> bool:
    """Whether a command can be started without one. Only root may do that."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--net", "true"], check=False).returncode == 0


def _command(
    arguments: tuple[str, ...], cwd: str, environment: Mapping[str, str], output: str, errors: str, has_network: bool
) -> None:
    os.setsid()
    if not has_network and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background has it ignored
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT), (2, errors, os.O_WRONLY | os.O_CREAT)
    ):  # fmt: skip
        file = os.open(path, flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    streams = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.argv = ["rollcall", *arguments]
    sys.path[0:0] = [cwd]  # as `python -m` does
    status = _run()
    # multiprocessing ends its processes without these.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run() -> int:
    """Exit status of the command, by the rules of the interpreter."""
    from rollcall.cli.main import main

    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
