"""Serves the page of a running run (`trainer.page`) in a separate process that never gets in the controller's way.

The child prints an address, and a new one whenever the last was used; the controller passes them on. The child's stdin stays open
while the controller lives, so it exits when the controller dies. If the child fails, the run continues.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rollcall.base.redact import is_secret
from rollcall.base.wait import warn
from rollcall.base.words import are
from rollcall.view.address import PAGE_FILE, PageRecord


def refuse_without_packages() -> None:
    """Refuse to start if the packages from the optional extra are not installed."""
    missing = [name for name in ("starlette", "uvicorn", "plotly") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the page needs {', '.join(missing)}, which {are(len(missing))} not installed; run: pip install 'rollcall-rl[view]'"
        )


@contextmanager
def serving_page(run_dir: Path, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of this run directory while the block runs."""
    refuse_without_packages()
    record, is_over = run_dir / PAGE_FILE, threading.Event()
    # It needs no secret, and its environment can be read in /proc. Ctrl-C in the terminal is for the controller: a separate session.
    env = {name: value for name, value in os.environ.items() if not is_secret(name)}
    child = subprocess.Popen(
        [sys.executable, "-m", "rollcall.view.page_process", str(run_dir)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    lines = child.stdout

    def listen() -> None:
        for line in lines:
            tell(line.rstrip())
        if child.wait() and not is_over.is_set():
            record.unlink(missing_ok=True)  # it names a port on which nobody listens any more
            warn(f"the page of {run_dir} has ended with status {child.returncode}; the run continues without it")

    threading.Thread(target=listen, name="page", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        child.stdin.close()
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        record.unlink(missing_ok=True)


def main(run_dir: Path) -> None:
    """Run the child process."""
    from rollcall.view.server import PageServer
    from rollcall.view.shown_runs import ShownRuns

    server = PageServer(ShownRuns([run_dir], is_one=True))
    record = PageRecord(host=socket.gethostname(), port=server.port, secret=server.keys.secret)

    def show_address() -> None:
        print(f"page           {record.address()}   (on {record.host}; works once)", flush=True)

    def write_record() -> None:
        while not run_dir.is_dir():  # the run creates it
            time.sleep(0.5)
        try:
            record.write(run_dir)
        except OSError as error:
            warn(
                f"{run_dir / PAGE_FILE} cannot be written ({error.strerror}), so `rollcall tunnel` does not find the page"
            )

    def watch() -> None:
        sys.stdin.read()  # until the controller exits
        server.stop()

    server.on_open = show_address
    show_address()
    for task in (write_record, watch):
        threading.Thread(target=task, daemon=True).start()
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
