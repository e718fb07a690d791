"""One rank of an all-reduce between nodes, timed: ``python -m rollcall.doctor.bandwidth``; started by the doctor.

Its task is one line of JSON on stdin. It holds the secret of the meeting, so it is not an argument, which every user of the node
can see. Rank 0 listens where the others meet it, and prints its port first. Every rank ends by printing one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

NUM_BYTES = 32 << 20
ROUNDS = 3


def main() -> None:
    task = SimpleNamespace(**json.loads(sys.stdin.readline()))

    import torch
    import torch.distributed as dist

    from rollcall.net.door import listen_at
    from rollcall.net.meeting import MeetingServer, MeetingStore, Place, greet

    timeout = timedelta(seconds=task.timeout_s)
    if task.rank == 0:
        listener = listen_at(task.master)
        task.port = listener.getsockname()[1]
        server = MeetingServer(listener, secret=task.secret)
        print(task.port, flush=True)
    place = Place(address=task.master, port=task.port, secret=task.secret)
    store = MeetingStore(place, timeout_s=task.timeout_s)
    dist.init_process_group(task.backend, store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
    if task.backend == "gloo":
        members = range(task.world_size)
        greet(dist.group.WORLD, store, name="all", rank=task.rank, members=members, secret=task.secret)
    device = torch.device("cuda" if task.backend == "nccl" else "cpu")
    data = torch.ones(NUM_BYTES // 4, dtype=torch.float32, device=device)
    seconds: list[float] = []
    for _ in range(1 + ROUNDS):  # the first opens connections
        data.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        if task.backend == "nccl":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    right = bool((data == float(task.world_size)).all())
    # What crosses each link: a ring sends 2 (n - 1) / n of the data.
    moved = NUM_BYTES * 2 * (task.world_size - 1) / task.world_size
    print(json.dumps({"bytes_per_s": moved / min(seconds[1:]), "right": right}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    store.close()
    if task.rank == 0:
        server.close()


if __name__ == "__main__":
    main()
