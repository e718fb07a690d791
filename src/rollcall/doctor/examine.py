"""`rollcall doctor`: examine the nodes of a cluster and say what would break a run, and how to fix it.

One probe per node, an actor pinned there. The doctor asks all of them at once and waits for each stage until its
deadline; a node that has not answered by then is a finding, and the examination goes on without it. What is wrong is
judged by the pure functions of ``checks``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollcall.config import Config
from rollcall.doctor import checks
from rollcall.doctor import probe as probing
from rollcall.doctor.checks import Finding, NodeFacts, SharedFolder, find
from rollcall.doctor.ports import firewall_rule, judge_exposure
from rollcall.errors import ClusterError, PlacementError, SizesUnknown
from rollcall.net import interfaces
from rollcall.net.door import new_secret
from rollcall.nodes.address import is_loopback, split_address
from rollcall.nodes.check import Roster, list_nodes
from rollcall.nodes.head import NodeInfo
from rollcall.nodes.which import Cluster
from rollcall.on_ray.connect import connect, disconnect
from rollcall.on_ray.each_node import NoAnswerError, Pinned, answer_of, answers_of
from rollcall.plan.judge import plan_run
from rollcall.plan.memory import GIB, element_size, read_sizes
from rollcall.reward.confine import available
from rollcall.wait import Wait, say
from rollcall.words import counted

PROBE_S = 90.0  # for a probe to start and say what it knows
REACH_S = 3.0  # for one connection
STAGE_S = 30.0
SHARED_S = 10.0  # until a file written on one node is seen on the others
RENAME_S = 1.5
MEASURE_S = 120.0  # importing torch on a busy node is most of it
MAX_PAIRS_NODES = 16  # up to here every node connects to every other
PINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    cluster: str | None  # None: this machine, without a cluster
    nodes: tuple[NodeFacts, ...]
    findings: tuple[Finding, ...]
    skews: Mapping[int, tuple[float, float]]  # rank to seconds ahead of this node, and the doubt in it
    shared: SharedFolder | None
    backend: str | None  # of the all-reduce
    bytes_per_s: float | None
    firewall: str | None = None  # lets in only the nodes; None: not needed
    rewards: Mapping[str, str] = field(default_factory=available)  # how built-in ones are confined on this machine

    @property
    def breaks(self) -> bool:
        return any(finding.severity == "breaks" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"ok": not self.breaks, **asdict(self)}


def examine(cluster: Cluster, *, config: Config | None, quick: bool = False) -> Diagnosis:
    """``quick``: what takes seconds. The all-reduce is left out, most of which is importing torch on every node."""
    connect(cluster, log_to_driver=False)
    try:
        return _Examination(cluster, list_nodes(cluster), config=config, quick=quick).run()
    finally:
        disconnect()  # ends the probes as well


class _Examination:
    def __init__(self, cluster: Cluster, roster: Roster, *, config: Config | None, quick: bool) -> None:
        self.cluster, self.roster, self.config, self.quick = cluster, roster, config, quick
        self.infos: dict[int, NodeInfo] = {node.rank: node for node in roster.alive if node.rank is not None}
        self.findings: list[Finding] = []
        self.probes: dict[int, Pinned] = {}

    def run(self) -> Diagnosis:
        self.findings += _judge_roster(self.roster, self.cluster)
        if self.config is not None:
            self.findings += judge_slots(self.config, self.roster, self.cluster)
        self._start_probes()
        nodes = self._facts()
        self.findings += checks.judge_nodes(nodes, checkpoint_bytes=checkpoint_bytes(self.config))
        if self.config is not None:
            self.findings += judge_plan(self.config, nodes)
        skews = self._clocks(nodes)
        self._ports(nodes)
        firewall = self._exposure(nodes)
        shared = self._shared_folder(nodes)
        backend, bytes_per_s = self._bandwidth(nodes)
        order = {"breaks": 0, "warns": 1}
        findings = sorted(self.findings, key=lambda one: (order[one.severity], one.node is None, one.node or 0))
        return Diagnosis(
            cluster=self.roster.cluster,
            nodes=tuple(nodes),
            findings=tuple(findings),
            skews=skews,
            shared=shared,
            backend=backend,
            bytes_per_s=bytes_per_s,
            firewall=firewall,
        )

    # Each stage: call the probes, wait, judge

    def _start_probes(self) -> None:
        say(f"asking {counted(len(self.infos), 'node')} what {'it has' if len(self.infos) == 1 else 'they have'}")
        self.probes = {
            rank: Pinned(info.node_id, probing.Probe, by_value=(probing, interfaces))
            for rank, info in self.infos.items()
        }

    def _facts(self) -> list[NodeFacts]:
        folder = None if self.config is None else str(self.config.run.dir.absolute())
        model = None if self.config is None else Path(self.config.model.path).expanduser()

        def ask(rank: int) -> dict[str, Any]:
            return {
                "packages": [*checks.MUST_AGREE, *checks.SHOULD_AGREE],
                "disks": {
                    **({"run.dir": folder} if folder else {}),
                    "Ray's temporary folder": self.infos[rank].temp_dir,
                },
                "paths": [str(model.absolute())] if model is not None and model.is_dir() else [],
                "address": self.infos[rank].address,
            }

        answers = self._ask_all("say what it has", "facts", lambda rank: [ask(rank)], timeout_s=PROBE_S)
        for rank in set(self.probes) - set(answers):
            del self.probes[rank]  # asked nothing more
        known = TypeAdapter(NodeFacts)
        return [
            known.validate_python({**asdict(info), **answers[rank]})
            for rank, info in self.infos.items()
            if rank in answers
        ]

    def _clocks(self, nodes: Sequence[NodeFacts]) -> dict[int, tuple[float, float]]:
        """Each clock against this node's, in the middle of the fastest of a few round trips."""
        skews: dict[int, tuple[float, float]] = {}
        for rank, probe in self.probes.items():
            for _ in range(PINGS):
                sent = time.time()
                try:
                    theirs = answer_of(probe.call("clock"), timeout_s=REACH_S)
                except NoAnswerError:  # a slow or dead node shows in the stages that need it
                    break
                doubt = (time.time() - sent) / 2
                if rank not in skews or doubt < skews[rank][1]:
                    skews[rank] = (theirs - (sent + doubt), doubt)
        self.findings += checks.judge_clocks(nodes, skews=skews)
        return skews

    def _ports(self, nodes: Sequence[NodeFacts]) -> None:
        listening = self._ask_all("listen on a port", "listen", lambda rank: [self.infos[rank].address])

        def targets(rank: int) -> list[tuple[int, str, int]]:
            others = partners(rank, sorted(listening))
            return [(other, self.infos[other].address, port) for other in others for port in listening[other]]

        timeout_s = STAGE_S + 2 * REACH_S * MAX_PAIRS_NODES
        failed = self._ask_all(
            "connect to the others", "reach", lambda rank: [targets(rank), REACH_S], timeout_s=timeout_s
        )
        self.findings += checks.judge_reach(nodes, failed=failed)

    def _exposure(self, nodes: Sequence[NodeFacts]) -> str | None:
        """The firewall rule for this cluster; None where TLS makes it unneeded."""
        tls = self.cluster.has_tls
        if tls or not nodes or all(is_loopback(node.address) for node in nodes):
            return None
        open_at = self._ask_all(
            "connect to its own addresses",
            "open_beside",
            lambda rank: [self.infos[rank].address, self.infos[rank].ports["node_manager"], REACH_S],
        )
        _, head_port = split_address(self.roster.head_address)
        self.findings += judge_exposure(nodes, tls=tls, open_at=open_at, head_port=head_port)
        return firewall_rule(nodes, head_port=head_port)

    def _shared_folder(self, nodes: Sequence[NodeFacts]) -> SharedFolder | None:
        folder = self._which_folder()
        if folder is None or not nodes:
            return None
        say(f"writing, reading and renaming in {folder}")
        token = uuid.uuid4().hex[:8]
        names = {rank: f"rollcall-doctor-{token}-{rank}" for rank in self.probes}
        text = "0" * probing.BODY * probing.COUNT
        try:
            wrote = self._ask_all(f"write to {folder}", "write", lambda rank: [folder, names[rank], text])
            unwritable = {rank: why for rank, why in wrote.items() if why}
            writers = {names[rank]: rank for rank, why in wrote.items() if why is None}
            expected = dict.fromkeys(writers, text)
            what = f"see what the others wrote in {folder}"
            seen = self._ask_all(what, "see", lambda rank: [folder, expected, SHARED_S])
            unseen = {
                rank: {writers[name]: why for name, why in answer["missing"].items()}
                for rank, answer in seen.items()
                if answer["missing"] and rank not in unwritable
            }
            torn, renames = self._renames(folder, names, writers=sorted(writers.values()), blind=set(unseen))
        finally:
            leftovers = [scratch for name in names.values() for scratch in (name, f".{name}", f".{name}-next")]
            self._ask_all("clean up", "remove", lambda rank: [folder, leftovers])
        shared = SharedFolder(
            path=folder,
            unwritable=unwritable,
            unseen=unseen,
            seen_after_s=max((answer["seconds"] for answer in seen.values() if not answer["missing"]), default=0.0),
            torn=torn,
            num_renames=renames,
        )
        self.findings += checks.judge_shared(nodes, shared)
        return shared

    def _renames(
        self, folder: str, names: Mapping[int, str], *, writers: list[int], blind: set[int]
    ) -> tuple[dict[int, str], int]:
        """One node replaces a file again and again, the others read it."""
        readers = [rank for rank in self.probes if rank not in blind and writers and rank != writers[0]]
        if not readers:
            return {}, 0
        writer = writers[0]
        calls = {rank: self.probes[rank].call("watch", folder, names[writer], RENAME_S) for rank in readers}
        calls[writer] = self.probes[writer].call("replace_often", folder, names[writer], RENAME_S)
        answers = self._collect(f"rename and read in {folder}", calls)
        torn = {rank: answers[rank]["torn"] for rank in readers if rank in answers and answers[rank]["torn"]}
        return torn, answers.get(writer, 0)

    def _which_folder(self) -> str | None:
        if self.config is None:
            return self.cluster.rendezvous
        folder = self.config.run.dir.absolute().parent
        while not folder.exists():
            folder = folder.parent
        return str(folder)

    def _bandwidth(self, nodes: Sequence[NodeFacts]) -> tuple[str | None, float | None]:
        if self.quick or len(nodes) < 2:
            return None, None
        backend = "nccl" if all(node.gpus and node.torch_cuda for node in nodes) else "gloo"
        say(f"measuring an all-reduce between {len(nodes)} nodes")
        ranks = sorted(node.rank for node in nodes)
        first = ranks[0]
        common = {"world_size": len(ranks), "master": self.infos[first].address, "backend": backend}
        common |= {"timeout_s": MEASURE_S / 2, "secret": new_secret()}

        def start(rank: int, place: int, port: int | None = None) -> Any:
            task = {**common, "rank": place, "port": port}
            return self.probes[rank].call("start_measuring", task, self.infos[rank].address)

        port = self._collect("start an all-reduce", {first: start(first, 0)}, timeout_s=MEASURE_S).get(first)
        if port is not None:
            rest = {rank: start(rank, place, port) for place, rank in enumerate(ranks) if place}
            self._collect("join an all-reduce", rest)
        else:
            ranks = [first]
        answers = self._collect(
            "finish an all-reduce",
            {rank: self.probes[rank].call("measured", MEASURE_S) for rank in ranks},
            timeout_s=MEASURE_S + STAGE_S,
        )
        errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        results = {rank: json.loads(answer["result"]) for rank, answer in answers.items() if "result" in answer}
        errors |= {rank: "the sum is wrong" for rank, result in results.items() if not result["right"]}
        bytes_per_s = min((result["bytes_per_s"] for result in results.values()), default=None)
        self.findings += checks.judge_bandwidth(nodes, backend=backend, bytes_per_s=bytes_per_s, errors=errors)
        return backend, bytes_per_s

    def _ask_all(
        self, what: str, method: str, arguments: Callable[[int], Sequence[Any]], *, timeout_s: float = STAGE_S
    ) -> dict[int, Any]:
        """The same of every probe; ``arguments``: by rank."""
        calls = {rank: probe.call(method, *arguments(rank)) for rank, probe in self.probes.items()}
        return self._collect(what, calls, timeout_s=timeout_s)

    def _collect(self, what: str, calls: Mapping[int, Any], *, timeout_s: float = STAGE_S) -> dict[int, Any]:
        """Answers by rank; a node that fails or is late becomes a finding."""
        answers, failures = answers_of(calls, wait=Wait(timeout_s, first_s=5, every_s=5), to=what)
        for rank, why_not in failures.items():
            info = self.infos[rank]
            logs = f"{info.temp_dir}/session_latest/logs"
            again = self.cluster.join_command(rank)
            fix = f"on {info.host}: {self.cluster.leave_command}, then {again} ... ; logs are in {logs}"
            why = "a worker placed there would fail too"
            self.findings.append(find(info, "breaks", f"could not {what}: {why_not}", why=why, fix=fix))
        return answers


