"""Worker groups, the same in one process and on a Ray of two nodes whose ranks are the reverse of Ray's own order."""

from __future__ import annotations

import gc
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import group_workers
import numpy as np
import pytest
import torch
from learners import make_sample

from rollcall.base.process_table import Process
from rollcall.cluster import (
    ClusterError,
    MultiWorkerFuture,
    NamedSharding,
    RayVirtualCluster,
    RayWorkerBuilder,
    RayWorkerGroup,
    Seat,
    VirtualCluster,
    WorkerBuilder,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    WorkerTimeoutError,
    init_ray,
)
from rollcall.process.groups.host import lease_port, load_class

SLOTS = 8  # on each of two nodes
IP_LOCAL_PORT_RANGE = 51  # not yet in Python's socket module
ECHO = "group_workers.Echo"


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    def node(rank: int) -> dict[str, Any]:
        labels = {"rollcall.rank": str(rank)}
        return dict(num_gpus=SLOTS, num_cpus=2, object_store_memory=150 * 2**20, labels=labels, include_dashboard=False)

    with pytest.MonkeyPatch.context() as patch:
        paths = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]  # workers find group_workers there
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # on a busy machine a node needs more than its 30 s
        cluster = Cluster(initialize_head=True, head_node_args=node(1))
        try:
            cluster.add_node(**node(0))
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    init_ray(backend=request.param)
    return request.param


@pytest.fixture
def on_ray(ray_cluster: None) -> None:
    init_ray(backend="ray")


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Callable[[str], WorkerGroup]:
    """For each backend a group of two workers on each of two nodes, for tests that leave it as it is."""
    return lambda backend: request.getfixturevalue(f"{backend}_group")


@pytest.fixture(scope="module")
def local_group() -> Iterator[WorkerGroup]:
    with VirtualCluster([2, 2], num_gpus_per_node=SLOTS) as cluster:
        yield make_group(cluster, name_prefix="policy", env_vars={"COLOUR": "blue"})


@pytest.fixture(scope="module")
def ray_group(ray_cluster: None) -> Iterator[WorkerGroup]:
    with VirtualCluster([2, 2], num_gpus_per_node=SLOTS) as cluster:
        yield make_group(cluster, name_prefix="policy", env_vars={"COLOUR": "blue"})


def make_group(cluster: VirtualCluster, target: str | type = ECHO, *args: Any, **options: Any) -> WorkerGroup:
    return WorkerGroup(cluster=cluster, remote_worker_builder=WorkerBuilder(target, *args), **options)


def is_running(pid: int) -> bool:
    return Process.of(pid) is not None


