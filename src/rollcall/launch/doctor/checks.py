"""Checks nodes' facts for problems that would break a run. Each check is a pure function of the nodes' answers. A finding is one
sentence with the problem and the command that fixes it.

If nodes differ, the findings name the nodes that differ from the majority or, in a tie, from the head.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Literal

from rollcall.base.errors import PlacementError
from rollcall.base.words import counted, ranges
from rollcall.config import Config
from rollcall.nodes.address import FIRST_PORT
from rollcall.nodes.check import Roster
from rollcall.nodes.cluster import Cluster
from rollcall.nodes.head import NodeInfo
from rollcall.plan.judge import plan_run
from rollcall.plan.memory import GIB

MUST_AGREE = ("rollcall-rl", "torch", "transformers")  # Ray refuses a node with a different version of Python or Ray
MIN_FREE = GIB  # free space that a disk needs if the run writes to it
LAST_PORT = 65535

Severity = Literal["breaks", "warns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    purpose: str
    path: str
    free: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node's answer to the probe, with the node's rank and address in the cluster."""

    rank: int
    host: str
    address: str
    slots: int
    accelerator: str
    is_head: bool
    python: str
    executable: str
    packages: Mapping[str, str | None]
    torch_build: str  # such as "CUDA 13.0" or "the CPU"
    disks: tuple[Disk, ...]
    memory_total: int
    memory_available: int
    shm_total: int
    gpus: tuple[Gpu, ...]
    gpu_error: str | None
    missing_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    node: int | None  # a rank; None means the whole cluster
    host: str | None
    severity: Severity
    what: str


def find(node: NodeFacts | NodeInfo | None, what: str, *, severity: Severity = "breaks") -> Finding:
    """Build a finding. ``node`` is None if it concerns the whole cluster."""
    rank, host = (None, None) if node is None else (node.rank, node.host)
    return Finding(node=rank, host=host, severity=severity, what=what)


def judge_nodes(nodes: Sequence[NodeFacts], *, checkpoint_bytes: int | None) -> list[Finding]:
    """Return all findings about the facts of a cluster's nodes."""
    found = [*judge_versions(nodes)]
    for node in nodes:
        found += [*judge_disks(node, checkpoint_bytes=checkpoint_bytes), *judge_memory(node), *judge_gpus(node)]
        for path in node.missing_paths:
            fix = f"run `rsync -a {path}/ {node.host}:{path}/`, or put it into the shared folder"
            found.append(find(node, f"{path} does not exist on this node; {fix}"))
    return found


def judge_roster(roster: Roster, cluster: Cluster) -> Iterator[Finding]:
    for rank in roster.missing:
        what = f"rank {rank} of {roster.num_nodes} has not joined, or has died; on its host, run `{cluster.join_command(rank)} ...`"
        yield Finding(node=rank, host=None, severity="breaks", what=what)
    if not roster.has_token and not all(ipaddress.ip_address(node.address).is_loopback for node in roster.alive):
        what = f"{roster.title} has no token, so anyone who reaches its ports can run code on its nodes"
        fix = "start its nodes with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN"
        yield find(None, f"{what}; {fix}", severity="warns")


def judge_slots(config: Config, roster: Roster, cluster: Cluster) -> Iterator[Finding]:
    """Compare the run file's nodes with the nodes that have joined."""
    wanted = config.cluster.slots_per_node if config.cluster else ()
    for node in roster.alive:
        if node.rank is not None and node.rank < len(wanted) and node.slots < wanted[node.rank]:
            more = cluster.more_slots(wanted[node.rank])
            yield find(
                node,
                f"offers {node.slots} slots, but the run file has {wanted[node.rank]} for node {node.rank}; set cluster.nodes to the "
                f"number that the node offers, or run `{cluster.leave_command}`, then `{more}` on {node.host}",
            )
    if len(wanted) > roster.num_nodes:
        yield find(
            None,
            f"the run file asks for {counted(len(wanted), 'node')}, but the cluster has {roster.num_nodes}; set "
            f"cluster.num_nodes={roster.num_nodes}, or add nodes with `{cluster.join_command('R')} ...`",
        )


