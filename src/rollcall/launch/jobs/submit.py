"""Submits and follows Ray jobs: the driver runs on the cluster's head, so the submitter may disconnect.

``ray job ...`` shows the same jobs. ``process/ray/job_client.py`` connects to the head. ``follow`` reads a job's log as it grows;
after a lost connection it continues where it stopped. A job never waits for anyone to read its log.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import secrets
import socket
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rollcall.base.errors import ClusterError
from rollcall.base.lease import read_holder
from rollcall.base.redact import Redactor, redact, remember
from rollcall.base.stop import status_words
from rollcall.base.version import __version__
from rollcall.base.wait import Wait, say
from rollcall.config import Config, dump_config
from rollcall.launch.jobs.package import RUN_FILE, Shared, build_package, resolve_paths
from rollcall.nodes.address import leaves_loopback, split_address
from rollcall.nodes.cluster import wished_cluster, wished_dashboard
from rollcall.nodes.declared import SETUP_HOOK, job_env, process_token, sealed_values
from rollcall.nodes.head import dashboard_url
from rollcall.nodes.rendezvous import Rendezvous
from rollcall.nodes.state import TOKEN, NodeRecord, current_cluster, read_record, read_token, token_path

if TYPE_CHECKING:  # it imports Ray, which reads variables at import
    from rollcall.process.ray.job_client import JobClient, JobDetails

PREFIX = "rollcall-"
LATEST = "latest"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # Ray reads it on the head; its default, 3 s, is too short for a checkpoint
START_S = 180.0  # for the head to unpack the code and start the driver
# `rollcall node` sets ROLLCALL_PYTHON; on a head that was started in a different way, the first `python` on its PATH is used.
# Ray starts the driver from a shell. `exec` replaces that shell, so that a signal for the driver does not kill a shell above it.
ENTRYPOINT = f'exec "${{ROLLCALL_PYTHON:-python}}" -m rollcall.launch.jobs.driver {RUN_FILE}'


class Job:
    def __init__(self, details: JobDetails) -> None:
        metadata = details.metadata or {}
        self.id: str = details.submission_id or ""
        self.run: str = metadata.get("run", "")  # the run's name; "" if rollcall did not submit the job
        self.status: str = details.status.value  # PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED
        self.message: str = details.message or ""
        self.started = datetime.fromtimestamp((details.start_time or 0) / 1000, UTC)  # when it was submitted
        self.ended = datetime.fromtimestamp(details.end_time / 1000, UTC) if details.end_time else None
        self.exit_code: int | None = details.driver_exit_code
        self.submitter: str = metadata.get("submitter", "")  # user@host
        self.run_dir: str = metadata.get("run_dir", "")

    @property
    def is_over(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def exit_status(self) -> int:
        """The exit status for a command that reports the job's result."""
        if self.status == "SUCCEEDED":
            return 0
        return self.exit_code if self.exit_code and 0 < self.exit_code < 256 else 1

    @property
    def state(self) -> str:
        """The job's state as a phrase that completes a sentence after the job's name."""
        if self.is_over and self.exit_code is not None:
            return status_words(self.exit_code)
        return "was stopped" if self.status == "STOPPED" else f"is {self.status}"

    def as_json(self) -> dict[str, Any]:
        times = {"started": self.started.isoformat(), "ended": self.ended and self.ended.isoformat()}
        return {**vars(self), "message": redact(self.message), **times}