def run(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> list[Any]:
    return group.get_all_worker_results(group.run_all_workers_single_data(method, *args, **kwargs), timeout_s=120)


def sharded(group: WorkerGroup, data: Any, **options: Any) -> list[Any]:
    futures = group.run_all_workers_sharded_data(
        "train", data=data, in_sharded_axes=["batch"], replicate_on_axes=["model"], **options
    )
    return group.get_all_worker_results(futures, timeout_s=120)


@pytest.mark.parametrize("backend", ["local", "ray"], indirect=True)
def test_the_interface_works_as_it_is_documented(backend):
    data, batch, i = list(range(10)), [7], 1

    def loss_fn(rows):
        return float(len(rows))

    init_ray(backend=backend)
    cluster = RayVirtualCluster(bundle_ct_per_node_list=[2, 2], num_gpus_per_node=8, use_gpus=True)
    builder = RayWorkerBuilder("group_workers.Echo")
    group = RayWorkerGroup(cluster=cluster, remote_worker_builder=builder, workers_per_node=1, name_prefix="policy")
    futures = group.run_all_workers_single_data(method_name="train", data=data, loss_fn=loss_fn)
    results = group.get_all_worker_results(futures)
    assert results == [{"loss": 10.0, "rank": rank, "data": data} for rank in (0, 1)]
    futures = group.run_all_workers_sharded_data(method_name="train", data=data, in_sharded_axes=["batch"],
                                                 replicate_on_axes=["model"], output_is_replicated=["loss"])  # fmt: skip
    results = group.get_all_worker_results(futures)
    assert results == [{"loss": 1.5, "rank": 0, "data": data[:5]}, {"rank": 1, "data": data[5:]}]
    future = group.run_single_worker_single_data(method_name="train", worker_idx=i, data=batch)
    results = group.get_all_worker_results(MultiWorkerFuture(futures=[future]))
    assert results == [{"loss": 1.5, "rank": 1, "data": [7]}]
    futures = group.run_all_workers_single_data(method_name="prepare_for_training", run_rank_0_only_axes=["setup"])
    assert group.get_all_worker_results(futures) == [0]
    assert (cluster.world_size(), cluster.node_count(), group.dp_size) == (4, 2, 2)
    assert group.workers[0].is_alive() is True
    assert [worker["name"] for worker in group.worker_metadata] == ["policy-0", "policy-1"]
    group.shutdown()
    assert not group.workers[0].is_alive()
    cluster.shutdown()


@pytest.mark.parametrize(
    "data",
    [
        list(range(10)),
        np.arange(20).reshape(10, 2),
        pytest.param(torch.arange(10), marks=pytest.mark.slow),
        pytest.param({"ids": np.arange(10), "text": [str(number) for number in range(10)]}, marks=pytest.mark.slow),
        [make_sample(draw) for draw in range(10)],
    ],
    ids=lambda data: type(data).__name__ if not isinstance(data, list) else type(data[0]).__name__,
)
def test_rows_reach_the_workers_in_order_and_uneven(backend, groups, data):
    results = sharded(groups(backend), data)
    parts = [result["data"] for result in results]
    sizes = [len(part["ids"]) if isinstance(part, dict) else len(part) for part in parts]
    assert sizes == [3, 3, 2, 2] and [result["rank"] for result in results] == [0, 1, 2, 3]
    if isinstance(data, dict):
        assert [row for part in parts for row in part["text"]] == data["text"]
    elif isinstance(data, list):
        draws = [getattr(row, "draw", row) for part in parts for row in part]
        assert draws == [getattr(row, "draw", row) for row in data]
    else:
        assert np.array_equal(np.concatenate([np.asarray(part) for part in parts]), np.asarray(data))


def test_workers_without_rows_are_called_with_none(backend, groups):
    assert [result["data"] for result in sharded(groups(backend), [5, 6])] == [[5], [6], [], []]


def test_common_arguments_reach_everyone_whole(backend, groups):
    results = sharded(groups(backend), [1, 2, 3, 4], common_kwargs={"loss_fn": sum})
    assert [result["loss"] for result in results] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="data is an argument to split and also in common_kwargs"):
        sharded(groups(backend), [1], common_kwargs={"data": [1]})


def test_outputs_are_taken_once_along_a_replicated_axis(backend, groups):
    assert [result["rank"] for result in sharded(groups(backend), [1] * 4, output_is_replicated=["batch"])] == [0]


def test_unknown_names_are_refused_with_those_that_exist(backend, groups):
    group = groups(backend)
    with pytest.raises(
        ValueError, match=r"'los' is neither an axis \(batch, model\) nor a field of the result \(loss, rank, data"
    ):
        sharded(group, [1] * 4, output_is_replicated=["los"])
    with pytest.raises(ValueError, match="run_rank_0_only_axes: 'tensor' is not one of 'batch', 'model', 'setup'"):
        group.run_all_workers_single_data("size", data=[], run_rank_0_only_axes=["tensor"])
    with pytest.raises(ValueError, match="worker_idx=4 is out of range; policy has workers 0 to 3"):
        group.run_single_worker_single_data("size", 4, data=[])
    with pytest.raises(WorkerError, match="'Echo' object has no attribute 'trian'"):
        run(group, "trian")


