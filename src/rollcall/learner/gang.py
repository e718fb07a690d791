"""The processes that train one model together.

Each process has the full model, or a part of it (``sharded.py``), and works on its own rows. Gradients are summed over all
members before the optimizer steps, so all members take the same step. A single learner is a gang of one. Every member must make the
same calls in the same order. Members rendezvous through a key-value store that only they can access. The members of
every process group prove their identity to each other before they use the group (``nodes/meeting.py``).
"""

from __future__ import annotations

import heapq
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollcall.base.types import Floats
from rollcall.nodes.meeting import MeetingServer, MeetingStore, Place, greet
from rollcall.plan.mesh import ModelSplit

BUCKET_BYTES = 64 << 20  # gradients go over the network in pieces of about this size
JOIN_S = 300.0
# A debugger may stop a member for this long. If a member dies, the other members' calls end at once. The supervision of workers
# notices a silent or stuck member and kills it.
COLLECTIVE_S = 24 * 3600.0


class Gang:
    # Set only if the gang has several members:
    _secret: str
    _server: MeetingServer | None
    _store: MeetingStore
    _small: Any  # the ProcessGroup for small values

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.nodes: Sequence[str] = ("",)  # where each member runs
        self.meshes: dict[Any, Any] = {}  # groups of members, created once for each way to split a model

    @classmethod
    def alone(cls) -> Gang:
        return cls(rank=0, size=1)

    @classmethod
    def join(
        cls,
        place: Place,
        *,
        rank: int,
        size: int,
        device: torch.device,
        listener: socket.socket | None = None,
        interface: str | None = None,
    ) -> Gang:
        """Join the other members through rank 0's listener, before the deadline. torch also listens on ``interface``."""
        gang = cls(rank=rank, size=size)
        if size == 1:
            return gang
        if interface is not None:  # torch creates its own groups, and reads the interface only from these variables
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=" means exactly this name, not a prefix
        gang._secret = place.secret
        gang._server = MeetingServer(listener, secret=place.secret) if listener is not None else None
        gang._store = MeetingStore(place, timeout_s=JOIN_S)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=gang._store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=JOIN_S),
            device_id=device if device.type == "cuda" else None,
        )
        gang._small = dist.new_group(backend="gloo", timeout=timedelta(seconds=JOIN_S))
        gang.greet(dist.group.WORLD, "all")
        gang.greet(gang._small, "small")
        gang.nodes = gang.gather(os.environ.get("NODE_RANK") or socket.gethostname())
        return gang

    def greet(self, group: Any, name: str) -> None:
        """Let the members of a new group prove their identity to each other. Each group needs a new name."""
        if self.size == 1:
            return
        if dist.get_backend(group) == "gloo":
            members = dist.get_process_group_ranks(group)
            greet(group, self._store, name=name, rank=self.rank, members=members, secret=self._secret)
        # torch (2.13) has no public call to set a timeout. Groups that torch creates by itself have torch's default timeout.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), group)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
            self._store.close()
            if self._server is not None:
                self._server.close()

    def sum_over(self, tensor: Tensor) -> None:
        """Replace a tensor with its sum over the gang."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather each member's bytes, by rank. They travel padded to the longest."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._small)
        counts = [int(length) for length in lengths]
        most = max(counts)
        if most == 0:
            return [b""] * self.size
        own = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self._small)
        return [bytes(tensor[:count].numpy()) for tensor, count in zip(found, counts, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Gather a small value from each member, by rank, as JSON. Never use pickle for this, because reading a pickle runs code."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def names_of_all(self, names: list[str]) -> list[str]:
        """Return the union of all members' ``names``. All members get the same list, so either all continue or none does."""
        return list(dict.fromkeys(name for own in self.gather(names) for name in own))

    def gather_floats(self, values: Floats) -> list[Floats]:
        """Gather each member's float32 values, by rank. Their lengths may differ."""
        own = np.ascontiguousarray(values, dtype="<f4").tobytes()
        return [np.frombuffer(data, dtype="<f4").astype(np.float32) for data in self.gather_bytes(own)]

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor with its sum over the gang."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            bucket.append(tensor)
            num_bytes += tensor.nbytes
            if num_bytes >= BUCKET_BYTES or tensor is tensors[-1]:
                self._sum_bucket(bucket)
                bucket, num_bytes = [], 0

    def _sum_bucket(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.sum_over(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """torch's view of a split. Weights that tensor parallelism does not cut are also sharded across the tensor ranks."""

    data: Any  # DeviceMesh [shard], or [replicate, shard]
    tensor: Any  # DeviceMesh [tensor]
    every: Any  # DeviceMesh [every], which is shard x tensor, or [replicate, every]
    kv_group: Any  # neighbours in a tensor group that have the same key/value head, if there are any


def make_meshes(gang: Gang, split: ModelSplit, *, device_type: str, kv_copies: int) -> Meshes:
    """Create torch's groups for a model that is split across a gang. Every rank of the gang must call this at the same point."""
    from torch.distributed.device_mesh import init_device_mesh

    if split.num_lanes * split.tensor == 1 and not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(device_type, (split.replicate, split.shard, split.tensor), mesh_dim_names=names)
    flat = init_device_mesh(
        device_type, (split.replicate, split.shard * split.tensor), mesh_dim_names=("replicate", "every")
    )
    meshes = {"": mesh, "flat ": flat}
    kv_group = None
    if kv_copies > 1:
        sizes = (split.num_lanes * split.tensor // kv_copies, kv_copies)
        meshes["kv "] = init_device_mesh(device_type, sizes, mesh_dim_names=("others", "kv"))
        kv_group = meshes["kv "].get_group("kv")
    for kind, one in meshes.items():
        for name in one.mesh_dim_names or ():
            known_as = f"{kind}{name} of {split.replicate} x {split.shard} x {split.tensor}, {kv_copies}"
            gang.greet(one.get_group(name), known_as)
    several = split.replicate > 1
    return Meshes(
        data=mesh["replicate", "shard"] if several else mesh["shard"],
        tensor=mesh["tensor"],
        every=flat if several else flat["every"],
        kv_group=kv_group,
    )


def share(costs: Sequence[int], *, keys: Sequence[int], attempts: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the items for ``rank`` of ``size``. The total cost is about the same for all ranks. Items with equal keys stay together if
    there are enough keys for all members. Items of one attempt always stay together.

    >>> share([5, 1, 1, 3], keys=[0, 1, 2, 3], attempts=[0, 1, 2, 3], rank=1, size=2)
    [1, 2, 3]
    """
    if size == 1:
        return list(range(len(costs)))
    parts = units_of(keys)
    if len(parts) < 2 * size:
        parts = units_of(attempts)
    return balance(parts, [sum(costs[item] for item in part) for part in parts], size=size)[rank]


def units_of(keys: Sequence[int]) -> list[list[int]]:
    """Group the indices of equal keys, in the order of first appearance.

    >>> units_of([7, 8, 7])
    [[0, 2], [1]]
    """
    units: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        units.setdefault(key, []).append(place)
    return list(units.values())


def balance(parts: Sequence[list[int]], costs: Sequence[int], *, size: int) -> list[list[int]]:
    """Distribute parts among ``size`` members, the costliest first, each to the member with the least cost so far. Items are sorted.

    >>> balance([[0, 1], [2], [3], [4, 5]], [9, 4, 6, 3], size=2)
    [[0, 1, 4, 5], [2, 3]]
    """
    members: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for index in sorted(range(len(parts)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        members[rank] += parts[index]
        heapq.heappush(loads, (load + costs[index], rank))
    return [sorted(items) for items in members]
