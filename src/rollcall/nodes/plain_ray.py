"""A Ray that is known by its address alone: started by hand, by KubeRay, by a company; or the one that runs this job.

Rollcall starts and stops nothing there. Token and certificates are those that Ray's own variables name; a cluster that wants
no token is used without. Nodes that carry no rank get one by address.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace

from rollcall.errors import ClusterError
from rollcall.nodes.address import is_own, listens, split_address
from rollcall.nodes.head import (
    ASK_S,
    CONNECT_S,
    HeadAnswer,
    HeadUnreachable,
    JobServer,
    NodeInfo,
    ask_head,
    dashboard_url,
)
from rollcall.nodes.processes import raylets_here
from rollcall.nodes.rank import rank_by_address
from rollcall.version import installed
from rollcall.wait import Wait
from rollcall.worker_env.declared import process_token

MODE = "RAY_AUTH_MODE"
LEVEL = "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"  # Ray's: up to which part Python's versions must agree


@dataclass(frozen=True, slots=True)
class PlainRay:
    """See ``which.Cluster``."""

    head_address: str
    where: str = "RAY_ADDRESS"  # what names it
    rendezvous = None
    is_ours = False
    leave_command = "ray stop"

    @property
    def name(self) -> str:
        return self.head_address

    @property
    def title(self) -> str:
        return f"the Ray at {self.head_address}"

    @property
    def token(self) -> str | None:
        return process_token({**os.environ, MODE: _mode()})

    @property
    def has_tls(self) -> bool:
        return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")

    def knock(self) -> None:
        if not listens(self.head_address, timeout_s=CONNECT_S):
            raise HeadUnreachable(
                f"nobody answers at {self.head_address}, which {self.where} names; is that Ray up, and is this the address that "
                "`ray start --head` printed (usually with port 6379)?"
            )

    def ask(self, *, timeout_s: float = ASK_S) -> HeadAnswer:
        self.knock()
        answer = ask_head(self.head_address, token=None, timeout_s=timeout_s)
        return replace(answer, nodes=_ranked(answer.nodes))

    def wait_until_known(self, wait: Wait) -> None:
        return

    def num_nodes(self, answer: HeadAnswer) -> int:
        """The nodes with slots; all nodes where none has a slot. The head of a cluster is often a node without."""
        return sum(node.slots > 0 for node in answer.alive) or len(answer.alive)

    def own_node(self, answer: HeadAnswer) -> NodeInfo:
        self._refuse_other_versions(answer)
        if (own := _own(answer)) is not None:
            return own
        nodes = ", ".join(node.address for node in answer.alive) or "none"
        raise ClusterError(
            f"this machine is not a node of {self.title} (its nodes: {nodes}), and a run is driven from one; run the command "
            f"there, or `ray start --address={self.head_address}` here first, or use `rollcall submit --address http://HEAD:8265`"
        )

    def _refuse_other_versions(self, answer: HeadAnswer) -> None:
        """Ray refuses too, in many lines."""
        mine = {"Ray": installed("ray"), "Python": platform.python_version()}
        for what, theirs in answer.versions.items():
            is_same = theirs == mine[what] if what == "Ray" else for_ray(theirs) == for_ray(mine[what])
            if not is_same:
                raise ClusterError(
                    f"{self.title} runs {what} {theirs}, and this is {what} {mine[what]}: Ray joins only processes of the same "
                    f"version; use an environment with {what} {theirs} here, or start that Ray with {mine[what]}"
                )

    def dashboard_url(self, answer: HeadAnswer) -> str | None:
        own, (head, _) = _own(answer), split_address(self.head_address)
        at_head = own is not None and own.is_head
        return dashboard_url(answer.dashboard, node_ip=head if at_head else None, head_address=self.head_address)

    def job_server(self) -> JobServer:
        answer = self.ask()
        return JobServer(
            url=self.dashboard_url(answer),
            token=None if answer.is_open else self.token,
            num_nodes=self.num_nodes(answer),
            is_node=_own(answer) is not None,
        )

    def environment(self, answer: HeadAnswer) -> dict[str, str | None]:
        return {MODE: "disabled" if answer.is_open else _mode()}

    def note_driver(self) -> None:
        """Nobody asks: what started this Ray knows nothing of its drivers."""

    def join_command(self, rank: int | str) -> str:
        return f"ray start --address={self.head_address}"

    def more_slots(self, num_slots: int | str) -> str:
        return f"ray start ... --num-gpus {num_slots}"


def for_ray(version: str) -> str:
    """Of a version of Python, what Ray compares."""
    return ".".join(version.split(".")[: 2 if os.environ.get(LEVEL) == "minor" else 3])


def _mode() -> str:
    """How to speak with a Ray that wants a token. Ray has other ways to get one, which a user names."""
    wished = os.environ.get(MODE)
    return wished if wished and wished != "disabled" else "token"


def _own(answer: HeadAnswer) -> NodeInfo | None:
    """The node that this machine is: by its process, since others may reach it by an address that it does not have itself."""
    here = raylets_here()
    found = [node for node in answer.alive if node.node_id in here]
    return next(iter([*found, *(node for node in answer.alive if is_own(node.address))]), None)


def _ranked(nodes: tuple[NodeInfo, ...]) -> tuple[NodeInfo, ...]:
    """All that live, each with a rank; of those that died, the last at each address where none lives."""
    living = [node for node in nodes if node.alive]
    ranks = rank_by_address({node.node_id: (node.rank, node.address, node.slots > 0) for node in living})
    lost = {node.address: node for node in sorted(nodes, key=lambda node: node.started_ms) if not node.alive}
    gone = [
        replace(node, rank=None) for address, node in lost.items() if address not in {one.address for one in living}
    ]
    found = [replace(node, rank=ranks[node.node_id]) for node in living]
    return (*sorted(found, key=lambda node: node.rank or 0), *gone)