def judge_plan(config: Config, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield the problems that `rollcall plan` finds with the nodes' actual GPUs."""
    cards = [gpu.memory_total for node in nodes for gpu in node.gpus]
    try:
        problems = plan_run(config, card_gib=min(cards) / GIB if cards else None).problems
    except PlacementError as error:
        problems = (str(error),)
    for problem in problems:
        yield find(None, f"{problem} (`rollcall plan` draws the placement)")


def judge_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Report the nodes whose packages or torch build differ from those of most nodes."""
    for name in MUST_AGREE:
        usual = _majority(nodes, lambda node, name=name: node.packages[name])
        for node in nodes:
            version = node.packages[name]
            if version is None or version != usual:
                what = f"is version {version}, but the other nodes have {usual}" if version else "is not installed"
                wanted = f"{name}=={usual}" if usual else name
                yield find(node, f"{name} {what}; run `{node.executable} -m pip install '{wanted}'` on that node")
    usual = _majority(nodes, lambda node: node.torch_build)
    for node in nodes:
        if node.torch_build != usual:
            what = f"torch is built for {node.torch_build} here, but for {usual} on the other nodes"
            yield find(node, f"{what}; reinstall it from the index that the other nodes used")


def _majority(nodes: Sequence[NodeFacts], value: Callable[[NodeFacts], str | None]) -> str | None:
    """Return the most common value among the nodes. In a tie, prefer the head's value."""
    return mode(value(node) for node in sorted(nodes, key=lambda node: not node.is_head))


def judge_torch(node: NodeFacts) -> Iterator[Finding]:
    """Check torch on a single machine, which has no other node to compare it with."""
    if node.packages["torch"] is None:
        yield find(node, f"torch is not installed; run `{node.executable} -m pip install torch`")
    elif node.gpus and node.torch_build == "the CPU":
        what = f"a GPU was found ({node.gpus[0].name}), but torch {node.packages['torch']} is a CPU build"
        yield find(node, f"{what}; reinstall it from an index with CUDA builds")


def judge_disks(node: NodeFacts, *, checkpoint_bytes: int | None) -> Iterator[Finding]:
    for disk in node.disks:
        need = max(MIN_FREE, checkpoint_bytes or 0) if disk.purpose == "run.dir" else MIN_FREE
        if disk.free < need:
            whose = "one checkpoint of this run takes" if need > MIN_FREE else "a run needs at least"
            what = f"{disk.path} ({disk.purpose}) has {disk.free / GIB:.1f} GiB free, but {whose} {need / GIB:.1f} GiB"
            yield find(node, f"{what}; free some space, or choose another folder")


def judge_memory(node: NodeFacts) -> Iterator[Finding]:
    if node.memory_available < 0.05 * node.memory_total:  # Ray's own limit
        free = f"{node.memory_available / GIB:.1f} of {node.memory_total / GIB:.1f} GiB"
        what = f"only {free} of memory is available, so Ray would kill workers"
        yield find(node, f"{what}; `ps aux --sort=-rss | head` shows what uses it")
    if node.gpus and node.shm_total < 128 << 20:  # a container has 64 MiB by default
        shm = f"/dev/shm is only {node.shm_total / (1 << 20):.0f} MiB in size, which is too little for NCCL"
        yield find(node, f"{shm}; make it larger, or start the container with --shm-size=16g")


def judge_fit(node: NodeFacts, state_bytes: int | None) -> Iterator[Finding]:
    """Check a single machine's memory. ``state_bytes`` is the size of the weights and the optimizer state, without gradients.
    Saving copies them to host memory. Without a GPU, host memory also contains the originals and the gradients."""
    need = 0 if state_bytes is None else state_bytes if node.gpus else state_bytes * 7 / 3
    if need > node.memory_available:
        what = (
            "the copy for a checkpoint takes"
            if node.gpus
            else "weights, gradients, optimizer state and a checkpoint's copy take"
        )
        yield find(
            node,
            f"{what} {need / GIB:.1f} GiB, but only {node.memory_available / GIB:.1f} GiB of memory is available; train an adapter "
            "(model.lora.rank=16), or a smaller model",
        )


def judge_gpus(node: NodeFacts) -> Iterator[Finding]:
    if node.gpu_error is not None:
        yield find(node, f"{node.gpu_error}; `sudo dmesg | grep -i xid` shows why")
    elif node.accelerator == "gpu" and len(node.gpus) < node.slots and node.gpus:
        what = f"the node offers {node.slots} slots, but nvidia-smi lists {len(node.gpus)} GPUs"
        yield find(node, f"{what}; run `rollcall node` again")
    for gpu in node.gpus:
        card = f"GPU {gpu.index} ({gpu.name})"
        if gpu.memory_used > GIB:
            held = f"{card} has {gpu.memory_used / GIB:.1f} GiB in use; `nvidia-smi -i {gpu.index}` shows which process uses it"
            yield find(node, held, severity="warns")  # the user's own run may be using it, and may be about to end


def judge_reach(
    nodes: Sequence[NodeFacts], *, failed: Mapping[int, Sequence[tuple[int, int, str]]]
) -> Iterator[Finding]:
    """Report failed connections. ``failed`` lists, for each rank, the (rank, port, why) of each port that it could not reach."""
    by_rank = {node.rank: node for node in nodes}
    for rank, rows in failed.items():
        for target in sorted({row[0] for row in rows}):
            ports, whys = zip(*((str(port), why) for other, port, why in rows if other == target), strict=True)
            node, other = by_rank[rank], by_rank[target]
            fix = f"sudo ufw allow proto tcp from {node.address} to any port {FIRST_PORT}:{LAST_PORT}"
            where = f"rank {target} ({other.address}) at port {', '.join(ports)}"
            yield find(node, f"cannot connect to {where}: {whys[0]}; on {other.host} run `{fix}`")


def firewall_rule(nodes: Sequence[NodeFacts], *, head_port: int) -> str:
    """Return a command for each node, to be run as root, that lets only these nodes connect to the ports of Ray and the run.

    Ray (2.60) listens on all of a node's interfaces, whatever address it is given. A single malformed call (``RaySyncer/StartSync``
    without metadata) crashes the head or a raylet before Ray checks the token. TLS or a firewall prevents this.
    """
    ports = f"{FIRST_PORT}-{LAST_PORT}"
    if not FIRST_PORT <= head_port <= LAST_PORT:
        ports = f"{{ {head_port}, {ports} }}"
    rules = ["add table inet rollcall", "add chain inet rollcall input { type filter hook input priority 0; }"]
    for version, name in {4: "ip", 6: "ip6"}.items():
        addresses = sorted({node.address for node in nodes if ipaddress.ip_address(node.address).version == version})
        others = f"{name} saddr != {{ {', '.join(addresses)} }}" if addresses else f"meta nfproto ipv{version}"
        rules.append(f'add rule inet rollcall input iif != "lo" {others} tcp dport {ports} ct state new drop')
    return "nft '" + "; ".join(rules) + "'"


def judge_shared(
    nodes: Sequence[NodeFacts], folder: str, *, wrote: Mapping[int, str | None], unseen: Mapping[int, Mapping[int, str]]
) -> Iterator[Finding]:
    """Report problems with the shared folder. ``wrote`` has the reason why a rank could not write, or None; ``unseen`` has the
    reason why a rank (the first key) does not see another rank's file (the second key)."""
    for node in nodes:
        why_not, writers = wrote.get(node.rank), unseen.get(node.rank)
        if why_not:
            yield find(
                node,
                f"cannot write to the shared folder {folder}: {why_not}; `findmnt -T {folder}` on that node shows how it is mounted",
            )
        elif writers:
            yield find(
                node,
                f"does not see the files in {folder} that rank {ranges(sorted(writers))} wrote: {next(iter(writers.values()))}; mount "
                "the same file system on all nodes, or choose another run.dir",
            )


def judge_bandwidth(*, backend: str, bytes_per_s: float) -> Iterator[Finding]:
    if bytes_per_s < {"gloo": 0.1e9, "nccl": 1e9}[backend]:
        what = f"an all-reduce between the nodes reaches only {bytes_per_s / 1e9:.2f} GB/s over {backend}; set --interface to the fast network"
        yield find(None, what, severity="warns")
