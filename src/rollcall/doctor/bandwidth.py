"""One rank of an all-reduce between nodes, timed."""

from __future__ import annotations

import os
import time
from datetime import timedelta

NUM_BYTES = 32 << 20
ROUNDS = 3


def all_reduce(
    *,
    rank: int,
    world_size: int,
    backend: str,
    interface: str | None,
    master: str,
    port: int,
    secret: str,
    timeout_s: float,
) -> float:
    """Bytes a second that cross each link, in the fastest of a few rounds. The ranks meet at rank 0's ``master`` and ``port``."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if backend == "nccl" else ""
    if interface is not None:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    import torch
    import torch.distributed as dist

    from rollcall.net.meeting import MeetingStore, Place, greet

    store = MeetingStore(Place(address=master, port=port, secret=secret), timeout_s=timeout_s)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if backend == "gloo":
        greet(dist.group.WORLD, store, name="all", rank=rank, members=range(world_size), secret=secret)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    data = torch.ones(NUM_BYTES // 4, dtype=torch.float32, device=device)
    seconds: list[float] = []
    for _ in range(1 + ROUNDS):  # the first opens connections
        data.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        if backend == "nccl":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if not bool((data == float(world_size)).all()):
        raise RuntimeError("the sum is wrong")
    dist.barrier()
    dist.destroy_process_group()
    # A ring sends 2 (n - 1) / n of the data over each link.
    return NUM_BYTES * 2 * (world_size - 1) / world_size / min(seconds[1:])
