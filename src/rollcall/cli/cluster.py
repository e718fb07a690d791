"""`rollcall node`, `check`, `status`, `down`: join a cluster, inspect it, leave it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from rollcall.base.words import all_of, are, counted
from rollcall.cli import Json, answer

if TYPE_CHECKING:
    from rollcall.nodes.check import Roster
    from rollcall.nodes.state import NodeRecord

Cluster = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Name of the cluster. Default: $ROLLCALL_CLUSTER, else the Ray cluster at $RAY_ADDRESS, else `default`.",
    ),
]


def node(
    rank: Annotated[int | None, Option(min=0, help="Rank of this node. Rank 0 starts the head.")] = None,
    num_nodes: Annotated[int | None, Option(min=1, help="Number of nodes in the cluster.")] = None,
    rendezvous: Annotated[Path | None, Option(metavar="DIR", help="Shared folder where nodes find the head.")] = None,
    head_address: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Address on which rank 0 listens. Needs ROLLCALL_TOKEN.")
    ] = None,
    master: Annotated[bool, Option("--master", help="The same as --rank 0.")] = False,
    worker: Annotated[int | None, Option(metavar="R", min=0, help="The same as --rank R.")] = None,
    slots: Annotated[int | None, Option(min=1, help="Slots on this node. Default: its number of GPUs.")] = None,
    node_ip: Annotated[
        str | None, Option(help="Address of this node. Default: the one from which it reaches the head.")
    ] = None,
    interface: Annotated[str | None, Option(help="Use the address of this interface.")] = None,
    dashboard_host: Annotated[str, Option(help="Address on which the dashboard of rank 0 listens.")] = "127.0.0.1",
    temp_dir: Annotated[
        Path | None, Option(metavar="DIR", help="Ray's folder for sockets and logs: a short, local path.")
    ] = None,
    tls: Annotated[
        bool, Option("--tls", help="Encrypt Ray's traffic. Set it on rank 0 or, with --head-address, on every node.")
    ] = False,
    cluster: Annotated[
        str | None, Option(metavar="NAME", help="Name of the cluster. Default: $ROLLCALL_CLUSTER, else `default`.")
    ] = None,
    timeout: Annotated[
        float | None,
        Option(
            min=0,
            help="Seconds to wait for rank 0. Default: 300, or 1800 with --run, because nodes prepare themselves first.",
        ),
    ] = None,
    block: Annotated[
        bool, Option("--block", help="Keep running until Ray on this node ends. SIGTERM, SIGHUP and Ctrl-C stop Ray.")
    ] = False,
    save_wait: Annotated[
        float, Option(min=0, help="With --block or --run: seconds that a run on this node has to save after SIGTERM.")
    ] = 25.0,
    run: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Keep running, and train this run file once all nodes have joined. Exits with the run's status.",
        ),
    ] = None,
    tied: Annotated[bool, Option("--tied", hidden=True, help="Clean up if stdin closes while it starts.")] = False,
) -> None:
    """Start Ray on this node. Rank 0 starts the cluster, and the other nodes join it.

    Without --rank, --master or --worker, the rank comes from RANK, NODE_RANK, SLURM_NODEID, SLURM_PROCID,
    SKYPILOT_NODE_RANK or DSTACK_NODE_RANK, and the number of nodes from the matching variable.

    \b
    Examples:
      rollcall node --rank 0 --num-nodes 4 --rendezvous /shared/rollcall
      rollcall node --rank 3 --num-nodes 4 --rendezvous /shared/rollcall --slots 8
      ROLLCALL_TOKEN=... rollcall node --master --num-nodes 2 --head-address node0:6380
      ROLLCALL_TOKEN=... rollcall node --worker 1 --head-address node0:6380
      srun --ntasks-per-node=1 rollcall node --run run.yaml --rendezvous /shared/rollcall
    """
    from rollcall.base.stop import heed
    from rollcall.nodes.bootstrap import NodeRequest, start_node
    from rollcall.nodes.foreground import hold
    from rollcall.nodes.machine import tied_to_stdin
    from rollcall.nodes.rank import find_identity
    from rollcall.nodes.state import current_cluster

    whole = None
    if run is not None:
        from rollcall.launch.whole_run import WholeRun

        whole = WholeRun(run)
    timeout_s = timeout if timeout is not None else whole.join_s if whole else 300.0
    of_run = whole.num_nodes if whole else None
    rank, num_nodes = find_identity(
        rank=rank, master=master, worker=worker, num_nodes=num_nodes, environ=os.environ, of_run=of_run
    )
    request = NodeRequest(
        cluster=current_cluster(cluster),
        rank=rank,
        num_nodes=num_nodes,
        rendezvous=rendezvous,
        head_address=head_address,
        node_ip=node_ip,
        interface=interface,
        slots=slots,
        temp_dir=temp_dir,
        dashboard_host=dashboard_host,
        tls=tls,
        timeout_s=timeout_s,
    )
    # After a signal during startup, nothing is left behind, and the exit status says that the run can be resumed.
    with heed():
        if whole is not None:
            request = whole.get_ready(request)
        with tied_to_stdin() if tied else nullcontext():
            record, was_running = start_node(request)
        _introduce(record, was_running=was_running)
        if whole is not None:
            raise typer.Exit(whole.stay(record, timeout_s=timeout_s, save_s=save_wait))
        if block:
            hold(record, save_s=save_wait)


def check(
    num_slots: Annotated[int, Argument(metavar="N", min=1, help="Number of accelerators in the whole cluster.")],
    timeout: Annotated[float, Option(min=0, help="Seconds to wait for them.")] = 300.0,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Wait until exactly N accelerators have joined. Names the ranks that are missing.

    \b
    Examples:
      rollcall check 32
      rollcall check 32 --timeout 60 --json
    """
    from rollcall.nodes.check import wait_for_slots
    from rollcall.nodes.cluster import find_cluster

    found = wait_for_slots(find_cluster(cluster), num_slots=num_slots, timeout_s=timeout)
    here = f"{all_of(num_slots, 'accelerator')} {are(num_slots)} present, on {counted(len(found.alive), 'node')}"
    answer(_as_json(found), lambda _: print(here), as_json=as_json)