def test_results_have_the_shape_of_what_was_asked_for(backend, groups):
    group = groups(backend)
    one = group.run_single_worker_single_data("size", 2, data=[1, 2])
    all_four = group.run_all_workers_single_data("size", [1])
    rows = group.run_all_workers_sharded_data("size", [1] * 6, in_sharded_axes=["batch"])
    assert group.get_all_worker_results(one) == [2]
    assert group.get_all_worker_results([one, one]) == [2, 2]
    assert group.get_all_worker_results([one, all_four, rows]) == [2, [1, 1, 1, 1], [2, 2, 1, 1]]
    assert group.get_all_worker_results(rows) == [2, 2, 1, 1]
    assert group.get_all_worker_results([]) == []


def test_a_coroutine_is_run_to_its_end(backend, groups):
    assert run(groups(backend), "waits") == [f"awaited {rank}" for rank in range(4)]


def test_a_workers_environment_says_who_it_is(backend, groups):
    group = groups(backend)
    seen = run(group, "env", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "COLOUR")
    assert [tuple(env.values()) for env in seen] == [
        ("0", "0", "0", "4", "2", "blue"),
        ("1", "1", "0", "4", "2", "blue"),
        ("2", "0", "1", "4", "2", "blue"),
        ("3", "1", "1", "4", "2", "blue"),
    ]
    masters = {tuple(env.values()) for env in run(group, "env", "MASTER_ADDR", "MASTER_PORT")}
    assert len(masters) == 1 and None not in masters.pop()
    assert "RANK" not in os.environ


def test_an_exception_arrives_with_role_rank_node_and_its_own_traceback(backend, groups):
    with pytest.raises(WorkerError) as caught:
        run(groups(backend), "fail_on", 2)
    text = str(caught.value)
    assert "policy rank 2 on node 1 (" in text and "group_workers.py" in text and "in fail_on" in text
    assert "Stubborn: cannot be pickled and read back (rank 2)" in text and "rollcall/cluster" not in text
    assert (caught.value.role, caught.value.ranks, caught.value.node_ranks) == ("policy", (2,), (1,))
    with pytest.raises(WorkerError) as caught:
        run(groups(backend), "fail")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_a_worker_that_cannot_be_made_or_stops_meanwhile_is_named_and_leaves_nothing(backend, tmp_path):
    with VirtualCluster([2], num_gpus_per_node=SLOTS) as cluster:
        with pytest.raises(WorkerError, match=r"(?s)critic rank 1 on node \d .*no model in this folder"):
            make_group(cluster, "group_workers.Broken", tmp_path, name_prefix="critic")
        left = [int(path.name) for path in tmp_path.iterdir()]
        assert len(left) == (backend == "ray") and not any(map(is_running, left))
        if backend == "ray":
            said = r"critic rank 1 on node \d \(.*its process is stopped \(state T\)"
            with pytest.raises(WorkerDiedError, match=said):
                make_group(cluster, "group_workers.Stops", name_prefix="critic")
        else:  # on Ray, test_worker_groups_lab.py
            with pytest.raises(WorkerError, match="No module named 'nowhere'"):
                make_group(cluster, "nowhere.Worker")
        assert run(make_group(cluster), "prepare_for_training") == [0, 1]  # the slots are free again


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)
def test_a_class_and_its_arguments_can_be_given_themselves_and_a_group_that_was_shut_down_says_so(backend):
    with VirtualCluster([1], num_gpus_per_node=SLOTS) as cluster:
        group = make_group(cluster, group_workers.Echo, 40)
        assert run(group, "prepare_for_training") == [40]
        assert group.name_prefix == "worker"
        group.shutdown()
        group.shutdown()
        with pytest.raises(ClusterError, match="worker has been shut down"):
            run(group, "prepare_for_training")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(workers_per_node=3), "3 workers on the 2 slots of node 0 do not share them evenly"),
        (dict(workers_per_node=[1]), r"workers_per_node=\[1\] needs one number for each of the cluster's 2 nodes"),
        (dict(seats=[Seat(node_rank=0, slots=(2,))]), "node 0 has slots 0 to 1 in this cluster, but no slot 2"),
        (
            dict(seats=[Seat(node_rank=5, slots=(0,))]),
            "node 5 has no slot in this cluster; the nodes with slots are 0, 1",
        ),
        (dict(workers_per_node=1, seats=[]), "give only one of them"),
        (dict(seats=[]), "at least one worker"),
        (dict(sharding_annotations=NamedSharding([0, 1], names=["batch"])), r"the sharding has ranks \[0, 1\]"),
        (dict(env_vars={"RANK": "7"}), "RANK is set by the worker group"),
        (dict(node_env_vars={3: {"A": "b"}}), "node 3 has no slot"),
    ],
)
def test_seats_that_do_not_exist_are_refused(options, said):
    init_ray(backend="local")
    with pytest.raises(ValueError, match=said):
        make_group(VirtualCluster([2, 2]), **options)


