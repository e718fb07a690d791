"""A port of the head's loopback on a port of this machine, through `ssh`: its dashboard, with the jobs, and the page of the run.

The `ssh` that forwards the port runs a script that waits for its stdin to end. So it ends with this process, however that ends.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from rollcall.jobs.submit import Job, Jobs
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import TOKEN_FILE, LaunchRecord, launch_token
from rollcall.launch.ssh.shell import CONNECT_S, CONNECTED, Login, close_pipes, start_ssh
from rollcall.launch.ssh.site import Site
from rollcall.nodes.address import free_ports
from rollcall.redact import remember
from rollcall.view.address import PAGE_FILE, parse_record
from rollcall.wait import say

# A connection that the user's ssh shares would keep the port open after this.
OWN_CONNECTION = ("-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes")
END_S = 5.0
LOOK_AGAIN_S = 1.0  # after a tunnel
LOOK_FOR_PAGE_S = 30.0  # while the run serves none
DASHBOARD = "dashboard"  # the fact with its port on the head's loopback


class Tunnel:
    """Open from its start to ``close``; ``connect`` opens it again after the connection was lost, on the same port."""

    def __init__(self, login: Login, *, host: str, port: int, local_port: int | None = None) -> None:
        self._login, self._host, self._port = login, host, port
        self._process: subprocess.Popen[bytes] | None = None
        self.local_port = local_port or free_ports(1)[0]
        if why := self.connect():
            raise LaunchError(why)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def connect(self) -> str:
        """Open it if it is not open; returns why it cannot be, or ""."""
        if self.is_open:
            return ""
        self.close()
        forward = ("-L", f"127.0.0.1:{self.local_port}:127.0.0.1:{self._port}")
        # A file, because nobody reads a pipe while the tunnel is open, and ssh complains there of every refused connection.
        with tempfile.TemporaryFile() as said:
            self._process = process = start_ssh(self._login.words(self._host, *OWN_CONNECTION, *forward), stderr=said)
            limit = threading.Timer(2 * CONNECT_S, process.kill)
            limit.start()
            try:
                # ssh forwards before it runs anything there, so the script's word means that the port is open.
                if _is_told(process):
                    return ""
            except BaseException:
                self.close()
                raise
            finally:
                limit.cancel()
            self.close()
            said.seek(0)
            why = said.read().decode(errors="replace").strip() or "no answer"
        return f"{self._host}: ssh cannot open a tunnel to its port {self._port}\n    {why}"

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


def _is_told(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"echo {CONNECTED}\nexec cat >/dev/null\n".encode())
        process.stdin.flush()
    except BrokenPipeError:
        return False  # ssh has ended, and has said why
    return any(CONNECTED.encode() in line for line in process.stdout)


def open_tunnel(record: LaunchRecord, *, local_port: int | None = None) -> Tunnel:
    """To the dashboard of the head."""
    site = Site.of_record(record)
    if DASHBOARD not in record.facts:
        raise LaunchError(f"{record.name!r} has not started its nodes; run the same `rollcall launch` again")
    return Tunnel(site.login, host=site.head, port=record.facts[DASHBOARD], local_port=local_port)


def open_page(record: LaunchRecord) -> Tunnel | None:
    """To the page that the run serves (``trainer.page``), with its address printed; None: it serves none now."""
    site = Site.of_record(record)
    path = shlex.quote(f"{record.run_dir}/{PAGE_FILE}")
    script = site.script(f"cat {path} 2>/dev/null </dev/null || true; echo")
    (outcome,) = site.send({site.head: script}, timeout_s=2 * CONNECT_S)
    page = parse_record(outcome.answer or "")
    if page is None:
        return None
    remember([page.secret])
    tunnel = Tunnel(site.login, host=site.head, port=page.port)
    print(page.address(tunnel.local_port), flush=True)
    say(f"the page of {record.run_dir}; the address works once")
    return tunnel


def hold_tunnel(record: LaunchRecord, *, local_port: int | None) -> None:
    """The dashboard on a port of this machine until Ctrl-C, and the page of the run where it has one, on another. A connection that
    breaks is made again."""
    with ExitStack() as opened:
        tunnels = [opened.enter_context(open_tunnel(record, local_port=local_port))]
        print(tunnels[0].url, flush=True)
        say(f"the dashboard of {record.name!r}, until Ctrl-C; its token is in {record.folder / TOKEN_FILE}")
        look_at = 0.0
        while True:
            if len(tunnels) == 1 and time.monotonic() >= look_at:
                if (page := open_page(record)) is not None:
                    tunnels.append(opened.enter_context(page))
                look_at = time.monotonic() + LOOK_FOR_PAGE_S
            time.sleep(LOOK_AGAIN_S)
            for tunnel in tunnels:
                if not tunnel.is_open:
                    why = tunnel.connect()
                    say(f"the connection is lost, trying again: {why}" if why else "connected again")


@contextmanager
def jobs_of(record: LaunchRecord) -> Iterator[Jobs]:
    """The jobs of the launch's cluster, through a tunnel that is open as long as the block runs."""
    from rollcall.on_ray.job_client import HttpClient

    token = launch_token(record.folder)
    with open_tunnel(record) as tunnel:
        source = str(record.folder / TOKEN_FILE)
        yield Jobs(HttpClient(tunnel.url, token=token, token_source=source, connect=tunnel.connect), token=token)


def find_job(record: LaunchRecord, jobs: Jobs) -> Job | None:
    """The job of the launch's run; None: it is not submitted."""
    return next((job for job in jobs.jobs() if job.id == record.id), None)


def submitted(record: LaunchRecord, jobs: Jobs) -> str:
    """The job's id; raises where the launch was cut off before the run was submitted."""
    job = find_job(record, jobs)
    if job is None:
        raise LaunchError(f"{record.name!r} has not submitted its run; run the same `rollcall launch` again")
    return job.id
