"""The `rollcall` command in a process of its own that is forked, with torch and transformers imported, instead of started.

What it prints, how it ends and what it leaves are those of a started one; importing, which would be most of its work, is
done once for all tests.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
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
IMPORTED = [
    "rollcall.train", "rollcall.eval", "rollcall.cli.main", "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto", "tiny", "ranks",
]  # fmt: skip


def fork_context() -> Any:
    """A multiprocessing context whose processes have everything imported. A process of tests has one of this kind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    places = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    with mock.patch.dict(os.environ, {**NO_HUB, "PYTHONPATH": places}):
        forkserver.ensure_running()
    return context


def rollcall(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``rollcall ARGUMENTS`` in the folder, with these environment variables besides those of the tests."""
    environment = {**os.environ, **NO_HUB, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        process = fork_context().Process(
            target=_command, args=(arguments, str(cwd), {**environment, **variables}, str(output), str(errors))
        )
        process.start()
        process.join(timeout=WAIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"rollcall {' '.join(arguments)} did not end within {WAIT_S:g} s")
        return subprocess.CompletedProcess(arguments, process.exitcode, output.read_text(), errors.read_text())


def _command(arguments: tuple[str, ...], cwd: str, environment: Mapping[str, str], output: str, errors: str) -> None:
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