def partners(rank: int, ranks: Sequence[int]) -> list[int]:
    """Whom a node connects to: everybody in a small cluster; in a large one its next four and rank 0."""
    others = [other for other in ranks if other != rank]
    if len(ranks) <= MAX_PAIRS_NODES:
        return others
    after = [other for other in others if other > rank] + [other for other in others if other < rank]
    return sorted({*after[:4], others[0]})


def _judge_roster(roster: Roster, cluster: Cluster) -> list[Finding]:
    if not roster.alive:
        raise ClusterError(f"no node of {roster.title} is alive; start them: {cluster.join_command('R')}")
    found = [
        Finding(
            node=rank, host=None, severity="breaks", what=f"rank {rank} of {roster.num_nodes} has not joined, or has died",
            why="its slots are missing",
            fix=f"there: {cluster.join_command(rank)} ...",
        )
        for rank in roster.missing
    ]  # fmt: skip
    if not roster.has_token and not all(is_loopback(node.address) for node in roster.alive):
        why = "anyone who reaches its ports can run code on its nodes, and secrets of a run file cannot be sealed"
        fix = "start its nodes with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN"
        found.append(find(None, "warns", f"{roster.title} has no token", why=why, fix=fix))
    return found


def judge_slots(config: Config, roster: Roster, cluster: Cluster) -> Iterator[Finding]:
    """The run file's nodes against those that are there."""
    wanted = config.cluster.slots_per_node if config.cluster else ()
    for node in roster.alive:
        if node.rank is not None and node.rank < len(wanted) and node.slots < wanted[node.rank]:
            more = cluster.more_slots(wanted[node.rank])
            yield find(
                node, "breaks", f"offers {node.slots} slots, the run file has {wanted[node.rank]} for node {node.rank}",
                why="the placement numbers slots node by node",
                fix=f"set cluster.nodes to what the node offers, or on {node.host}: {cluster.leave_command}, then {more}",
            )  # fmt: skip
    if len(wanted) > roster.num_nodes:
        yield find(
            None, "breaks", f"the run file asks for {counted(len(wanted), 'node')}, the cluster has {roster.num_nodes}",
            why="every slot of the run file must exist",
            fix=f"set cluster.num_nodes={roster.num_nodes}, or add nodes: {cluster.join_command('R')} ...",
        )  # fmt: skip


def judge_plan(config: Config, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """What `rollcall plan` says, with the cards that are really there."""
    cards = [gpu.memory_total for node in nodes for gpu in node.gpus]
    try:
        problems = plan_run(config, card_gib=min(cards) / GIB if cards else None).problems
    except PlacementError as error:
        problems = (str(error),)
    for problem in problems:
        fix = "rollcall plan shows the placement; change the run file as said"
        yield find(None, "breaks", problem, why="the run cannot be placed", fix=fix)


def checkpoint_bytes(config: Config | None) -> int | None:
    """Size of one checkpoint: weights, master weights, AdamW's two numbers; and those of a critic."""
    if config is None:
        return None
    try:
        sizes = read_sizes(config.model.path)
    except SizesUnknown:
        return None
    width = element_size(config)
    models = 2 if config.algorithm.name == "ppo" else 1
    return models * sizes.num_parameters * (width + (12 if width == 2 else 8))
