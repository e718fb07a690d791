"""Finds the cluster that a command uses: a Rollcall cluster, or a Ray cluster that Rollcall did not start.

All differences between the two are in ``OurCluster`` and ``PlainRay``; no other file needs to know which kind it is. ``find_cluster``
uses the first of these that is set:

1. ``--cluster NAME``
2. inside a Ray job, the Ray cluster that runs the job
3. ``cluster.ray_address`` of the run file
4. ``ROLLCALL_CLUSTER``
5. ``RAY_ADDRESS``
6. the cluster that this node belongs to

If several are set, it prints which cluster it uses and why.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from functools import cache

from rollcall.base.errors import ClusterError
from rollcall.base.version import installed
from rollcall.base.wait import Wait, say
from rollcall.nodes.address import is_own, join_address, listens, resolve, split_address
from rollcall.nodes.declared import process_token
from rollcall.nodes.head import (
    ASK_S,
    CONNECT_S,
    HeadAnswer,
    HeadUnreachable,
    NodeInfo,
    ask_head,
    ask_own_head,
    dashboard_url,
)
from rollcall.nodes.processes import raylets_here
from rollcall.nodes.rank import rank_by_address
from rollcall.nodes.state import (
    CLUSTER,
    DEFAULT_CLUSTER,
    NodeRecord,
    auth_env,
    read_record,
    read_token,
    require_record,
    tls_dir,
)

RAY_ADDRESS = "RAY_ADDRESS"
IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets this variable, together with RAY_ADDRESS, for the drivers of submitted jobs
MODE = "RAY_AUTH_MODE"


@dataclass(frozen=True, slots=True)
class OurCluster:
    """A cluster that this node joined with `rollcall node`, identified by the record, token and certificates stored on this node.

    The record is read each time, because `rollcall node` may have written a new one.
    """

    name: str
    is_ours = True
    leave_command = "rollcall down"

    @property
    def title(self) -> str:
        return f"cluster {self.name!r}"

    @property
    def record(self) -> NodeRecord:
        return require_record(self.name)

    @property
    def head_address(self) -> str:
        return self.record.head_address

    @property
    def rendezvous(self) -> str | None:
        return self.record.rendezvous

    @property
    def has_tls(self) -> bool:
        return tls_dir(self.name).is_dir()

    def knock(self) -> None:
        if not listens(self.head_address, timeout_s=CONNECT_S):
            raise HeadUnreachable(
                f"no answer at the head's address {self.head_address}: rank 0 of {self.title} is down, or cut off from this node"
            )

    def ask(self, *, timeout_s: float = ASK_S) -> HeadAnswer:
        record = self.record
        answer = ask_own_head(self.name, head_address=record.head_address, timeout_s=timeout_s)
        if answer.head is not None and answer.cluster_id != record.cluster_id:
            raise ClusterError(
                f"the head at {record.head_address} was started again after this node joined; run `rollcall node` again on this node"
            )
        return answer

    def wait_until_known(self, wait: Wait) -> None:
        """Wait for this node's record, which a `rollcall node` in the background is about to write."""
        while read_record(self.name) is None:
            if not wait.again(f"waiting for `rollcall node` to add this node to {self.title}", after_s=0.2):
                require_record(self.name)  # raises unless the record has just appeared
                return

    def num_nodes(self, answer: HeadAnswer) -> int:
        return self.record.num_nodes

    def own_node(self, answer: HeadAnswer) -> NodeInfo:
        record = self.record
        for node in answer.alive:
            if (node.rank, node.address) == (record.rank, record.node_ip):
                return node
        raise ClusterError(
            f"the head of {self.title} at {record.head_address} considers this node ({record.node_ip}, rank {record.rank}) dead; "
            "run `rollcall node` again on this node"
        )

    def dashboard_url(self, answer: HeadAnswer) -> str | None:
        return self.record.dashboard_url

    def job_server(self) -> tuple[str | None, str | None, int | None]:
        """Return the dashboard's URL for this machine, the cluster's token, and the number of nodes."""
        record = self.record
        return record.dashboard_url, read_token(self.name), record.num_nodes

    def environment(self, answer: HeadAnswer) -> dict[str, str | None]:
        # A token in this variable would take precedence over the token's file.
        return {"RAY_AUTH_TOKEN": None, **auth_env(self.name)}

    def join_command(self, rank: int | str) -> str:
        record = self.record
        where = f"--rendezvous {record.rendezvous}" if record.rendezvous else f"--head-address {record.head_address}"
        slots = f" --slots {record.slots}" if record.accelerator == "cpu" else ""
        name = f" --cluster {self.name}" if self.name != DEFAULT_CLUSTER else ""
        return f"rollcall node --rank {rank} --num-nodes {record.num_nodes} {where}{slots}{name}"

    def more_slots(self, num_slots: int | str) -> str:
        return f"rollcall node ... --slots {num_slots}"


