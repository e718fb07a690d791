"""A cluster that `rollcall node` has made this node part of: known by the record, token and certificates it left here."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollcall.errors import ClusterError
from rollcall.nodes.address import listens
from rollcall.nodes.head import ASK_S, CONNECT_S, HeadAnswer, HeadUnreachable, JobServer, NodeInfo, ask_own_head
from rollcall.nodes.processes import is_coming_up
from rollcall.nodes.state import (
    DEFAULT_CLUSTER,
    NodeRecord,
    auth_env,
    note_driver,
    read_record,
    read_token,
    require_record,
    tls_dir,
)
from rollcall.wait import Wait

APPEAR_S = 2.0  # for a `rollcall node` that was started just before


@dataclass(frozen=True, slots=True)
class OurCluster:
    """See ``which.Cluster``. The record is read each time: `rollcall node` may write a new one meanwhile."""

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
    def token(self) -> str | None:
        return read_token(self.name)

    @property
    def has_tls(self) -> bool:
        return tls_dir(self.name).is_dir()

    def knock(self) -> None:
        if not listens(self.head_address, timeout_s=CONNECT_S):
            raise HeadUnreachable(
                f"nobody answers at the head's address {self.head_address}: rank 0 of {self.title} is down, or cut off from this node"
            )

    def ask(self, *, timeout_s: float = ASK_S) -> HeadAnswer:
        record = self.record
        answer = ask_own_head(self.name, head_address=record.head_address, timeout_s=timeout_s)
        if answer.head is not None and answer.cluster_id != record.cluster_id:
            raise ClusterError(
                f"the head at {record.head_address} was started again since this node joined; run `rollcall node` here again"
            )
        return answer

    def wait_until_known(self, wait: Wait) -> None:
        """This node's record, which a running `rollcall node` is about to write."""
        seen = time.monotonic()
        while read_record(self.name) is None:
            now = time.monotonic()
            seen = now if is_coming_up(self.name) else seen
            what = f"waiting for `rollcall node` to make this node part of {self.title}"
            if now - seen >= APPEAR_S or not wait.again(what, after_s=0.2):
                require_record(self.name)  # refuses, unless it has come just now
                return

    def num_nodes(self, answer: HeadAnswer) -> int:
        return self.record.num_nodes

    def own_node(self, answer: HeadAnswer) -> NodeInfo:
        record = self.record
        for node in answer.alive:
            if (node.rank, node.address) == (record.rank, record.node_ip):
                return node
        raise ClusterError(
            f"the head of {self.title} at {record.head_address} takes this node ({record.node_ip}, rank {record.rank}) for dead; "
            "run `rollcall node` here again"
        )

    def dashboard_url(self, answer: HeadAnswer) -> str | None:
        return self.record.dashboard_url

    def job_server(self) -> JobServer:
        record = self.record
        return JobServer(url=record.dashboard_url, token=self.token, num_nodes=record.num_nodes, is_node=True)

    def environment(self, answer: HeadAnswer) -> dict[str, str | None]:
        return {"RAY_AUTH_TOKEN": None, **auth_env(self.name)}  # the token itself would win over its file

    def note_driver(self) -> None:
        note_driver(self.name)

    def join_command(self, rank: int | str) -> str:
        record = self.record
        where = f"--rendezvous {record.rendezvous}" if record.rendezvous else f"--head-address {record.head_address}"
        slots = f" --slots {record.slots}" if record.accelerator == "cpu" else ""
        name = f" --cluster {self.name}" if self.name != DEFAULT_CLUSTER else ""
        return f"rollcall node --rank {rank} --num-nodes {record.num_nodes} {where}{slots}{name}"

    def more_slots(self, num_slots: int | str) -> str:
        return f"rollcall node ... --slots {num_slots}"
