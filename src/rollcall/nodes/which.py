"""Which cluster a command talks to: one of ours, or a Ray that someone else has started.

Everything that differs between the two is behind ``Cluster``; no other file asks which kind it has. ``find_cluster`` chooses,
the most explicit wish first:

1. ``--cluster NAME``
2. inside a Ray job, the Ray that runs the job
3. ``cluster.ray_address`` of the run file
4. ``ROLLCALL_CLUSTER``
5. ``RAY_ADDRESS``
6. the cluster that this node is part of

Where more than one is there, one line says which was taken and why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from rollcall.errors import ClusterError
from rollcall.nodes.address import is_own, join_address, resolve, split_address
from rollcall.nodes.head import ASK_S, HeadAnswer, JobServer, NodeInfo
from rollcall.nodes.ours import OurCluster
from rollcall.nodes.plain_ray import PlainRay
from rollcall.nodes.processes import raylets_here
from rollcall.nodes.state import CLUSTER, DEFAULT_CLUSTER, NodeRecord, read_record
from rollcall.wait import Wait, say

RAY_ADDRESS = "RAY_ADDRESS"
RUN_FILE_KEY = "cluster.ray_address"
IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the drivers of submitted jobs, together with RAY_ADDRESS
_said: set[str] = set()


class Cluster(Protocol):
    """The cluster that this process talks to."""

    @property
    def name(self) -> str:
        """For programs: its name, or its address."""
        ...

    @property
    def title(self) -> str:
        """For messages."""
        ...

    @property
    def is_ours(self) -> bool:
        """Whether `rollcall node` started it, so that `rollcall down` stops it."""
        ...

    @property
    def head_address(self) -> str:
        """HOST:PORT of Ray's GCS."""
        ...

    @property
    def rendezvous(self) -> str | None:
        """A folder that all nodes see at the same place; None: none is known."""
        ...

    @property
    def token(self) -> str | None:
        """None: it has none, or none is known here."""
        ...

    @property
    def has_tls(self) -> bool: ...

    def ask(self, *, timeout_s: float = ASK_S) -> HeadAnswer:
        """What its head says now."""
        ...

    def knock(self) -> None:
        """Raise if nobody listens at its head's address. It takes moments, where ``ask`` takes seconds."""
        ...

    def wait_until_known(self, wait: Wait) -> None:
        """Return once this node knows the cluster; raise if it will not."""
        ...

    def num_nodes(self, answer: HeadAnswer) -> int:
        """How many belong to it, those that are not there too."""
        ...

    def own_node(self, answer: HeadAnswer) -> NodeInfo:
        """This machine as a node of the cluster; raises if it is not one."""
        ...

    def dashboard_url(self, answer: HeadAnswer) -> str | None:
        """As this machine reaches it; None: only its own node does."""
        ...

    def job_server(self) -> JobServer:
        """Where it takes jobs."""
        ...

    def environment(self, answer: HeadAnswer) -> dict[str, str | None]:
        """What Ray needs in the environment to speak with it; None: that variable must not be there."""
        ...

    def note_driver(self) -> None:
        """This process drives a run on it."""
        ...

    def join_command(self, rank: int | str) -> str:
        """What makes a machine a node of it."""
        ...

    def more_slots(self, num_slots: int | str) -> str:
        """What starts a node with that many slots."""
        ...

    @property
    def leave_command(self) -> str:
        """What stops a node of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """A Ray that is named somewhere."""

    text: str
    where: str  # RAY_ADDRESS or cluster.ray_address

    def __str__(self) -> str:
        return f"{self.where}={self.text}"


def find_cluster(name: str | None = None, *, ray_address: str | None = None) -> Cluster:
    """``name``: of ``--cluster``; ``ray_address``: of the run file. With no wish at all, the default cluster of this node."""
    return wished_cluster(name, ray_address=ray_address) or OurCluster(DEFAULT_CLUSTER)


def wished_cluster(name: str | None = None, *, ray_address: str | None = None) -> Cluster | None:
    """None: nothing says which, and this node is part of no default cluster."""
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
    if own is not None and _names(wish, own):
        return OurCluster(own.cluster)
    plain = _plain(wish)
    if own is not None and is_same_address(plain.head_address, own.head_address):
        return OurCluster(own.cluster)  # the same, and its token is known here
    if own is not None:
        say_once(
            f"note: {plain.title} is used, because {wish.where} names it; cluster {own.cluster!r} of this node is not used "
            f"(give --cluster {own.cluster} where you mean that one, or take {wish.where} away)"
        )
    return plain


def wished_dashboard(name: str | None = None, *, ray_address: str | None = None) -> str | None:
    """The address of a dashboard, where that is what ``RAY_ADDRESS`` or the run file has: enough for jobs."""
    wish = _wish(ray_address)
    taken = name is not None or (os.environ.get(CLUSTER) and wish is not None and wish.where == RAY_ADDRESS)
    return wish.text if wish is not None and not taken and wish.text.startswith(("http://", "https://")) else None


def is_in_a_job() -> bool:
    return bool(os.environ.get(RAY_ADDRESS)) and IN_A_JOB in os.environ


def is_same_address(one: str, other: str) -> bool:
    """A host has several addresses, and Ray itself replaces loopback by another of them."""
    if one == other:
        return True
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    return port == other_port and (host == other_host or (is_own(host) and is_own(other_host)))


def _wish(ray_address: str | None) -> _Wish | None:
    if ray_address:
        return _Wish(text=ray_address.strip(), where=RUN_FILE_KEY)
    text = os.environ.get(RAY_ADDRESS, "").strip()
    # `local` asks Ray for one of its own: that names no cluster.
    return _Wish(text=text, where=RAY_ADDRESS) if text and text != "local" else None


def _names(wish: _Wish, own: NodeRecord) -> bool:
    """By its head, or by its dashboard as for Ray's own job commands."""
    return wish.text in (own.head_address, own.dashboard_url)