@dataclass(frozen=True, slots=True)
class PlainRay:
    """A Ray cluster of which only the address is known: one that you, KubeRay or an administrator started, or the one that runs this job.

    Rollcall does not start or stop nodes of such a cluster. Ray's own variables name the token and the certificates. If the cluster
    requires no token, none is used. Nodes without a rank are ranked by address.
    """

    head_address: str
    where: str = "RAY_ADDRESS"  # where the address was found
    rendezvous = None
    is_ours = False
    leave_command = "ray stop"

    @property
    def name(self) -> str:
        return self.head_address

    @property
    def title(self) -> str:
        return f"the Ray cluster at {self.head_address}"

    @property
    def token(self) -> str | None:
        return process_token({**os.environ, MODE: _mode()})

    @property
    def has_tls(self) -> bool:
        return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")

    def knock(self) -> None:
        if not listens(self.head_address, timeout_s=CONNECT_S):
            raise HeadUnreachable(
                f"no answer at {self.head_address}, which comes from {self.where}; check that Ray is up and that this is the address "
                "that `ray start --head` printed (usually with port 6379)"
            )

    def ask(self, *, timeout_s: float = ASK_S) -> HeadAnswer:
        self.knock()
        answer = ask_head(self.head_address, token=None, timeout_s=timeout_s)
        return replace(answer, nodes=_ranked(answer.nodes))

    def wait_until_known(self, wait: Wait) -> None:
        return

    def num_nodes(self, answer: HeadAnswer) -> int:
        """Return the number of nodes with slots, or of all nodes if none has slots. The head often has no slots."""
        return sum(node.slots > 0 for node in answer.alive) or len(answer.alive)

    def own_node(self, answer: HeadAnswer) -> NodeInfo:
        # Ray would report a version mismatch in many lines.
        mine = {"Ray": installed("ray"), "Python": platform.python_version()}
        for what, theirs in answer.versions.items():
            is_same = theirs == mine[what] if what == "Ray" else compared(theirs) == compared(mine[what])
            if not is_same:
                raise ClusterError(
                    f"{self.title} runs {what} {theirs}, but this environment has {what} {mine[what]}, and Ray needs the same version on "
                    f"both sides; use an environment with {what} {theirs}, or start that Ray cluster with {mine[what]}"
                )
        if (own := _own(answer)) is not None:
            return own
        nodes = ", ".join(node.address for node in answer.alive) or "none"
        raise ClusterError(
            f"this machine is not a node of {self.title} (its nodes: {nodes}), but only a node can start a run; run the command "
            f"on a node, or run `ray start --address={self.head_address}` here first, or use `rollcall submit --address http://HEAD:8265`"
        )

    def dashboard_url(self, answer: HeadAnswer) -> str | None:
        own, (head, _) = _own(answer), split_address(self.head_address)
        at_head = own is not None and own.is_head
        return dashboard_url(answer.dashboard, node_ip=head if at_head else None, head_address=self.head_address)

    def job_server(self) -> tuple[str | None, str | None, int | None]:
        answer = self.ask()
        num_nodes = None if _own(answer) is None else self.num_nodes(answer)
        return self.dashboard_url(answer), None if answer.is_open else self.token, num_nodes

    def environment(self, answer: HeadAnswer) -> dict[str, str | None]:
        return {MODE: "disabled" if answer.is_open else _mode()}

    def join_command(self, rank: int | str) -> str:
        return f"ray start --address={self.head_address}"

    def more_slots(self, num_slots: int | str) -> str:
        return f"ray start ... --num-gpus {num_slots}"


Cluster = OurCluster | PlainRay


def compared(version: str) -> str:
    """Return the part of a Python version that Ray compares. A user can make Ray compare only the major and the minor version."""
    level = os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL")
    return ".".join(version.split(".")[: 2 if level == "minor" else 3])


def _mode() -> str:
    """Return the authentication mode for a Ray cluster that requires a token: `token`, unless the user sets a different one."""
    wished = os.environ.get(MODE)
    return wished if wished and wished != "disabled" else "token"


def _own(answer: HeadAnswer) -> NodeInfo | None:
    """Find this machine's node, by its raylet if possible: the node's address may not be one of the machine's own addresses."""
    here = raylets_here()
    found = [node for node in answer.alive if node.node_id in here]
    return next(iter([*found, *(node for node in answer.alive if is_own(node.address))]), None)