def status(
    run_dir: Annotated[
        Path | None, Argument(metavar="[RUN_DIR]", help="Show this run instead. Needs no cluster.")
    ] = None,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """List the nodes of the cluster: rank, host, address, slots, memory, alive or dead.

    With a run directory: show what the run is doing, the phases of its last steps, and which process is using the directory.

    \b
    Examples:
      rollcall status
      rollcall status runs/arithmetic
      rollcall status --cluster mine --json
    """
    if run_dir is not None:
        from rollcall.cli.runs import show_run

        show_run(run_dir, as_json=as_json)
        return
    from rollcall.nodes.check import list_nodes
    from rollcall.nodes.cluster import find_cluster

    found = list_nodes(find_cluster(cluster))
    answer(_as_json(found), lambda _: _show(found), as_json=as_json)


def down(
    cluster: Cluster = None,
    keep_logs: Annotated[
        bool, Option("--keep-logs", help="Keep Ray's logs until the next `rollcall node` or `down`.")
    ] = False,
) -> None:
    """Stop what this cluster started on this node, and nothing else. A Ray cluster that Rollcall did not start is left alone.

    \b
    Examples:
      rollcall down
      rollcall down --cluster mine
    """
    from rollcall.nodes.bootstrap import stop_node
    from rollcall.nodes.cluster import find_cluster
    from rollcall.nodes.state import state_dir
    from rollcall.reward.confine import sweep_folders

    meant = find_cluster(cluster)
    if not meant.is_ours:
        how = f"run `{meant.leave_command}` on a node to stop Ray there"
        print(f"nothing was stopped, because Rollcall did not start {meant.title}; {how}")
        return
    folder = state_dir(meant.name)
    count = stop_node(meant.name, keep_logs=keep_logs)
    sweep_folders()  # left by a killed run
    stopped = f"stopped {counted(count, 'process')} of {meant.title}"
    what = stopped if count else f"no process of {meant.title} is running on this node"
    print(f"{what}; its logs are in {folder}" if keep_logs and folder.exists() else what)


def here(
    cluster: Cluster = None, interface: Annotated[str | None, Option(help="Use the address of this interface.")] = None
) -> None:
    """Describe this machine for a launcher, as one JSON object: version, rank, and the address that a head on it would have.

    \b
    Example:
      rollcall here --cluster mine
    """
    from rollcall.nodes.machine import look_here
    from rollcall.nodes.state import current_cluster

    print(look_here(current_cluster(cluster), interface=interface).model_dump_json())


def _introduce(record: NodeRecord, *, was_running: bool) -> None:
    slots = counted(record.slots, "GPU" if record.accelerator == "gpu" else "logical slot")
    print("Ray is already running here, as part of this cluster" if was_running else "Ray started")
    for label, value in [
        ("cluster", f"{record.cluster} (id {record.cluster_id})"),
        ("node", f"{record.node_ip}, rank {record.rank} of {record.num_nodes}, {slots}"),
        ("head", record.head_address),
        ("dashboard", record.dashboard_url or "on the head's loopback only"),
        ("logs", f"{record.temp_dir}/session_latest/logs"),
    ]:
        print(f"  {label:<10} {value}", flush=True)


def _show(found: Roster) -> None:
    from rich.table import Table

    from rollcall.base.screen import Screen

    table = Table("rank", "host", "address", "slots", "memory", "state", box=None, padding=(0, 2, 0, 0))
    for row in found.nodes:
        state = ("alive, head" if row.is_head else "alive") if row.alive else "dead"
        rank = "?" if row.rank is None else str(row.rank)
        slots, memory = f"{row.slots} {row.accelerator}", f"{row.memory_gib:.1f} GiB"
        table.add_row(rank, row.host, row.address, slots, memory, state)
    for rank in sorted(set(found.missing) - {row.rank for row in found.nodes}):
        table.add_row(str(rank), "-", "-", "-", "-", "not joined")
    console = Screen(soft_wrap=True)
    ours = f"cluster {found.cluster} (id {found.cluster_id}), head {found.head_address}"
    plain = found.title if found.has_token else f"{found.title}, which has no token"
    console.print(ours if found.cluster_id else plain, markup=False)
    console.print(table)
    slots, nodes = counted(found.num_slots, "slot"), counted(found.num_nodes, "node")
    console.print(f"{slots} on {len(found.alive)} of {nodes}", markup=False)


def _as_json(found: Roster) -> dict[str, Any]:
    return {**asdict(found), "num_slots": found.num_slots, "missing": found.missing}
