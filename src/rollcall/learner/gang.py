"""The processes that train one model together.

Each holds the whole model, or a part of it (``sharded.py``), and works on its own rows; gradients are added up over all
before the optimizer steps, so all take the same step. A learner on its own is a gang of one. Every member must make the
same calls in the same order.
"""

from __future__ import annotations

import heapq
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 << 20  # gradients go over the network in pieces of about this size
JOIN_S = 300.0
COLLECTIVE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    rank: int
    size: int
    nodes: tuple[str, ...]  # where each member runs
    sum_over: Callable[[Tensor], None]  # in place
    gather: Callable[[Any], list[Any]]  # a small object of each member, by rank
    meshes: dict[Any, Any] = field(default_factory=dict)  # groups of members, made once for each way to divide a model

    @classmethod
    def alone(cls) -> Gang:
        return cls(rank=0, size=1, nodes=("",), sum_over=lambda tensor: None, gather=lambda value: [value])

    @classmethod
    def join(cls, *, address: str, port: int, rank: int, size: int, device: torch.device) -> Gang:
        """Meet the others at rank 0's port, by its deadline."""
        if size == 1:
            return cls.alone()
        host = f"[{address}]" if ":" in address else address
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=JOIN_S),
            device_id=device if device.type == "cuda" else None,
        )
        small = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S))

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=small)
            return values

        def sum_over(tensor: Tensor) -> None:
            dist.all_reduce(tensor)

        node = os.environ.get("NODE_RANK") or socket.gethostname()
        return cls(rank=rank, size=size, nodes=tuple(gather(node)), sum_over=sum_over, gather=gather)

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over the gang, in place."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            bucket.append(tensor)
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= BUCKET_BYTES:
                self._sum_bucket(bucket)
                bucket, num_bytes = [], 0
        self._sum_bucket(bucket)

    def share(self, costs: Sequence[int], *, keys: Sequence[int]) -> list[int]:
        """This member's part of the items."""
        return share(costs, keys=keys, rank=self.rank, size=self.size)

    def _sum_bucket(self, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.sum_over(flat)
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def share(costs: Sequence[int], *, keys: Sequence[int], rank: int, size: int) -> list[int]:
    """The part of the items that ``rank`` of ``size`` gets, about equal in cost; items with equal keys stay together where
    there are enough keys for everyone.

    >>> share([5, 1, 1, 3], keys=[0, 1, 2, 3], rank=1, size=2)
    [1, 2, 3]
    """
    if size == 1:
        return list(range(len(costs)))
    units: dict[int, list[int]] = {}
    for item, key in enumerate(keys):
        units.setdefault(key, []).append(item)
    parts = list(units.values()) if len(units) >= 2 * size else [[item] for item in range(len(costs))]
    return balance(parts, [sum(costs[item] for item in part) for part in parts], size=size)[rank]


def balance(parts: Sequence[list[int]], costs: Sequence[int], *, size: int) -> list[list[int]]:
    """Parts over ``size`` members: the costliest first, each to whoever has least. The items of a member are in order.

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