def test_clusters_and_classes_that_make_no_sense_are_refused():
    init_ray(backend="local")
    refused: list[tuple[dict[str, Any], str]] = [
        (dict(bundle_ct_per_node_list=[]), "has no slot"),
        (dict(bundle_ct_per_node_list=[9]), "requests 9 slots on a node with num_gpus_per_node=8"),
        (dict(bundle_ct_per_node_list=[1], node_ranks=[0, 1]), "needs one node for each entry"),
    ]
    for arguments, said in refused:
        with pytest.raises(ValueError, match=said):
            VirtualCluster(**arguments)
    with pytest.raises(ValueError, match="'Worker' does not name a worker class; write 'module.Class'"):
        WorkerBuilder("Worker")


def test_a_slot_takes_one_group():
    init_ray(backend="local")
    cluster = VirtualCluster([2])
    make_group(cluster, name_prefix="actor")
    with pytest.raises(
        ClusterError, match="slot 0 of node 0 is taken by actor; shut down that group, or use other slots"
    ):
        make_group(cluster, name_prefix="reward")


def test_uneven_nodes_and_empty_ones_keep_their_ranks():
    init_ray(backend="local")
    group = make_group(VirtualCluster([3, 0, 1]))
    assert [(worker["node_rank"], worker["node_idx"]) for worker in group.worker_metadata] == [(0, 0)] * 3 + [(2, 1)]
    group = make_group(VirtualCluster([3, 1]), workers_per_node=[1, 1])
    assert [worker["bundle_indices"] for worker in group.worker_metadata] == [(0,), (0,)]


def test_a_group_that_cannot_be_ended_does_not_keep_the_others(monkeypatch):
    def fail(**_):
        raise ClusterError("the processes of stuck cannot be stopped")

    init_ray(backend="local")
    cluster = VirtualCluster([3])
    names = ["first", "stuck", "last"]
    groups = [
        make_group(cluster, seats=[Seat(node_rank=0, slots=(slot,))], name_prefix=name)
        for slot, name in enumerate(names)
    ]
    workers = [group.workers[0] for group in groups]
    monkeypatch.setattr(groups[1]._gang, "stop", fail)
    with pytest.raises(ClusterError, match="the processes of stuck cannot be stopped"):
        cluster.shutdown()
    assert [worker.is_alive() for worker in workers] == [False, True, False]


