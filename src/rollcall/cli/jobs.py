"""`rollcall submit`, `rollcall job` and `rollcall env`: manage runs on a cluster from anywhere."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from rollcall.base.stop import INTERRUPTED, STOPPED
from rollcall.base.wait import say
from rollcall.cli import FAILED, Json, Overrides, RunFile, answer, local_time, print_table, read_run, reported
from rollcall.cli.cluster import Cluster
from rollcall.observe.progress import format_duration

if TYPE_CHECKING:
    from rollcall.launch.jobs.submit import Job, Jobs
    from rollcall.launch.processes import NodeView

Address = Annotated[
    str | None, Option(metavar="URL", help="Dashboard of the cluster. Default: that of this node's cluster.")
]
Meeting = Annotated[
    Path | None,
    Option(
        "--rendezvous", metavar="DIR", help="Shared folder of the cluster. The address and the token are read from it."
    ),
]
JobId = Annotated[
    str, Argument(metavar="[ID|latest]", help="Id of a job. Default: the newest unfinished job, else the newest job.")
]


def submit(
    file: RunFile = None,
    overrides: Overrides = None,
    no_wait: Annotated[bool, Option("--no-wait", help="Return as soon as the job is submitted.")] = False,
    page: Annotated[bool, Option("--page", help="Like trainer.page=true: the head serves the run's page.")] = False,
    address: Address = None,
    cluster: Cluster = None,
    rendezvous: Meeting = None,
    as_json: Json = False,
) -> None:
    """Run a run file on a cluster. The driver runs on the cluster, so this machine may disconnect.

    The code is sent along: this copy of rollcall, the run file, and the modules of its rewards. Data, weights and the run
    directory are not sent, so write their paths as the nodes see them. cluster.env and cluster.env_pass set variables for the
    run. The command follows the log and exits with the status of the job; Ctrl-C leaves the job running. On a machine that is
    not a node, the token comes from ROLLCALL_TOKEN, from --rendezvous or from RAY_AUTH_TOKEN.

    \b
    Examples:
      rollcall submit run.yaml
      rollcall submit run.yaml run.dir=/shared/runs/one actor.lr=1e-6 --no-wait
      rollcall submit run.yaml --address http://10.0.0.1:8265
      rollcall submit run.yaml --page    the log shows the page's address; `rollcall tunnel` forwards it
      RAY_ADDRESS=head:6379 rollcall submit run.yaml    to a Ray cluster that you started
    """
    from rollcall.launch.jobs.submit import reach
    from rollcall.plan.judge import workable_plan

    config = read_run(file, [*(overrides or []), *(["trainer.page=true"] if page else [])])
    if config.cluster is not None:
        workable_plan(config, config.cluster)  # if the run cannot work, the error appears here, not in a remote log
    wished = config.cluster.ray_address if config.cluster is not None else None
    jobs = reach(cluster, address=address, rendezvous=rendezvous, ray_address=wished)
    job = jobs.submit(config, folder=Path.cwd(), environ=os.environ)
    say(f"submitted {job.id} to {jobs.where}")
    if no_wait:
        say(f"follow it with `rollcall job logs --follow {job.id}`, or stop it with `rollcall job stop {job.id}`")
    else:
        job = _follow(jobs, job.id, out=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(job.as_json()))
    elif no_wait:
        print(job.id)
    if job.is_over:
        _end_as(job)


def job_list(
    address: Address = None, cluster: Cluster = None, rendezvous: Meeting = None, as_json: Json = False
) -> None:
    """List the jobs of the cluster, the newest first.

    \b
    Examples:
      rollcall job list
      rollcall job list --json
    """
    jobs = _jobs(cluster, address, rendezvous).jobs()
    rows = [("ID", "RUN", "STATUS", "SUBMITTED", "TOOK", "BY")]
    rows += [(job.id, job.run, job.status, local_time(job.started), _took(job), job.submitter) for job in jobs]
    answer({"jobs": [job.as_json() for job in jobs]}, lambda _: print_table(rows), as_json=as_json)


def job_status(
    job_id: JobId = "latest",
    address: Address = None,
    cluster: Cluster = None,
    rendezvous: Meeting = None,
    as_json: Json = False,
) -> None:
    """Show the state of a job.

    \b
    Examples:
      rollcall job status
      rollcall job status rollcall-gsm8k-1115-093000-1f2e --json
    """
    answer(_jobs(cluster, address, rendezvous).find(job_id), _show, as_json=as_json)


def job_logs(
    job_id: JobId = "latest",
    follow: Annotated[bool, Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    address: Address = None,
    cluster: Cluster = None,
    rendezvous: Meeting = None,
) -> None:
    """Print the log of a job's driver.

    \b
    Examples:
      rollcall job logs
      rollcall job logs --follow latest
    """
    jobs = _jobs(cluster, address, rendezvous)
    job = jobs.find(job_id)
    if follow:
        _end_as(_follow(jobs, job.id, out=sys.stdout))
    else:
        print(jobs.logs(job.id), end="")


def job_stop(
    job_id: JobId = "latest",
    address: Address = None,
    cluster: Cluster = None,
    rendezvous: Meeting = None,
    as_json: Json = False,
) -> None:
    """Stop a job after it has saved. Submit the same run again to continue.

    \b
    Examples:
      rollcall job stop
      rollcall job stop rollcall-gsm8k-1115-093000-1f2e
    """
    jobs = _jobs(cluster, address, rendezvous)
    answer(jobs.stop(jobs.find(job_id).id), lambda job: print(f"{job.id} is {job.status}"), as_json=as_json)


def env(file: RunFile = None, overrides: Overrides = None, cluster: Cluster = None, as_json: Json = False) -> None:
    """Show the environment variables of the workers on each node, and where each comes from. Secrets are redacted.

    Run this command on a node of the cluster. It also lists variables in this shell that a run may need but that do not reach
    the workers.

    \b
    Examples:
      rollcall env run.yaml
      rollcall env run.yaml 'cluster.env_pass=[WANDB_API_KEY, NCCL_*]' --json
    """
    from rollcall.launch.processes import view_workers
    from rollcall.nodes.cluster import find_cluster
    from rollcall.nodes.declared import hint, missed, submitted_env

    section = read_run(file, overrides).cluster
    submitted = submitted_env(section)
    say("asking a worker on each node")
    meant = find_cluster(cluster, ray_address=section.ray_address if section is not None else None)
    views = view_workers(meant, section, submitted=submitted)
    answer({"nodes": [asdict(view) for view in views]}, lambda _: _print_environment(views), as_json=as_json)
    given = {seen.name for view in views for seen in view.variables if seen.value is not None}
    if names := missed(os.environ, given=given):
        say(hint(names))
    if any(seen.wanted is not None for view in views for seen in view.variables):
        raise typer.Exit(FAILED)


job = typer.Typer(help="List, watch and stop the jobs of a cluster.", no_args_is_help=True, rich_markup_mode=None)
for _name, _command in (("list", job_list), ("status", job_status), ("logs", job_logs), ("stop", job_stop)):
    job.command(_name)(reported(_command))


def _jobs(cluster: str | None, address: str | None, rendezvous: Path | None) -> Jobs:
    from rollcall.launch.jobs.submit import reach

    return reach(cluster, address=address, rendezvous=rendezvous)


def _follow(jobs: Jobs, job_id: str, *, out: Any) -> Job:
    """Show the job's log until the job ends. Ctrl-C ends this command, but not the job."""
    try:
        return jobs.follow(job_id, out=out)
    except KeyboardInterrupt:
        how = f"follow it with `rollcall job logs --follow {job_id}`, or stop it with `rollcall job stop {job_id}`"
        say(f"\n{job_id} is still running on the cluster; {how}")
        raise typer.Exit(INTERRUPTED) from None


