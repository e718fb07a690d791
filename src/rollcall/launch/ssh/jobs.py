"""The run of an ssh launch: a job of its cluster, reached through a tunnel to the head's dashboard."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rollcall.errors import ClusterError
from rollcall.jobs.submit import Job, Jobs
from rollcall.launch.errors import LaunchError
from rollcall.launch.record import TOKEN_FILE, LaunchRecord, launch_token
from rollcall.launch.ssh.shell import CONNECT_S
from rollcall.launch.ssh.site import Site
from rollcall.launch.ssh.tunnel import Tunnel, TunnelChannel
from rollcall.redact import remember
from rollcall.view.address import PAGE_FILE, parse_record
from rollcall.wait import say

JOB = "job"  # the kind of its part
DASHBOARD = "dashboard"  # the fact with its port on the head's loopback
LOOK_AGAIN_S = 1.0  # after a tunnel
LOOK_FOR_PAGE_S = 30.0  # while the run serves none


@contextmanager
def jobs_of(record: LaunchRecord) -> Iterator[Jobs]:
    """The jobs of the launch's cluster, through a tunnel that is open as long as the block runs."""
    token = launch_token(record.folder)
    with open_tunnel(record) as tunnel:
        channel = TunnelChannel(tunnel, token=token, token_source=str(record.folder / TOKEN_FILE))
        yield Jobs(channel, token=token)


def hold_tunnel(record: LaunchRecord, *, local_port: int | None) -> None:
    """The dashboard on a port of this machine until Ctrl-C, and beside it the page of the run where it has one; a connection that
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
                    _reopen(tunnel)


def _reopen(tunnel: Tunnel) -> None:
    try:
        tunnel.reopen()
        say("connected again")
    except LaunchError as error:
        say(f"the connection is lost, trying again: {error}")


def open_page(record: LaunchRecord) -> Tunnel | None:
    """A tunnel to the page that the run serves (``trainer.page``), with its address printed; None: it serves none now."""
    site = Site.of_record(record)
    path = shlex.quote(f"{record.run_dir}/{PAGE_FILE}")
    (outcome,) = site.send(
        {site.head: site.script(f"cat {path} 2>/dev/null </dev/null || true")}, timeout_s=2 * CONNECT_S
    )
    page = parse_record(outcome.out) if outcome.is_good else None
    if page is None:
        return None
    remember([page.secret])
    tunnel = Tunnel(site.login, host=site.head, port=page.port)
    print(page.address(tunnel.local_port), flush=True)
    say(f"the page of {record.run_dir}; the address works once")
    return tunnel


def open_tunnel(record: LaunchRecord, *, local_port: int | None = None) -> Tunnel:
    site = Site.of_record(record)
    if DASHBOARD not in record.facts:
        raise LaunchError(f"{record.name!r} has not started its nodes; run the same `rollcall launch` again")
    return Tunnel(site.login, host=site.head, port=int(record.facts[DASHBOARD]), local_port=local_port)


def find_job(jobs: Jobs, job_id: str) -> Job | None:
    return next((job for job in jobs.jobs() if job.id == job_id), None)


def submitted(record: LaunchRecord, jobs: Jobs) -> str:
    """The job of its run; raises where the launch was cut off before that."""
    if not job_id_of(record) or find_job(jobs, job_id_of(record)) is None:
        raise LaunchError(f"{record.name!r} has not submitted its run; run the same `rollcall launch` again")
    return job_id_of(record)


def is_running(record: LaunchRecord) -> bool:
    """Whether its run is not over. A head that does not answer has none."""
    if not job_id_of(record) or DASHBOARD not in record.facts:
        return False
    try:
        with jobs_of(record) as jobs:
            job = find_job(jobs, job_id_of(record))
    except (LaunchError, ClusterError):
        return False
    return job is not None and not job.is_over


def job_id_of(record: LaunchRecord) -> str:
    return next((part.id for part in record.parts if part.kind == JOB), "")


def stop_job(record: LaunchRecord) -> None:
    """The run saves first. A head that does not answer has no run to save."""
    job_id = job_id_of(record)
    if not job_id or DASHBOARD not in record.facts:
        return
    try:
        with jobs_of(record) as jobs:
            if find_job(jobs, job_id) is not None:
                jobs.stop(job_id)
    except (LaunchError, ClusterError) as error:
        say(f"{job_id} was not told to save: {error}")