class Jobs:
    """A cluster's jobs. ``shared`` is None if this machine is not one of its nodes; ``refusal`` says why the
    cluster cannot run jobs."""

    def __init__(
        self, client: JobClient, *, token: str | None, shared: Shared | None = None, refusal: str | None = None
    ) -> None:
        self._refusal = refusal
        self.where = client.where
        self.shared = shared
        self._client = client
        self._token = token  # unseals a job's secrets
        remember([token] if token else [])

    def submit(self, config: Config, *, folder: Path, environ: Mapping[str, str], job_id: str | None = None) -> Job:
        """Send the run's code and start its driver; return once Ray has accepted the job. ``job_id`` comes from ``new_id``."""
        if self._refusal is not None:
            raise ClusterError(self._refusal)
        others = self.jobs()  # raises early if the head refuses the token or does not answer
        named = {"reward.*.env or reward.*.key_env": [name for reward in config.reward for name in reward.variables]}
        if config.environment is not None:
            named["environment.env"] = config.environment.env
        environment = job_env(config.cluster, environ=environ, token=self._token, named=named)
        environment[STOP_WAIT] = str(math.ceil(config.trainer.stop_grace_s) + 300)  # s to save before Ray kills it
        config = resolve_paths(config, folder=folder, shared=self.shared)
        package = build_package(config, run_file=dump_config(config), folder=folder)
        refuse_busy(config.run.dir, others)
        job_id = job_id or new_id(config.run.name)
        self._client.call(
            "submit_package",
            package,
            entrypoint=ENTRYPOINT,
            submission_id=job_id,
            runtime_env={"env_vars": environment, "worker_process_setup_hook": SETUP_HOOK},
            metadata={
                "rollcall": __version__,
                "run": config.run.name,
                "run_dir": str(config.run.dir),
                "submitter": f"{getpass.getuser()}@{socket.gethostname()}",
            },
        )
        return self.job(job_id)

    def jobs(self) -> list[Job]:
        """Return all submitted jobs, newest first, including jobs from ``ray job submit``."""
        jobs = [Job(details) for details in self._client.call("list_jobs") if details.submission_id]
        return sorted(jobs, key=lambda job: (job.started, job.id), reverse=True)

    def find(self, job_id: str = LATEST) -> Job:
        """Return the job with this id; ``latest`` is the newest unfinished job that rollcall submitted, else the newest job."""
        jobs = self.jobs()
        wanted = [job for job in jobs if (job.id.startswith(PREFIX) if job_id == LATEST else job.id == job_id)]
        if wanted:
            return next((job for job in wanted if not job.is_over), wanted[0])
        if job_id == LATEST:
            raise ClusterError(f"the cluster at {self.where} has no jobs yet; `rollcall submit run.yaml` starts one")
        known = "\n".join(f"  {job.id}  {job.status}" for job in jobs) or "  none"
        raise ClusterError(f"the cluster at {self.where} has no job {job_id!r}; its jobs are:\n{known}")

    def job(self, job_id: str) -> Job:
        return Job(self._client.call("get_job_info", job_id))

    def logs(self, job_id: str) -> str:
        """Return everything that the job's driver has printed so far, redacted."""
        self._learn_secrets(job_id)
        return redact(self._client.call("get_job_logs", job_id))

    def follow(self, job_id: str, *, out: TextIO | None = None) -> Job:
        """Print the job's log on ``out`` (stdout) as it grows until the job is over, then return the finished job."""
        from rollcall.process.ray.job_client import Unreachable

        wait = Wait(START_S, first_s=5.0, every_s=5.0)
        while (job := self.job(job_id)).status == "PENDING":
            if not wait.again(f"waiting for the head node to start the driver: {job.message}", after_s=0.3):
                raise ClusterError(
                    f"job {job_id} has not started within {START_S:.0f} s. Ray says: {job.message}\nThe head node still has to unpack "
                    f"the code and start the driver. The job stays queued; see `rollcall status`, or run `rollcall job stop {job_id}`"
                )
        self._learn_secrets(job_id)
        redactor = Redactor()
        num_seen, heard, is_lost = 0, time.monotonic(), False

        def take(text: str) -> None:
            nonlocal num_seen, heard
            num_seen, heard = num_seen + len(text), time.monotonic()
            print(redactor.feed(text), end="", file=out, flush=True)

        while True:
            lost = self._client.tail(job_id, skip=num_seen, take=take)
            try:
                job = self.job(job_id)
                if job.is_over:
                    take(self._client.call("get_job_logs", job_id)[num_seen:])
                    print(redactor.end(), end="", file=out, flush=True)
                    return job
                heard = time.monotonic()
            except Unreachable as error:
                if time.monotonic() - heard >= 120.0:
                    raise ClusterError(
                        f"{error}\nthe job may still be running; follow it again with `rollcall job logs --follow {job_id}`"
                    ) from None
                lost = lost or str(error)
            if lost and not is_lost:
                say(f"lost the connection to {self.where} ({lost}); trying again")
            is_lost = bool(lost)
            if lost:
                time.sleep(2.0)

    def stop(self, job_id: str) -> Job:
        """Stop a job and wait until it has saved and ended; a finished job is not changed."""
        details = self._client.call("get_job_info", job_id)
        job = Job(details)
        wait = Wait(60.0 + float(_variables(details).get(STOP_WAIT, 0)), first_s=5.0, every_s=5.0)
        asked = False
        while not job.is_over:
            # Ray cannot stop a job that has no process yet, so ask again.
            asked = asked or self._client.call("stop_job", job_id)
            if not wait.again(f"waiting for {job_id} to save and exit", after_s=0.3):
                raise ClusterError(
                    f"job {job_id} is still {job.status} {wait.timeout_s:.0f} s after it was asked to stop"
                )
            job = self.job(job_id)
        return job

    def _learn_secrets(self, job_id: str) -> None:
        """Register the job's sealed values, so that this process also redacts them in the job's log."""
        if self._token:
            remember(sealed_values(_variables(self._client.call("get_job_info", job_id)), token=self._token).values())


