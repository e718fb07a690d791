"""One rank of an all-reduce between nodes, timed: ``python -m rollcall.cluster.bandwidth``; started by the doctor.

Rank 0 makes the store that the others meet at and prints its port first. Every rank ends by printing one line of JSON.
"""

from __future__ import annotations

import argparse
import json
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

    timeout = timedelta(seconds=args.timeout)
    first = args.rank == 0
    store = dist.TCPStore(
        args.master,
        0 if first else args.port,
        args.world_size,
        is_master=first,
        timeout=timeout,
        wait_for_workers=False,
    )
    if first:
        print(store.port, flush=True)
    dist.init_process_group(args.backend, store=store, rank=args.rank, world_size=args.world_size, timeout=timeout)
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


if __name__ == "__main__":
    main()
