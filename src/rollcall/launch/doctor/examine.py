"""`rollcall doctor`: examines this machine or a cluster's nodes and reports problems that would break a run.

On a cluster, each node runs one probe, an actor pinned to the node. Each stage asks all probes at once and waits until its deadline.
A node that has not answered by then is reported as a finding, and the examination continues without it. The pure functions in
``checks`` decide what is wrong.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.text import Text

from rollcall.base.errors import SizesUnknown
from rollcall.base.wait import Wait, say
from rollcall.base.words import counted
from rollcall.checkpoint import run_dir
from rollcall.config import Config
from rollcall.launch.doctor import checks
from rollcall.launch.doctor import probe as probing
from rollcall.launch.doctor.checks import Finding, NodeFacts, find
from rollcall.nodes import interfaces
from rollcall.nodes.address import is_loopback, split_address
from rollcall.nodes.check import Roster, list_nodes
from rollcall.nodes.cluster import Cluster
from rollcall.nodes.door import new_secret
from rollcall.nodes.head import NodeInfo
from rollcall.plan.draw import make_console
from rollcall.plan.memory import GIB, element_size, read_sizes
from rollcall.process.ray.connect import connected
from rollcall.process.ray.each_node import Pinned, answers_of
from rollcall.reward.confine import available

STAGE_S = 90.0  # for a probe to start and report its facts, or to try to reach the other nodes
MEASURE_S = 120.0  # mostly for importing torch on a busy node


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    cluster: str | None  # None means this machine without a cluster
    nodes: tuple[NodeFacts, ...]
    findings: tuple[Finding, ...]
    shared: str | None = None  # a folder in which every node sees the others' files
    backend: str | None = None  # the backend of the all-reduce
    bytes_per_s: float | None = None
    firewall: str | None = None  # a rule that admits only the nodes, for clusters without TLS
    rewards: Mapping[str, str] = field(default_factory=available)  # how built-in rewards are confined on this machine

    @property
    def breaks(self) -> bool:
        return any(finding.severity == "breaks" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"ok": not self.breaks, **asdict(self)}


# This machine


def examine_machine(config: Config | None) -> Diagnosis:
    """Examine this machine for a run in one process; with a run file, also examine its model, data and rewards."""
    folder = "." if config is None else str(config.run.dir.absolute())
    facts = probing.Probe().facts({"packages": checks.MUST_AGREE, "disks": {"run.dir": folder}, "paths": []})
    seat = {"rank": 0, "address": "127.0.0.1", "slots": 1, "is_head": True}
    seat["accelerator"] = "gpu" if facts["gpus"] else "cpu"
    node = TypeAdapter(NodeFacts).validate_python(facts | seat)
    state_bytes = checkpoint_bytes(config)
    findings = [
        *checks.judge_disks(node, checkpoint_bytes=state_bytes),
        *checks.judge_gpus(node),
        *checks.judge_torch(node),
    ]
    if config is not None:
        if node.gpus:
            findings += checks.judge_plan(config, [node])
        if config.model.lora is None:
            findings += checks.judge_fit(node, state_bytes)
        findings += _judge_parts(config, node)
    return Diagnosis(cluster=None, nodes=(node,), findings=tuple(findings))


def _judge_parts(config: Config, node: NodeFacts) -> Iterator[Finding]:
    from rollcall.config.checks import is_hub
    from rollcall.loop.data.rows import NO_DATA, read_rows
    from rollcall.model.files import resolve_model
    from rollcall.model.load import check_architecture
    from rollcall.run.reward_trial import try_run

    say("reading the model, the data and the rewards")
    try:
        check_architecture(resolve_model(config.model.path), trust_remote_code=config.model.trust_remote_code)
        has_model = True
    except (ValueError, OSError) as error:
        has_model = False
        yield find(node, str(error))
    try:
        if has_model and (broken := try_run(config, num_rows=1).broken):
            yield find(node, f"{', '.join(broken)} failed on the first row; `rollcall reward test` shows why")
        elif not has_model and config.data.train != NO_DATA and not is_hub(config.data.train):
            next(read_rows(config.data.train), None)  # without a model there is no tokenizer to test the rewards with
    except (ValueError, OSError) as error:
        yield find(node, str(error))


def checkpoint_bytes(config: Config | None) -> int | None:
    """Return the size of one checkpoint, if the model's sizes are known."""
    if config is None:
        return None
    try:
        return run_dir.checkpoint_bytes(config, read_sizes(config.model.path), width=element_size(config))
    except SizesUnknown:
        return None


# A cluster


def examine(cluster: Cluster, *, config: Config | None, quick: bool = False) -> Diagnosis:
    """Examine a cluster's nodes. ``quick`` skips the all-reduce, which imports torch on every node; the rest takes seconds."""
    with connected(cluster):  # the probes end with the connection
        return _Examination(cluster, list_nodes(cluster), config=config).run(quick=quick)


