"""The page of a run that trains (`trainer.page`): a process of its own, and never in the way of the controller.

The controller starts it, hands it a secret over its stdin, and passes on what it says: the address, and another one when that was
used. Its stdin stays open, so it ends with the controller, however that ends. If it fails, the run goes on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rollcall.redact import is_secret
from rollcall.view.address import PAGE_FILE, Keys, PageRecord
from rollcall.wait import warn

END_S = 5.0


def refuse_without_packages() -> None:
    """They are an extra of the installation."""
    missing = [name for name in ("starlette", "uvicorn", "plotly") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the page needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; run: pip install "
            "'rollcall-rl[view]'"
        )


@contextmanager
def serving_page(run_dir: Path, *, tell: Callable[[str], None]) -> Iterator[None]:
    """The page of this run directory while the block runs."""
    refuse_without_packages()
    keys = Keys()
    # Of its own session: Ctrl-C in the terminal is for the controller.
    child = subprocess.Popen(
        [sys.executable, "-m", "rollcall.view.page_process", str(run_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={name: value for name, value in os.environ.items() if not is_secret(name)},  # others can read it in /proc
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    lines = child.stdout

    def listen() -> None:
        for line in lines:
            port = json.loads(line)["port"]  # said when it listens, and again when an address was used
            record = PageRecord(host=socket.gethostname(), port=port, secret=keys.secret, pid=os.getpid())
            tell(f"page           {record.address()}   (on {record.host}; works once)")
            _keep(record, run_dir, ended=ended)
        if child.wait() and not ended.is_set():
            (run_dir / PAGE_FILE).unlink(missing_ok=True)  # it names a port that nobody listens to
            warn(f"the page of {run_dir} has ended with status {child.returncode}; the run goes on without it")

    ended = threading.Event()
    listener = threading.Thread(target=listen, name="page", daemon=True)
    try:
        child.stdin.write(keys.secret + "\n")
        child.stdin.flush()
        listener.start()
        yield
    finally:
        ended.set()
        _end(child)
        if listener.is_alive():
            listener.join(END_S)
        (run_dir / PAGE_FILE).unlink(missing_ok=True)


def _keep(record: PageRecord, run_dir: Path, *, ended: threading.Event) -> None:
    """Write it as soon as the run has made its directory."""
    while not run_dir.is_dir():
        if ended.wait(0.5):
            return
    try:
        record.write(run_dir)
    except OSError as error:
        warn(f"{run_dir / PAGE_FILE} cannot be written ({error.strerror}), so `rollcall tunnel` does not find the page")


def _end(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    try:
        child.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main(run_dir: Path) -> None:
    """The child."""
    from rollcall.view.server import PageServer
    from rollcall.view.shown_runs import ShownRuns

    secret = sys.stdin.readline().strip()
    server = PageServer(ShownRuns([run_dir], is_one=True), keys=Keys(secret))

    def tell_port() -> None:
        print(json.dumps({"port": server.port}), flush=True)

    def watch() -> None:
        sys.stdin.read()  # until the controller ends
        server.stop()

    server.on_open = tell_port
    threading.Thread(target=watch, daemon=True).start()
    tell_port()
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
