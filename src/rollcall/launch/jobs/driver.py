"""The entrypoint of a submitted job: runs the controller, and restarts it if it was killed.

A controller that exits by itself, with or without an error, has printed why, and its status becomes the job's status. A controller
that a signal killed (out of memory, a crash in a library, someone's `kill -9`) is started again and continues from the run
directory, at most `trainer.max_restarts` times in `trainer.restart_window_s`. A stop signal is different: it is passed on to
the controller, which saves and exits.

This process unseals the job's secrets and passes them to the controller as environment variables. It redacts the output of the
controller and its children, because Ray keeps that output in a file.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from rollcall.base.errors import ClusterError, RestartsSpentError
from rollcall.base.redact import Redactor
from rollcall.base.wait import say
from rollcall.config import load_config
from rollcall.loop.attempts import Budget
from rollcall.nodes.declared import SEALED, open_sealed

ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def supervise(command: Sequence[str], *, budget: Budget) -> int:
    """Run the controller until it exits by itself or a signal stops it, and return its status."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(number)

    for number in ASKED:
        signal.signal(number, stop)
    open_sealed()
    environ = {name: value for name, value in os.environ.items() if name != SEALED}
    while True:
        if asked:  # between two controllers
            return 128 + asked[-1]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ)
        if asked:  # while it was being created
            child.send_signal(asked[-1])
        pass_on(child)
        status = child.wait()
        if status >= 0:
            return status
        if asked or -status in ASKED:
            return 128 - status
        why = f"the controller was killed by {signal.Signals(-status).name}"
        try:
            budget.spend(ClusterError(why))
        except RestartsSpentError as error:
            say(str(error))
            return 128 - status
        say(f"{why}; starting it again from the run directory")


def pass_on(child: subprocess.Popen[bytes]) -> None:
    """Print the child's output, redacted, until the child has exited."""
    assert child.stdout is not None
    redactor, decoder = Redactor(), codecs.getincrementaldecoder("utf-8")("replace")
    with child.stdout as stream:
        pipe = stream.fileno()
        while True:
            ready, _, _ = select.select([pipe], [], [], 1.0)  # then an incomplete line is passed on
            piece = os.read(pipe, 2**16) if ready else b""
            text = redactor.feed(decoder.decode(piece)) if piece else redactor.end()
            os.write(1, text.encode())
            # A process that the controller left behind may keep the pipe open.
            if not piece and (ready or child.poll() is not None):
                return


if __name__ == "__main__":
    try:
        trainer = load_config(sys.argv[1]).trainer
        limit = Budget(most=trainer.max_restarts, window_s=trainer.restart_window_s)
        sys.exit(supervise([sys.executable, "-m", "rollcall", "train", sys.argv[1]], budget=limit))
    except (ClusterError, ValueError) as problem:
        sys.exit(f"error: {problem}")