class _Examination:
    """Runs the examination: each stage calls the probes, waits and judges their answers."""

    def __init__(self, cluster: Cluster, roster: Roster, *, config: Config | None) -> None:
        self.cluster, self.roster, self.config = cluster, roster, config
        self.infos: dict[int, NodeInfo] = {node.rank: node for node in roster.alive if node.rank is not None}
        self.findings: list[Finding] = []
        say(
            f"asking {counted(len(self.infos), 'node')} what hardware and software {'it has' if len(self.infos) == 1 else 'they have'}"
        )
        code = (probing, interfaces)
        self.probes = {rank: Pinned(info.node_id, probing.Probe, by_value=code) for rank, info in self.infos.items()}

    def run(self, *, quick: bool) -> Diagnosis:
        self.findings += checks.judge_roster(self.roster, self.cluster)
        nodes = self._facts()
        self.findings += checks.judge_nodes(nodes, checkpoint_bytes=checkpoint_bytes(self.config))
        if self.config is not None:
            self.findings += checks.judge_slots(self.config, self.roster, self.cluster)
            self.findings += checks.judge_plan(self.config, nodes)
        self._reach(nodes)
        shared = self._shared_folder(nodes)
        backend, bytes_per_s = (None, None) if quick or len(nodes) < 2 else self._bandwidth(nodes)
        firewall = None
        if nodes and not self.cluster.has_tls and not all(is_loopback(node.address) for node in nodes):
            firewall = checks.firewall_rule(nodes, head_port=split_address(self.roster.head_address)[1])
        return Diagnosis(
            cluster=self.roster.cluster,
            nodes=tuple(nodes),
            findings=tuple(sorted(self.findings, key=lambda one: (one.severity, one.node is None, one.node or 0))),
            shared=shared,
            backend=backend,
            bytes_per_s=bytes_per_s,
            firewall=firewall,
        )

    def _facts(self) -> list[NodeFacts]:
        folder = {} if self.config is None else {"run.dir": str(self.config.run.dir.absolute())}
        model = None if self.config is None else Path(self.config.model.path).expanduser()

        def ask(rank: int) -> dict[str, Any]:
            return {
                "packages": checks.MUST_AGREE,
                "disks": {**folder, "Ray's temporary folder": self.infos[rank].temp_dir},
                "paths": [str(model.absolute())] if model is not None and model.is_dir() else [],
            }

        answers = self._ask_all("report its facts", "facts", lambda rank: [ask(rank)])
        self.probes = {rank: probe for rank, probe in self.probes.items() if rank in answers}
        known = TypeAdapter(NodeFacts)
        return [known.validate_python({**asdict(self.infos[rank]), **answers[rank]}) for rank in self.probes]

    def _reach(self, nodes: Sequence[NodeFacts]) -> None:
        listening = self._ask_all("listen on a port", "listen", lambda rank: [self.infos[rank].address])

        def targets(rank: int) -> list[tuple[int, str, int]]:
            others = partners(rank, sorted(listening))
            return [(other, self.infos[other].address, port) for other in others for port in listening[other]]

        failed = self._ask_all("connect to the other nodes", "reach", lambda rank: [targets(rank), 3.0])
        self.findings += checks.judge_reach(nodes, failed=failed)

    def _shared_folder(self, nodes: Sequence[NodeFacts]) -> str | None:
        """Return the shared folder if every node sees the others' files there."""
        folder = self.cluster.rendezvous
        if self.config is not None:
            folder = str(next(parent for parent in self.config.run.dir.absolute().parents if parent.exists()))
        if folder is None or not nodes:
            return None
        say(f"checking that all nodes see the same files in {folder}")
        token = uuid.uuid4().hex[:8]
        ranks = {f"rollcall-doctor-{token}-{rank}": rank for rank in self.probes}
        names = {rank: name for name, rank in ranks.items()}
        try:
            wrote = self._ask_all(f"write to {folder}", "write", lambda rank: [folder, names[rank]])
            written = [names[rank] for rank, why in wrote.items() if why is None]
            seen = self._ask_all(f"see the other nodes' files in {folder}", "see", lambda rank: [folder, written, 10.0])
        finally:
            self._ask_all("clean up", "remove", lambda rank: [folder, names[rank]])
        unseen = {rank: {ranks[name]: why for name, why in lost.items()} for rank, lost in seen.items() if lost}
        self.findings += checks.judge_shared(nodes, folder, wrote=wrote, unseen=unseen)
        return None if unseen else folder

    def _bandwidth(self, nodes: Sequence[NodeFacts]) -> tuple[str, float | None]:
        backend = "nccl" if all(node.gpus and node.torch_build.startswith("CUDA") for node in nodes) else "gloo"
        say(f"measuring an all-reduce between {len(nodes)} nodes")
        places = {rank: place for place, rank in enumerate(sorted(self.probes))}
        first, secret = min(places), new_secret()
        meeting = {first: self.probes[first].call("open_meeting", self.infos[first].address)}
        ports = self._collect("open a port for the all-reduce", meeting)
        if not ports:
            return backend, None
        at = (self.infos[first].address, ports[first], secret)
        task = {"size": len(places), "backend": backend}
        calls = {
            rank: self.probes[rank].call("all_reduce", self.infos[rank].address, at, rank=place, **task)
            for rank, place in places.items()
        }
        rates = self._collect(f"finish an all-reduce over {backend}", calls, timeout_s=MEASURE_S)
        if len(rates) < len(places):
            return backend, None
        self.findings += checks.judge_bandwidth(backend=backend, bytes_per_s=min(rates.values()))
        return backend, min(rates.values())

    def _ask_all(self, what: str, method: str, arguments: Callable[[int], Sequence[Any]]) -> dict[int, Any]:
        """Call the same method on every probe; ``arguments`` returns the arguments for a rank."""
        return self._collect(what, {rank: each.call(method, *arguments(rank)) for rank, each in self.probes.items()})

    def _collect(self, what: str, calls: Mapping[int, Any], *, timeout_s: float = STAGE_S) -> dict[int, Any]:
        """Return the answers by rank. A node that fails or does not answer in time is reported as a finding."""
        answers, failures = answers_of(calls, wait=Wait(timeout_s, first_s=5, every_s=5), to=what)
        for rank, why_not in failures.items():
            logs = f"its logs are in {self.infos[rank].temp_dir}/session_latest/logs"
            self.findings.append(find(self.infos[rank], f"could not {what}: {why_not}; {logs}"))
        return answers


