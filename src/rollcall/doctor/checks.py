"""Facts judged into findings. Pure: each function takes what nodes said and yields what is wrong with it.

A finding names the node, what is wrong, why it matters and the command that fixes it. It ``breaks`` the run or ``warns``.
Where nodes differ, the odd one out is the one that differs from most of the others; in a tie, from the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rollcall.nodes.head import NodeInfo
from rollcall.words import ranges

GIB = 1 << 30
MUST_AGREE = ("rollcall-rl", "torch", "transformers", "ray")
SHOULD_AGREE = ("numpy",)
WHY_AGREE = {
    "rollcall-rl": "workers would run other code than the controller expects",
    "torch": "ranks of one model must run the same kernels and speak the same collectives",
    "transformers": "the same model directory or tokenizer may load as something else there",
    "ray": "nodes of one cluster must run the same Ray",
    "numpy": "arrays are pickled between nodes",
}
MAX_SKEW_S = 1.0
MIN_FREE = GIB  # of a disk that is written to
RAY_DISK_LIMIT = 0.95  # share in use from which Ray makes no more objects on disk
RAY_MEMORY_LIMIT = 0.95  # share in use from which Ray kills workers
MIN_OPEN_FILES = 8192
SLOW_SHARED_S = 5.0
SLOW_LINK = {"gloo": 0.1e9, "nccl": 1e9}  # bytes per second
GPU_IN_USE = GIB  # bytes of a card that somebody holds

Severity = Literal["breaks", "warns"]
T = TypeVar("T", bound=Hashable)


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
    ecc_uncorrected: int | None
    temperature: int | None
    slowed_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one node said of itself."""

    rank: int
    host: str
    address: str
    slots: int
    accelerator: str
    is_head: bool
    python: str
    executable: str
    packages: Mapping[str, str | None]
    torch_cuda: str | None
    torch_hip: str | None
    driver: str | None
    rocm: str | None
    disks: tuple[Disk, ...]
    memory_total: int
    memory_available: int
    open_files: int
    shm_total: int
    gpus: tuple[Gpu, ...]
    interface: str | None
    link_mbit: int | None
    missing_paths: tuple[str, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    node: int | None  # rank; None: the cluster
    host: str | None
    severity: Severity
    what: str
    why: str
    fix: str


def find(node: NodeFacts | NodeInfo | None, severity: Severity, what: str, *, why: str, fix: str) -> Finding:
    """``node``: None for what concerns the whole cluster."""
    rank, host = (None, None) if node is None else (node.rank, node.host)
    return Finding(node=rank, host=host, severity=severity, what=what, why=why, fix=fix)


def judge_nodes(nodes: Sequence[NodeFacts], *, checkpoint_bytes: int | None) -> list[Finding]:
    """Everything that the facts of the nodes show."""
    findings = [*judge_python(nodes), *judge_packages(nodes), *judge_gpu_software(nodes), *judge_links(nodes)]
    for node in nodes:
        findings += judge_disks(node, checkpoint_bytes=checkpoint_bytes)
        findings += [*judge_limits(node), *judge_gpus(node), *judge_paths(node)]
    return findings


def judge_python(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    usual = majority(nodes, lambda node: node.python)
    for node in nodes:
        if node.python != usual:
            breaks = node.python.split(".")[:2] != usual.split(".")[:2]
            yield find(
                node,
                "breaks" if breaks else "warns",
                f"Python {node.python}, the others have {usual}",
                why="functions and data are pickled between nodes, and one Python cannot read another's",
                fix=f"uv python install {usual}, then make the environment of {node.executable} again with it",
            )


def judge_packages(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for name in (*MUST_AGREE, *SHOULD_AGREE):
        usual = majority(nodes, lambda node, name=name: node.packages.get(name))
        for node in nodes:
            version = node.packages.get(name)
            if version is None and name in MUST_AGREE:
                wanted = f"=={usual}" if usual else ""
                what, why = f"{name} is not installed", "workers on this node cannot start"
            elif version != usual and version is not None and usual is not None:
                wanted, what = f"=={usual}", f"{name} {version}, the others have {usual}"
                why = WHY_AGREE[name]
            else:
                continue
            fix = f"{node.executable} -m pip install '{name}{wanted}'"
            yield find(node, "breaks" if name in MUST_AGREE else "warns", what, why=why, fix=fix)


def judge_gpu_software(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """CUDA or ROCm that torch was built for, the driver, and the cards themselves."""
    builds = majority(nodes, lambda node: (node.torch_cuda, node.torch_hip))
    for node in nodes:
        if (node.torch_cuda, node.torch_hip) != builds:
            yield find(
                node,
                "breaks",
                f"torch is built for {_build(node.torch_cuda, node.torch_hip)}, elsewhere for {_build(*builds)}",
                why="collectives between the two do not work, and a CPU build sees no GPU",
                fix=f"{node.executable} -m pip install --force-reinstall torch, from the index the other nodes used",
            )
    with_gpus = [node for node in nodes if node.gpus]
    for what, value in _GPU_TRAITS:
        usual = majority(with_gpus, value) if with_gpus else None
        for node in with_gpus:
            if value(node) != usual:
                yield find(
                    node,
                    "warns",
                    f"{what} {value(node)}, the others have {usual}",
                    why="the slowest card sets the pace, and different drivers fail in different ways",
                    fix="nvidia-smi on both nodes shows them; install the driver that the others have",
                )


_GPU_TRAITS: tuple[tuple[str, Callable[[NodeFacts], str | None]], ...] = (
    ("driver", lambda node: node.driver),
    ("ROCm", lambda node: node.rocm),
    ("cards", lambda node: ", ".join(sorted({gpu.name for gpu in node.gpus}))),
)


def _build(cuda: str | None, hip: str | None) -> str:
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "the CPU"


def judge_links(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    known = [node for node in nodes if node.link_mbit is not None]
    usual = majority(known, lambda node: node.link_mbit or 0) if known else 0
    for node in known:
        if (node.link_mbit or 0) < usual:
            yield find(
                node,
                "warns",
                f"interface {node.interface} runs at {node.link_mbit} Mbit/s, the others' at {usual}",
                why="every all-reduce waits for the slowest link",
                fix="start the node on its fast interface: rollcall down, then rollcall node ... --interface NAME",
            )


def judge_disks(node: NodeFacts, *, checkpoint_bytes: int | None) -> Iterator[Finding]:
    for disk in node.disks:
        holds_run = disk.purpose == "run.dir"
        need = max(MIN_FREE, checkpoint_bytes or 0) if holds_run else MIN_FREE
        full = f"{disk.path} ({disk.purpose}) has {disk.free / GIB:.1f} GiB free"
        if not disk.total:
            yield find(
                node, "breaks", f"{disk.path} ({disk.purpose}) is in a file system that keeps no files, such as /proc",
                why="checkpoints, the journal and Ray's logs are written there", fix=f"choose another {disk.purpose}",
            )  # fmt: skip
        elif disk.free < need:
            whose = "one checkpoint of this run takes" if need > MIN_FREE else "a run needs at least"
            yield find(
                node, "breaks", f"{full}; {whose} {need / GIB:.1f} GiB",
                why="checkpoints, the journal and Ray's logs are written there",
                fix=f"du -xh --max-depth=1 {disk.path} | sort -h shows what fills it; or choose another place",
            )  # fmt: skip
        elif not holds_run and disk.total and 1 - disk.free / disk.total > RAY_DISK_LIMIT:
            yield find(
                node, "warns", f"{full}, {1 - disk.free / disk.total:.0%} of it is used",
                why=f"Ray spills no objects to a disk that is more than {RAY_DISK_LIMIT:.0%} full",
                fix=f"free some of {disk.path}, or start the node with another --temp-dir",
            )  # fmt: skip


def judge_limits(node: NodeFacts) -> Iterator[Finding]:
    """Memory, open files, shared memory."""
    if node.memory_total and 1 - node.memory_available / node.memory_total > RAY_MEMORY_LIMIT:
        free = f"{node.memory_available / GIB:.1f} of {node.memory_total / GIB:.1f} GiB"
        yield find(
            node, "breaks", f"only {free} of memory are available",
            why=f"Ray kills workers where more than {RAY_MEMORY_LIMIT:.0%} of the memory is in use",
            fix="ps aux --sort=-rss | head shows who holds it",
        )  # fmt: skip
    if node.open_files < MIN_OPEN_FILES:
        yield find(
            node, "warns", f"ulimit -n is {node.open_files}",
            why="Ray opens a few sockets per worker and runs out of files on large clusters",
            fix="rollcall down; ulimit -n 65536; rollcall node ... in the same shell",
        )  # fmt: skip
    if node.shm_total < GIB:
        severity: Severity = "breaks" if node.shm_total < 128 << 20 and node.gpus else "warns"
        yield find(
            node, severity, f"/dev/shm holds {node.shm_total / (1 << 20):.0f} MiB",
            why="Ray's objects and NCCL's buffers live there; without room Ray writes them to disk and NCCL fails",
            fix="mount -o remount,size=16G /dev/shm; for a container: --shm-size=16g or --ipc=host",
        )  # fmt: skip


def judge_gpus(node: NodeFacts) -> Iterator[Finding]:
    for error in node.errors:
        why = "the cards of this node cannot be used"
        yield find(node, "breaks", error, why=why, fix="nvidia-smi; sudo dmesg | grep -i xid")
    if node.accelerator == "gpu" and len(node.gpus) < node.slots and (node.gpus or node.driver):
        yield find(
            node, "breaks", f"{node.slots} slots are offered, nvidia-smi lists {len(node.gpus)} cards",
            why="workers would be placed on cards that do not exist",
            fix="nvidia-smi -L; sudo dmesg | grep -i xid; then rollcall down and rollcall node again",
        )  # fmt: skip
    for gpu in node.gpus:
        card = f"GPU {gpu.index} ({gpu.name})"
        if gpu.ecc_uncorrected:
            yield find(
                node, "breaks", f"{card} has {gpu.ecc_uncorrected} uncorrected memory errors",
                why="its results cannot be trusted, and the next one ends the process that uses it",
                fix=f"sudo nvidia-smi --gpu-reset -i {gpu.index}; if they come back, replace the card",
            )  # fmt: skip
        if gpu.slowed_by:
            heat = f" at {gpu.temperature} C" if gpu.temperature is not None else ""
            yield find(
                node, "warns", f"{card} is slowed down by {', '.join(gpu.slowed_by)}{heat}",
                why="all ranks wait for the slowest",
                fix=f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}; check fans and power",
            )  # fmt: skip
        if gpu.memory_used > GPU_IN_USE:
            yield find(
                node, "warns", f"{card} has {gpu.memory_used / GIB:.1f} GiB in use",
                why="a run that counts on the whole card runs out of memory; a job of yours may be running there",
                fix=f"nvidia-smi -i {gpu.index} --query-compute-apps=pid,used_memory --format=csv",
            )  # fmt: skip


def judge_paths(node: NodeFacts) -> Iterator[Finding]:
    for path in node.missing_paths:
        yield find(
            node, "breaks", f"{path} does not exist here",
            why="the run file names it, and workers on this node read it",
            fix=f"copy it there (rsync -a {path}/ {node.host}:{path}/), or put it into the shared folder",
        )  # fmt: skip


def judge_clocks(nodes: Sequence[NodeFacts], *, skews: Mapping[int, tuple[float, float]]) -> Iterator[Finding]:
    """``skews``: rank to (seconds ahead of this node, half of the round trip it was measured over)."""
    for node in nodes:
        ahead, doubt = skews.get(node.rank, (0.0, 0.0))
        if abs(ahead) - doubt > MAX_SKEW_S:
            yield find(
                node, "warns", f"its clock is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}",
                why="times in logs, journals and file ages of different nodes cannot be compared",
                fix="sudo timedatectl set-ntp true, or sudo chronyc makestep",
            )  # fmt: skip


def judge_reach(
    nodes: Sequence[NodeFacts], *, failed: Mapping[int, Sequence[tuple[int, int, str]]]
) -> Iterator[Finding]:
    """``failed``: rank to the (rank, port, why) it could not connect to."""
    by_rank = {node.rank: node for node in nodes}
    for rank, rows in failed.items():
        for target in sorted({row[0] for row in rows}):
            ports = ", ".join(str(row[1]) for row in rows if row[0] == target)
            why_not = next(row[2] for row in rows if row[0] == target)
            other = by_rank[target]
            yield find(
                by_rank[rank], "breaks",
                f"cannot connect to rank {target} ({other.address}) at port {ports}: {why_not}",
                why="workers of all nodes connect to each other on ports of 10000 and above",
                fix=f"on {other.host}: sudo ufw allow proto tcp from {by_rank[rank].address} to any port 10000:65535",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolder:
    """The result of writing on some nodes and reading on the others."""

    path: str
    unwritable: Mapping[int, str]  # rank to why
    unseen: Mapping[int, Mapping[int, str]]  # reader's rank to writer's rank to why
    seen_after_s: float  # slowest
    torn: Mapping[int, str]  # rank to what it saw in the middle of a rename
    num_renames: int


def judge_shared(nodes: Sequence[NodeFacts], shared: SharedFolder) -> Iterator[Finding]:
    by_rank = {node.rank: node for node in nodes}
    for rank, why_not in shared.unwritable.items():
        node = by_rank[rank]
        fix = f"sudo mount -o remount,rw $(findmnt -nT {shared.path} -o TARGET)"
        if "EROFS" not in why_not:
            fix = (
                f"ls -ld {shared.path}; findmnt -T {shared.path}; then chown or mount it so that {node.host} may write"
            )
        yield find(
            node, "breaks", f"cannot write to the shared folder {shared.path}: {why_not}",
            why="checkpoints and weights are written there by every node", fix=fix,
        )  # fmt: skip
    for rank, writers in shared.unseen.items():
        ranks = ranges(sorted(writers))
        yield find(
            by_rank[rank], "breaks",
            f"does not see in {shared.path} what rank {ranks} wrote there: {next(iter(writers.values()))}",
            why="it is not one folder for all nodes, so a checkpoint written by one is not found by the others",
            fix=f"findmnt -T {shared.path} on both nodes; mount the same file system there, or choose another run.dir",
        )  # fmt: skip
    for rank, what in shared.torn.items():
        yield find(
            by_rank[rank], "breaks", f"saw a rename in {shared.path} half done: {what}",
            why="a reader of a checkpoint or of a published address must find the old or the new one, whole",
            fix="use a file system with atomic rename (NFS 4, Lustre, GPFS, CephFS) for run.dir; object-store mounts lack it",
        )  # fmt: skip
    if shared.seen_after_s > SLOW_SHARED_S:
        yield find(
            None, "warns", f"a file written in {shared.path} is seen elsewhere only after {shared.seen_after_s:.1f} s",
            why="weights and checkpoints that go through the folder wait as long",
            fix="mount it with actimeo=1 (NFS), or choose a faster file system",
        )  # fmt: skip


def judge_bandwidth(
    nodes: Sequence[NodeFacts], *, backend: str, bytes_per_s: float | None, errors: Mapping[int, str]
) -> Iterator[Finding]:
    by_rank = {node.rank: node for node in nodes}
    for rank, error in errors.items():
        yield find(
            by_rank[rank], "breaks", f"an all-reduce over {backend} fails on interface {by_rank[rank].interface}: {error}",
            why="training over several nodes is made of these",
            fix="start the nodes on an interface that all can reach: rollcall down, then rollcall node ... --interface NAME",
        )  # fmt: skip
    if bytes_per_s is not None and bytes_per_s < SLOW_LINK[backend]:
        yield find(
            None, "warns", f"the nodes all-reduce at {bytes_per_s / 1e9:.2f} GB/s over {backend}",
            why="gradients and weights cross this link at every step",
            fix="check the interface (ethtool NAME | grep Speed) and that it is the fast one: rollcall node ... --interface",
        )  # fmt: skip


def majority(nodes: Sequence[NodeFacts], value: Callable[[NodeFacts], T]) -> T:
    """What most nodes have; in a tie, what the head has if it is one of those."""
    counts = Counter(map(value, nodes))
    of_head = [value(node) for node in nodes if node.is_head]
    return max(counts, key=lambda found: (counts[found], found in of_head))