def _ranked(nodes: tuple[NodeInfo, ...]) -> tuple[NodeInfo, ...]:
    """Return all living nodes, with their ranks. For each address without a living node, add the node that died there last."""
    living = [node for node in nodes if node.alive]
    ranks = rank_by_address({node.node_id: (node.rank, node.address, node.slots > 0) for node in living})
    lost = {node.address: node for node in sorted(nodes, key=lambda node: node.started_ms) if not node.alive}
    gone = [
        replace(node, rank=None) for address, node in lost.items() if address not in {one.address for one in living}
    ]
    found = [replace(node, rank=ranks[node.node_id]) for node in living]
    return (*sorted(found, key=lambda node: node.rank or 0), *gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """A Ray address from the environment or the run file."""

    text: str
    where: str  # RAY_ADDRESS or cluster.ray_address

    def __str__(self) -> str:
        return f"{self.where}={self.text}"


def find_cluster(name: str | None = None, *, ray_address: str | None = None) -> Cluster:
    """Find the cluster to use. ``name`` is the value of ``--cluster``; ``ray_address`` comes from the run file."""
    return wished_cluster(name, ray_address=ray_address) or OurCluster(DEFAULT_CLUSTER)


def wished_cluster(name: str | None = None, *, ray_address: str | None = None) -> Cluster | None:
    """Find the cluster like ``find_cluster``, but return `None` if none is named and this node is not part of the default cluster."""
    wish = _wish(ray_address)
    if name is not None:
        return _ours(name, why="--cluster names it", instead_of=wish)
    if is_in_a_job():
        return _plain(_Wish(text=os.environ[RAY_ADDRESS], where=RAY_ADDRESS))
    named = os.environ.get(CLUSTER)
    if named and (wish is None or wish.where == RAY_ADDRESS):
        return _ours(named, why=f"{CLUSTER} names it", instead_of=wish)
    own = read_record(named or DEFAULT_CLUSTER)
    if wish is None:
        return None if own is None else OurCluster(own.cluster)
    if own is not None and wish.text in (own.head_address, own.dashboard_url):  # Ray's job commands use the dashboard
        return OurCluster(own.cluster)
    plain = _plain(wish)
    if own is not None and is_same_address(plain.head_address, own.head_address):
        return OurCluster(own.cluster)  # the same cluster, and this node has its token
    if own is not None:
        say_once(
            f"note: using {plain.title}, because {wish.where} names it, and not this node's cluster {own.cluster!r} "
            f"(to use that, give --cluster {own.cluster} or unset {wish.where})"
        )
    return plain


def wished_dashboard(name: str | None = None, *, ray_address: str | None = None) -> str | None:
    """Return the address in ``RAY_ADDRESS`` or the run file if it is the address of a dashboard, which is enough to submit jobs."""
    wish = _wish(ray_address)
    taken = name is not None or (os.environ.get(CLUSTER) and wish is not None and wish.where == RAY_ADDRESS)
    return wish.text if wish is not None and not taken and wish.text.startswith(("http://", "https://")) else None


def is_in_a_job() -> bool:
    return bool(os.environ.get(RAY_ADDRESS)) and IN_A_JOB in os.environ


def is_same_address(one: str, other: str) -> bool:
    """Return whether two addresses name the same endpoint. A host may have several addresses, and Ray replaces loopback addresses."""
    if one == other:
        return True
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    return port == other_port and (host == other_host or (is_own(host) and is_own(other_host)))


def _wish(ray_address: str | None) -> _Wish | None:
    if ray_address:
        return _Wish(text=ray_address.strip(), where="cluster.ray_address")
    text = os.environ.get(RAY_ADDRESS, "").strip()
    # `local` makes Ray start a new cluster, so it does not name an existing one.
    return _Wish(text=text, where=RAY_ADDRESS) if text and text != "local" else None


def _ours(name: str, *, why: str, instead_of: _Wish | None) -> OurCluster:
    own = read_record(name)
    if instead_of is not None and (own is None or instead_of.text not in (own.head_address, own.dashboard_url)):
        say_once(f"note: using cluster {name!r}, because {why}, and not {instead_of}")
    return OurCluster(name)


def _plain(wish: _Wish) -> PlainRay:
    text = wish.text
    if text == "auto":
        found = sorted(set(raylets_here().values()))
        if not found:
            raise ClusterError(
                f"{wish}: Ray is not running on this machine; write HOST:PORT of the head, or start Ray (`ray start`)"
            )
        if len(found) > 1:
            raise ClusterError(
                f"{wish}: nodes of {len(found)} Ray clusters run on this machine; write one of {', '.join(found)}"
            )
        return PlainRay(found[0], where=wish.where)
    if "://" in text:
        kind = (
            "an address for Ray Client, which Rollcall does not use"
            if text.startswith("ray://")
            else "the address of a dashboard, which only runs jobs (`rollcall submit --address http://HEAD:8265`)"
        )
        raise ClusterError(
            f"{wish} is {kind}; give the head's address, HOST:PORT, as `ray start --head` prints it (usually port 6379); for a "
            "cluster of `rollcall node`, give --cluster NAME"
        )
    try:
        host, port = split_address(text)
        return PlainRay(join_address(resolve(host), port), where=wish.where)
    except ClusterError as error:
        raise ClusterError(
            f"{wish.where}: {error}; give the address that `ray start --head` printed, usually with port 6379"
        ) from None


@cache
def say_once(text: str) -> None:
    """Print a note only once, although every attempt of a run looks up its cluster."""
    say(text)
