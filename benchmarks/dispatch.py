"""What the worker-group layer costs over plain Ray actor calls that carry the same payload.

python -m benchmarks.dispatch                       1, 8 and 32 workers
python -m benchmarks.dispatch --workers 8           the bar alone: at most 1.15x at 1 KB and at 64 MB

Both sides call actors that do nothing but look at what they got, in turns, in one run; medians count. The plain side is
written as well as Ray allows: a large argument is put once and its reference given to all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import print_result
from rollcall.cluster import VirtualCluster, WorkerBuilder, WorkerGroup, init_ray

KB, MB = 1024, 1024 * 1024
PAYLOADS = {"1 KB": KB, "64 MB": 64 * MB}
BAR_WORKERS = 8
BAR = 1.15


class Worker:
    def size(self, data: Any) -> int:
        return len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=300, help="turns at 1 KB; a tenth of them at 64 MB")
    args = parser.parse_args()
    import ray

    init_ray(num_gpus=max(args.workers))
    try:
        rows = [row for num_workers in args.workers for row in measure_size(num_workers, repeats=args.repeats)]
    finally:
        ray.shutdown()
    for row in rows:
        print(row, flush=True)
    bar = [row["cost"] for row in rows if row["workers"] == BAR_WORKERS]
    print_result(
        "dispatch",
        workload=f"actor calls with {' and '.join(PAYLOADS)}",
        device="cpu",
        ours={"rows": rows, "worst_cost_at_bar": max(bar, default=None), "bar": BAR, "bar_workers": BAR_WORKERS},
        peer={"ray": ray.__version__},
        ratio=round(1 / max(bar), 3) if bar else None,
    )


def measure_size(num_workers: int, *, repeats: int) -> list[dict[str, Any]]:
    import ray

    with VirtualCluster([num_workers], num_gpus_per_node=num_workers) as cluster:
        group = WorkerGroup(cluster=cluster, remote_worker_builder=WorkerBuilder(Worker), name_prefix="bench")
        actors: list[Any] = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(num_workers)]
        ray.get([actor.size.remote(b"") for actor in actors])
        rows = []
        for name, num_bytes in PAYLOADS.items():
            data = np.zeros(num_bytes, dtype=np.uint8)
            turns = repeats if num_bytes < MB else max(repeats // 10, 3)
            sides = (_whole(group, data), _plain_whole(actors, data))
            rows.append(_row(num_workers, name, "all workers", sides, turns=turns))
            sides = (_sharded(group, data), _plain_sharded(actors, data))
            rows.append(_row(num_workers, name, "sharded", sides, turns=turns))
        for actor in actors:
            ray.kill(actor)
    return rows


def _whole(group: WorkerGroup, data: np.ndarray) -> Callable[[], list[int]]:
    return lambda: group.get_all_worker_results(group.run_all_workers_single_data("size", data=data))


def _plain_whole(actors: list[Any], data: np.ndarray) -> Callable[[], list[int]]:
    import ray

    def run() -> list[int]:
        argument = ray.put(data) if data.nbytes > 100 * KB else data
        return ray.get([actor.size.remote(data=argument) for actor in actors])

    return run


def _sharded(group: WorkerGroup, data: np.ndarray) -> Callable[[], list[int]]:
    return lambda: group.get_all_worker_results(
        group.run_all_workers_sharded_data("size", data=data, in_sharded_axes=["batch"], replicate_on_axes=["model"])
    )


def _plain_sharded(actors: list[Any], data: np.ndarray) -> Callable[[], list[int]]:
    import ray

    def run() -> list[int]:
        parts = np.array_split(data, len(actors))
        return ray.get([actor.size.remote(data=part) for actor, part in zip(actors, parts, strict=True)])

    return run


def _row(
    num_workers: int,
    payload: str,
    call: str,
    sides: tuple[Callable[[], list[int]], Callable[[], list[int]]],
    *,
    turns: int,
) -> dict[str, Any]:
    seconds: tuple[list[float], list[float]] = ([], [])
    assert sides[0]() == sides[1](), "the two sides do not do the same"
    gc.collect()
    for turn in range(turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            sides[side]()
            seconds[side].append(time.perf_counter() - start)
    ours, plain = map(statistics.median, seconds)
    return {
        "workers": num_workers,
        "payload": payload,
        "call": call,
        "ours_ms": round(1000 * ours, 3),
        "plain_ms": round(1000 * plain, 3),
        "cost": round(ours / plain, 3),
    }


if __name__ == "__main__":
    main()