def _end_as(job: Job) -> None:
    """Exit with the job's exit status."""
    if job.status == "SUCCEEDED":
        say(f"{job.id} succeeded")
        return
    # Ray's message about a failed driver repeats the end of the log, which was just shown.
    why = f": {job.message}" if job.status == "FAILED" and not job.exit_code and job.message else ""
    is_stopped = job.status == "STOPPED" or job.exit_code == STOPPED
    say(f"{'' if is_stopped else 'error: '}{job.id} {job.state}{why}")
    raise typer.Exit(job.exit_status)


def _show(job: Job) -> None:
    print_table([
        ("job", job.id), ("run", job.run), ("status", job.status),
        ("submitted", f"{local_time(job.started)} by {job.submitter}"),
        ("took", _took(job)), ("run dir", job.run_dir), ("Ray says", job.message),
    ])  # fmt: skip


def _print_environment(views: list[NodeView]) -> None:
    for view in views:
        print(f"node {view.rank} ({view.address})")
        rows = []
        for seen in view.variables:
            value = "not set" if seen.value is None else seen.value
            wrong = f"   BUT DECLARED AS: {seen.wanted}" if seen.wanted is not None else ""
            rows.append((f"  {seen.name}", seen.source, value + wrong))
        print_table(rows)


def _took(job: Job) -> str:
    return format_duration(((job.ended or datetime.now(UTC)) - job.started).total_seconds())
