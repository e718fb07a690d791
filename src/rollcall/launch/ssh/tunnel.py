"""The head's dashboard on a port of this machine, through `ssh`.

The `ssh` that forwards the port runs a script that waits for its stdin to end. So it ends with this process, however that ends.
"""

from __future__ import annotations

import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

from rollcall.jobs.channel import HttpChannel, Question, Reply, Unreachable
from rollcall.launch.errors import LaunchError
from rollcall.launch.ssh.shell import CONNECT_S, Login, close_pipes, start_ssh
from rollcall.nodes.address import free_ports

# A connection that the user's ssh shares would keep the port open after this.
OWN_CONNECTION = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
TRIES = 5  # another process may take the local port between the choice and ssh
READY = b"rollcall-tunnel-is-open"
END_S = 5.0
_SCRIPT = b"echo " + READY + b"\nexec cat >/dev/null\n"


class Tunnel:
    """Open from its start to ``close``; ``reopen`` after the connection was lost, on the same port."""

    def __init__(self, login: Login, *, host: str, port: int, local_port: int | None = None) -> None:
        self._login, self._host, self._port = login, host, port
        self._process: subprocess.Popen[bytes] | None = None
        for attempt in range(TRIES):
            self.local_port = local_port or free_ports(1)[0]
            try:
                self.reopen()
                return
            except LaunchError as error:
                if local_port is not None or attempt == TRIES - 1 or "Address already in use" not in str(error):
                    raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def reopen(self) -> None:
        self.close()
        forward = f"127.0.0.1:{self.local_port}:127.0.0.1:{self._port}"
        words = self._login.words(self._host, *OWN_CONNECTION, "-o", "ExitOnForwardFailure=yes", "-L", forward)
        # A file, because nobody reads a pipe while the tunnel is open, and ssh complains there of every refused connection.
        with tempfile.TemporaryFile() as said:
            self._process = start_ssh(words, stderr=said)
            try:
                self._wait_ready(self._process, said)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        close_pipes(process)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_ready(self, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
        """ssh forwards before it runs anything there, so the script's word means that the port is open."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(_SCRIPT)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # ssh has ended, and has said why
        heard, give_up = b"", time.monotonic() + 2 * CONNECT_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while READY not in heard and (left := give_up - time.monotonic()) > 0:
                if selector.select(left):
                    data = process.stdout.read1(4096)  # type: ignore[attr-defined]
                    if not data:
                        break
                    heard += data
        if READY in heard:
            return
        process.kill()
        process.wait()
        said.seek(0)
        why = said.read().decode(errors="replace").strip() or "no answer"
        raise LaunchError(f"{self._host}: ssh cannot open a tunnel to its port {self._port}\n    {why}")


class TunnelChannel(HttpChannel):
    """The job API of a head, through a tunnel that is opened again when it breaks."""

    def __init__(self, tunnel: Tunnel, *, token: str, token_source: str) -> None:
        super().__init__(tunnel.url, token=token, token_source=token_source)
        self._tunnel = tunnel

    def ask(self, question: Question) -> Reply:
        self._open()
        return super().ask(question)

    def tail(self, job_id: str, *, skip: int, take: Callable[[str], None]) -> str:
        try:
            self._open()
        except Unreachable as error:
            return str(error)
        return super().tail(job_id, skip=skip, take=take)

    def _open(self) -> None:
        if self._tunnel.is_open:
            return
        try:
            self._tunnel.reopen()
        except LaunchError as error:
            raise Unreachable(str(error)) from None
