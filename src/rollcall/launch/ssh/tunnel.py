"""Forwards ports on the head's loopback to this machine through `ssh`: for the dashboard, which accepts jobs, and for the run's page.

The `ssh` that forwards the port runs a script that waits for its stdin to close, so it exits with this process, even after `kill -9`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from rollcall.base.redact import remember
from rollcall.base.wait import say
from rollcall.launch.jobs.submit import Job, Jobs
from rollcall.launch.record import TOKEN_FILE, LaunchError, LaunchRecord, launch_token
from rollcall.launch.ssh.machines import Site
from rollcall.launch.ssh.shell import CONNECT_S, CONNECTED, Login, end_ssh, start_ssh
from rollcall.nodes.address import free_ports
from rollcall.view.page_process import PAGE_FILE, parse_record

DASHBOARD = "dashboard"  # key in a record's facts: the dashboard's port on the head's loopback


class Tunnel:
    """A tunnel that is open from its creation to ``close``; ``connect`` reopens a lost connection on the same port."""

    def __init__(self, login: Login, *, host: str, port: int, local_port: int | None = None) -> None:
        self.local_port = local_port or free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.local_port}"
        # A connection that the user's ssh shares would keep the port open after this process exits.
        forward = ("-L", f"127.0.0.1:{self.local_port}:127.0.0.1:{port}", "-o", "ExitOnForwardFailure=yes")
        self._words = login.words(host, "-o", "ControlPath=none", *forward)
        self._cannot = f"{host}: ssh cannot open a tunnel to its port {port}"
        self._process: subprocess.Popen[bytes] | None = None
        if why := self.connect():
            raise LaunchError(why)

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def connect(self) -> str:
        """Open the tunnel if it is not open; return why that failed, or ""."""
        if self.is_open:
            return ""
        self.close()
        # Use a file: ssh reports every refused connection there, and nobody reads a pipe while the tunnel is open.
        with tempfile.TemporaryFile() as complaints:
            process = self._process = start_ssh(self._words, stderr=complaints)
            assert process.stdin is not None and process.stdout is not None
            limit = threading.Timer(2 * CONNECT_S, end_ssh, [process])
            limit.start()
            try:
                # ssh forwards the port before it runs the script, so the script's output means that the port is open.
                os.write(process.stdin.fileno(), f"echo {CONNECTED}\nexec cat >/dev/null\n".encode())
                if any(CONNECTED.encode() in line for line in process.stdout):
                    return ""
            except BrokenPipeError:  # ssh has exited and printed why
                pass
            finally:
                limit.cancel()
            self.close()
            complaints.seek(0)
            return f"{self._cannot}\n    {complaints.read().decode(errors='replace').strip() or 'no answer'}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_ssh(process)
            process.communicate()  # closes the pipes


def open_tunnel(record: LaunchRecord, *, local_port: int | None = None) -> Tunnel:
    """Open a tunnel to the head's dashboard."""
    site = Site.of_record(record)
    if DASHBOARD not in record.facts:
        raise LaunchError(f"{record.name!r} has not started its nodes; run the same `rollcall launch` command again")
    return Tunnel(site.login, host=site.hosts[0], port=record.facts[DASHBOARD], local_port=local_port)


def open_page(record: LaunchRecord) -> Tunnel | None:
    """Open a tunnel to the run's page (``trainer.page``) and print its address; return None if no page is being served."""
    site = Site.of_record(record)
    path = shlex.quote(f"{record.run_dir}/{PAGE_FILE}")
    script = site.script(f"cat {path} 2>/dev/null </dev/null || true; echo")
    (outcome,) = site.send({site.hosts[0]: script}, timeout_s=2 * CONNECT_S)
    page = parse_record(outcome.answer or "")
    if page is None:
        return None
    remember([page.secret])
    tunnel = Tunnel(site.login, host=site.hosts[0], port=page.port)
    print(page.address(tunnel.local_port), flush=True)
    say(f"this is the page of {record.run_dir}; its address works only once")
    return tunnel


def hold_tunnel(record: LaunchRecord, *, local_port: int | None) -> None:
    """Forward the dashboard, and the run's page if it has one, to ports on this machine until Ctrl-C. A lost connection is
    reopened."""
    with ExitStack() as opened:
        tunnels = [opened.enter_context(closing(open_tunnel(record, local_port=local_port)))]
        print(tunnels[0].url, flush=True)
        say(f"forwarding the dashboard of {record.name!r} until Ctrl-C; its token is in {record.folder / TOKEN_FILE}")
        look_at = 0.0
        while True:
            if len(tunnels) == 1 and time.monotonic() >= look_at:
                if (page := open_page(record)) is not None:
                    tunnels.append(opened.enter_context(closing(page)))
                look_at = time.monotonic() + 30.0
            time.sleep(1.0)
            for tunnel in tunnels:
                if not tunnel.is_open:
                    why = tunnel.connect()
                    say(f"lost the connection; trying again: {why}" if why else "connected again")


@contextmanager
def jobs_of(record: LaunchRecord) -> Iterator[tuple[Jobs, Job | None]]:
    """Open a tunnel and yield the jobs on the launch's cluster, and the job of the launch's run if it was submitted."""
    from rollcall.process.ray.job_client import HttpClient

    token, source = launch_token(record.folder), str(record.folder / TOKEN_FILE)
    with closing(open_tunnel(record)) as tunnel:
        jobs = Jobs(HttpClient(tunnel.url, token=token, token_source=source, connect=tunnel.connect), token=token)
        yield jobs, next((job for job in jobs.jobs() if job.id == record.id), None)