def reach(
    name: str | None = None, *, address: str | None, rendezvous: Path | None, ray_address: str | None = None
) -> Jobs:
    """Connect to the job server of the cluster at ``address`` or in ``rendezvous``. If both are None, ``nodes/cluster.py`` chooses it.

    ``ray_address`` comes from the run file.
    """
    from rollcall.process.ray.job_client import HttpClient

    named = None if address or rendezvous is not None else wished_dashboard(name, ray_address=ray_address)
    cluster = current_cluster(name)
    record = read_record(cluster)
    head = Rendezvous(rendezvous, cluster).read() if rendezvous is not None else None
    if head is not None and record is not None and record.cluster_id != head.cluster_id:
        record = None  # this machine belongs to a different cluster with that name
    if given := address or named:
        url = (given if "://" in given else f"http://{given}").rstrip("/")
        if not re.fullmatch(r"https?://[^/\s]+", url):
            raise ClusterError(f"--address {given} is not the address of a dashboard; write http://HEAD:PORT")
        host = urllib.parse.urlsplit(url).hostname
        if record is not None and url != record.dashboard_url and host != split_address(record.head_address)[0]:
            record = None  # this node's token is sent only to its own cluster
    elif rendezvous is None:
        return _of_this_node(name, ray_address=ray_address)
    elif record is not None:
        return _of_this_node(cluster)
    elif head is None:
        raise ClusterError(f"no head of cluster {cluster!r} is published in {rendezvous}")
    else:
        url = dashboard_url(head.dashboard, node_ip=None, head_address=head.address)
        if url is None:
            raise ClusterError(
                f"the dashboard of cluster {head.cluster!r} listens only on the loopback of its head ({head.host}); run this "
                "command on a node, or start the cluster with `rollcall node --dashboard-host`"
            )
    token, source = _token(cluster, record=record, rendezvous=rendezvous, is_rays_own=named is not None)
    shared = None if record is None else Shared(num_nodes=record.num_nodes, folder=record.rendezvous)
    return Jobs(HttpClient(url, token=token, token_source=source), token=token, shared=shared)


def _of_this_node(name: str | None, *, ray_address: str | None = None) -> Jobs:
    from rollcall.process.ray.job_client import HttpClient, RelayClient

    cluster = wished_cluster(name, ray_address=ray_address)
    if cluster is None or (name is not None and read_record(name) is None):
        raise ClusterError(
            f"this machine is not a node of a cluster named {current_cluster(name)!r}; on another machine, use --address "
            f"http://HEAD:PORT (the dashboard that `rollcall node` prints on the head) with the token in {TOKEN}, or use --rendezvous "
            "DIR; for a Ray cluster that Rollcall did not start, set RAY_ADDRESS"
        )
    url, token, num_nodes = cluster.job_server()
    shared = None if num_nodes is None else Shared(num_nodes=num_nodes, folder=cluster.rendezvous)
    client = (
        RelayClient(cluster) if url is None else HttpClient(url, token=token, token_source=f"that of {cluster.title}")
    )
    refusal = None
    if leaves_loopback(split_address(cluster.head_address)[0]):
        refusal = (
            f"{cluster.title} listens only on loopback, but Ray's job server connects to it at this machine's external "
            "address; use `rollcall train`, or start the node without a loopback --node-ip"
        )
    return Jobs(client, token=token, shared=shared, refusal=refusal)


def refuse_busy(run_dir: Path, jobs: Sequence[Job]) -> None:
    """Refuse a run directory that is used by an unfinished job, or by a process on this machine that has its lease."""
    for job in jobs:
        if job.run_dir == str(run_dir) and not job.is_over:
            raise ClusterError(
                f"run.dir={run_dir} belongs to job {job.id}, which is {job.status}; follow it with `rollcall job logs --follow "
                f"{job.id}`, stop it with `rollcall job stop {job.id}`, or choose another run.dir"
            )
    holder = read_holder(run_dir)
    if holder is not None and holder.is_here and not holder.is_gone:
        raise ClusterError(
            f"another process is training in run.dir={run_dir}: {holder}; wait for it or stop it, or choose another run.dir"
        )


def _token(
    cluster: str, *, record: NodeRecord | None, rendezvous: Path | None, is_rays_own: bool
) -> tuple[str | None, str]:
    """Return the token, if one is known, and a description of its source. The token of a Rollcall cluster gives access
    to all of its nodes, so it is never sent to a Ray cluster that Rollcall did not start."""
    if record is not None:
        return read_token(cluster), str(token_path(cluster))
    if not is_rays_own and (given := os.environ.get(TOKEN)):
        return given.strip(), TOKEN
    if rendezvous is not None and (published := Rendezvous(rendezvous, cluster).read_token()):
        return published, str(Rendezvous(rendezvous, cluster).token_file)
    return process_token(), "Ray's own variables (RAY_AUTH_TOKEN)"


def new_id(run_name: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", run_name).strip("-.")[:40] or "run"
    return f"{PREFIX}{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _variables(details: JobDetails) -> dict[str, str]:
    """Return the variables that were passed to the job."""
    return (details.runtime_env or {}).get("env_vars") or {}
