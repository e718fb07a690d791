"""One rank of an all-reduce between nodes, timed: ``python -m rollcall.doctor.bandwidth``; started by the doctor.

Rank 0 listens where the others meet it, and prints its port first. Every rank ends by printing one line of JSON. The secret
of the meeting is the first line of stdin: arguments are for every user of the node to see.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

NUM_BYTES = 32 << 20
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--timeout", type=float, required=True)
    args = parser.parse_args()

    import torch
    import torch.distributed as dist

    from rollcall.net.door import listen_at
    from rollcall.net.meeting import MeetingServer, MeetingStore, Place, greet

    secret = sys.stdin.readline().strip()
    timeout = timedelta(seconds=args.timeout)
    if args.rank == 0:
        listener = listen_at(args.master)
        args.port = listener.getsockname()[1]
        server = MeetingServer(listener, secret=secret)
        print(args.port, flush=True)
    place = Place(address=args.master, port=args.port, secret=secret)
    store = MeetingStore(place, timeout_s=args.timeout)
    dist.init_process_group(args.backend, store=store, rank=args.rank, world_size=args.world_size, timeout=timeout)
    if args.backend == "gloo":
        members = range(args.world_size)
        greet(dist.group.WORLD, store, name="all", rank=args.rank, members=members, secret=secret)
    device = torch.device("cuda" if args.backend == "nccl" else "cpu")
    data = torch.ones(NUM_BYTES // 4, dtype=torch.float32, device=device)
    seconds: list[float] = []
    for _ in range(1 + ROUNDS):  # the first opens connections
        data.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        if args.backend == "nccl":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    right = bool((data == float(args.world_size)).all())
    # What crosses each link: a ring sends 2 (n - 1) / n of the data.
    moved = NUM_BYTES * 2 * (args.world_size - 1) / args.world_size
    print(json.dumps({"bytes_per_s": moved / min(seconds[1:]), "right": right}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    store.close()
    if args.rank == 0:
        server.close()


if __name__ == "__main__":
    main()