def test_the_local_backend_can_be_chosen_from_outside():
    script = (
        "from rollcall.cluster import *\ninit_ray()\n"
        "group = RayWorkerGroup(cluster=RayVirtualCluster([2]), remote_worker_builder=RayWorkerBuilder('group_workers.Echo'))\n"
        "print(group.get_all_worker_results(group.run_all_workers_single_data('prepare_for_training')))\n"
        "import sys; assert 'ray' not in sys.modules"
    )
    env = {**os.environ, "ROLLCALL_BACKEND": "local", "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "[0, 1]", done.stderr


def test_importing_the_package_imports_neither_ray_nor_torch():
    script = "import sys, rollcall.cluster\nassert not {'ray', 'torch'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_leased_port_is_given_to_nobody_else_until_it_is_used():
    lease = lease_port()
    port = lease.getsockname()[1]
    for reuse in (0, 1):
        stranger = socket.socket()
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            narrow = struct.pack("I", port << 16 | port)  # this port alone
            stranger.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, narrow)
        except OSError:
            pytest.skip("this kernel cannot narrow the range of free ports")
        with pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("", 0))
        stranger.close()
    owner = socket.socket()
    owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    owner.bind(("", port))
    owner.listen()
    owner.close()
    lease.close()


@pytest.mark.slow
def test_without_a_cluster_init_ray_starts_one_here_and_joins_no_strangers(tmp_path):
    script = (
        "from rollcall.cluster import *\ninit_ray(num_gpus=2)\n"
        "with VirtualCluster([2]) as cluster:\n"
        "    print(cluster.world_size(), [node.devices for node in cluster.nodes])"
    )
    env = {**os.environ, "RAY_ADDRESS": "local", "ROLLCALL_STATE_DIR": str(tmp_path)}
    env["RAY_raylet_start_wait_time_s"] = "120"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "2 [('0', '1')]", done.stderr


@pytest.mark.slow
def test_ranks_follow_node_rank_and_slot_and_see_their_own_accelerators(on_ray, groups):
    import ray

    group = groups("ray")
    head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    assert [node.node_id == head for node in group.cluster.nodes] == [False, True]  # the head has rank 1
    visible = [env["CUDA_VISIBLE_DEVICES"] for env in run(group, "env", "CUDA_VISIBLE_DEVICES")]
    assert visible == [worker["devices"][0] for worker in group.worker_metadata]
    assert visible[:2] == sorted(set(visible[:2])) and visible[2:] == sorted(set(visible[2:]))


@pytest.mark.slow
def test_large_arguments_are_put_once(on_ray, groups, monkeypatch):
    import ray

    group, put = groups("ray"), []
    ray_put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: put.append(len(value)) or ray_put(value))
    large = np.zeros(200_000, dtype=np.uint8)
    assert run(group, "size", large) == [200_000] * 4
    assert run(group, "size", data=large[:10]) == [10] * 4
    assert put == [200_000]
    group.sharding, before = NamedSharding([[0, 1], [2, 3]], names=["batch", "model"]), group.sharding
    try:
        double = np.zeros(400_000, dtype=np.uint8)
        assert [len(result["data"]) for result in sharded(group, double)] == [200_000] * 4
    finally:
        group.sharding = before
    assert put == [200_000] * 3  # each half once, for two workers


@pytest.mark.slow
def test_a_deadline_names_who_is_missing(on_ray, groups):
    group = groups("ray")
    slow = group.run_single_worker_single_data("sleep", 3, 3.0)
    quick = group.run_single_worker_single_data("size", 0, data=[])
    with pytest.raises(
        WorkerTimeoutError, match=r"no answer after 0.5 s from 1 of 2 workers: policy rank 3 on node 1 \("
    ):
        group.get_all_worker_results([slow, quick], timeout_s=0.5)
    assert group.get_all_worker_results([slow, quick], timeout_s=60) == [None, 0]


@pytest.mark.slow
def test_a_dead_worker_is_named_at_once_and_shutdown_leaves_no_process(on_ray):
    with VirtualCluster([1, 1], num_gpus_per_node=SLOTS) as cluster:
        group = make_group(cluster, name_prefix="rollout")
        pids = [pid for pair in run(group, "spawn") for pid in pair]
        assert all(map(is_running, pids))
        futures = group.run_all_workers_single_data("die_on", 1)  # rank 0 sleeps for ten minutes
        with pytest.raises(WorkerDiedError, match=r"rollout rank 1 on node 1 \(.*\) is dead"):
            group.get_all_worker_results(futures, timeout_s=120)
        assert [worker.is_alive() for worker in group.workers] == [True, False]
        with pytest.raises(WorkerDiedError, match="rollout rank 1"):
            group.get_all_worker_results(group.run_single_worker_single_data("size", 1, data=[]), timeout_s=120)
        group.shutdown()
        assert not any(map(is_running, pids))


