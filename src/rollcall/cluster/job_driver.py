"""What a submitted job runs: the controller, and again when it was killed.

A controller that ends by itself, well or with an error, has said why, and its status is the job's. One that a signal ended
(out of memory, a crash of a library, someone's `kill -9`) is started again, and goes on from the run directory alone;
`trainer.max_restarts` in `trainer.restart_window_s` bound how often. Being told to stop is no such end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from rollcall.attempts import Budget, RestartsSpentError
from rollcall.config import load_config

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ControllerKilledError(RuntimeError):
    """The controller did not end by itself."""


def run(arguments: Sequence[str]) -> int:
    """`rollcall train` with these arguments until it ends by itself or is told to; returns its status."""
    trainer = load_config(arguments[0], list(arguments[1:])).trainer
    budget = Budget(most=trainer.max_restarts, window_s=trainer.restart_window_s)
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(number)

    for number in ASKED:
        signal.signal(number, stop)
    while True:
        child = subprocess.Popen([sys.executable, "-m", "rollcall", "train", *arguments])
        status = child.wait()
        if status >= 0:
            return status
        if asked or -status in ASKED:
            return 128 - status
        why = f"the controller was ended by {signal.Signals(-status).name}"
        try:
            budget.spend(ControllerKilledError(why))
        except RestartsSpentError as error:
            print(error, file=sys.stderr, flush=True)
            return 128 - status
        print(f"{why}; it is started again and goes on from the run directory", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