def partners(rank: int, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that a node connects to: all others in a cluster of up to 16 nodes, otherwise the next four and the first."""
    others = [*(other for other in ranks if other > rank), *(other for other in ranks if other < rank)]
    return sorted(others if len(ranks) <= 16 else {*others[:4], *ranks[:1]} - {rank})


# What the user sees: a line for each node, the measurements, the findings, the verdict


def show(diagnosis: Diagnosis) -> None:
    console = make_console()
    for node in diagnosis.nodes:
        console.print(Text(f"{_where(diagnosis, node.rank, node.host)}: {_facts(node)}"), soft_wrap=True)
    for text in _measured(diagnosis):
        console.print(Text(text), soft_wrap=True)  # so that a command can be copied in one piece
    for finding in diagnosis.findings:
        style = "bold red" if finding.severity == "breaks" else "yellow"
        text = f"  {_where(diagnosis, finding.node, finding.host)}: {finding.what}"
        console.print(Text.assemble((finding.severity, style), text), soft_wrap=True)
    console.print(_verdict(diagnosis))


def _where(diagnosis: Diagnosis, rank: int | None, host: str | None) -> str:
    if diagnosis.cluster is None:
        return "this machine"
    return "cluster" if rank is None else f"rank {rank} {host or ''}".rstrip()


def _facts(node: NodeFacts) -> str:
    disk = min(node.disks, key=lambda disk: disk.free)
    return ", ".join(
        [
            f"Python {node.python}",
            f"torch {node.packages['torch']} for {node.torch_build}",
            f"{len(node.gpus)} x {node.gpus[0].name}" if node.gpus else "no GPU",
            f"{node.memory_available / GIB:.1f} of {node.memory_total / GIB:.1f} GiB of memory available",
            f"{disk.free / GIB:.1f} GiB free in {disk.path}",
        ]
    )


def _measured(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.shared is not None:
        yield f"shared folder {diagnosis.shared}: every node sees the other nodes' files"
    if diagnosis.bytes_per_s is not None:
        yield f"all-reduce between nodes ({diagnosis.backend}): {diagnosis.bytes_per_s / 1e9:.2f} GB/s"
    if diagnosis.firewall is not None:
        yield f"firewall rule, to be set on each node as root (or start the nodes with --tls): {diagnosis.firewall}"
    confined = ", ".join(f"{thing}: {state}" for thing, state in diagnosis.rewards.items())
    yield f"built-in rewards on this machine run with {confined}"


def _verdict(diagnosis: Diagnosis) -> Text:
    broken = sum(finding.severity == "breaks" for finding in diagnosis.findings)
    warned = len(diagnosis.findings) - broken
    if broken:
        return Text(f"{broken} of these findings would break a run; {counted(warned, 'warning')}", style="bold red")
    if warned:
        return Text(f"a run can start; {counted(warned, 'warning')}", style="yellow")
    return Text("all is well", style="bold green")