@pytest.mark.slow
def test_processes_can_span_slots_and_share_them(on_ray):
    with VirtualCluster([3, 2], num_gpus_per_node=SLOTS) as cluster:
        seats = [Seat(node_rank=1, slots=(0,)), Seat(node_rank=0, slots=(1, 2))]
        wide = make_group(cluster, name_prefix="wide", seats=seats)
        names = ("RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
        devices = [node.devices for node in cluster.nodes]
        assert [tuple(env.values()) for env in run(wide, "env", *names)] == [
            ("0", "0", ",".join(devices[0][1:])),
            ("1", "1", devices[1][0]),
        ]
        seats = [Seat(node_rank=1, slots=(1,))] * 2
        many = make_group(cluster, name_prefix="many", seats=seats, node_env_vars={1: {"COLOUR": "red"}})
        assert [tuple(env.values()) for env in run(many, "env", "CUDA_VISIBLE_DEVICES", "COLOUR")] == [
            (devices[1][1], "red")
        ] * 2
        ports = [run(group, "env", "MASTER_PORT")[0] for group in (wide, many)]
        assert ports[0] != ports[1]


@pytest.mark.slow
def test_a_second_cluster_takes_the_next_node_with_room_and_too_much_is_refused(on_ray, groups):
    import ray

    assert groups("ray").cluster.world_size() == 4  # two slots of each node
    deadline = time.monotonic() + 600  # Ray frees the slots of clusters that are gone in its own time
    while ray.available_resources().get("GPU", 0) < 2 * SLOTS - 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    with VirtualCluster([SLOTS - 2]) as first, VirtualCluster([1]) as second:
        assert [node.node_rank for node in first.nodes + second.nodes] == [0, 1]
        with pytest.raises(ClusterError) as caught:
            VirtualCluster([1, 9], num_gpus_per_node=16, timeout_s=0.5)
        text = str(caught.value)
        assert "not enough room after waiting 0.5 s for slots: 10 slots were requested, [1, 9] by node" in text
        assert "node 0 (" in text and "has 8, 0 of them free" in text and "has 8, 5 of them free" in text


@pytest.mark.slow  # what test_simulate.py rehearses has them
def test_cpu_slots_need_no_gpu(on_ray):
    with VirtualCluster([1], use_gpus=False) as cluster:
        assert run(make_group(cluster), "env", "NODE_RANK") == [{"NODE_RANK": "0"}]


@pytest.mark.slow
def test_torch_meets_at_the_leased_port(on_ray, groups):
    group, ends = groups("ray"), [0, 3]  # one on each node: importing torch is most of the work of this
    meeting = group.run_some_workers_single_data("meet", ends, ends)
    assert group.get_all_worker_results(meeting, timeout_s=120) == ["03", "03"]


@pytest.mark.slow
def test_a_worker_class_is_imported_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is on again afterwards, also where the import fails."""
    monkeypatch.syspath_prepend(tmp_path)
    seen = "import gc\nclass Worker:\n    collected = gc.isenabled()\n"
    (tmp_path / "seen_worker.py").write_text(seen)
    (tmp_path / "broken_worker.py").write_text("import gc\nassert gc.isenabled(), 'broken'\n")
    assert gc.isenabled()
    assert not cast(Any, load_class("seen_worker.Worker")).collected and gc.isenabled()
    with pytest.raises(AssertionError, match="broken"):
        load_class("broken_worker.Worker")
    assert gc.isenabled()