def _ours(name: str, *, why: str, instead_of: _Wish | None) -> OurCluster:
    own = read_record(name)
    if instead_of is not None and (own is None or not _names(instead_of, own)):
        say_once(f"note: cluster {name!r} is used, because {why}; {instead_of} is not used")
    return OurCluster(name)


def _plain(wish: _Wish) -> PlainRay:
    text = wish.text
    if text == "auto":
        return PlainRay(_only_ray_here(wish), where=wish.where)
    if text.startswith("ray://"):
        raise ClusterError(
            f"{wish}: Rollcall does not use Ray Client (ray://), whose driver is outside the cluster. On a node of that Ray give "
            f"the head's own address (HOST:PORT as `ray start --head` prints it, usually port 6379); from elsewhere use "
            "`rollcall submit --address http://HEAD:8265`"
        )
    if "://" in text:
        raise ClusterError(
            f"{wish} is the address of a dashboard, which only runs jobs (`rollcall submit`, `rollcall job`); here the head's own "
            "address is needed: HOST:PORT as `ray start --head` prints it, usually port 6379. For a cluster of `rollcall node`, "
            "give --cluster NAME or ROLLCALL_CLUSTER"
        )
    try:
        host, port = split_address(text)
        return PlainRay(join_address(resolve(host), port), where=wish.where)
    except ClusterError as error:
        raise ClusterError(
            f"{wish.where}: {error}; give the address that `ray start --head` printed, usually with port 6379"
        ) from None


def _only_ray_here(wish: _Wish) -> str:
    found = sorted(set(raylets_here().values()))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ClusterError(
            f"{wish}: no Ray runs on this machine; write HOST:PORT of its head, or start it (`ray start`)"
        )
    raise ClusterError(f"{wish}: nodes of {len(found)} Rays run on this machine; write one of {', '.join(found)}")


def say_once(text: str) -> None:
    """Every attempt of a run looks for its cluster."""
    if text not in _said:
        _said.add(text)
        say(text)
