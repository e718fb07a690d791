"""Worker groups on four hosts: a driver on host 0, two workers on each host, ranks by node rank, nothing left behind."""

from __future__ import annotations

import json
import sys

import pytest
from lab.cluster import ENV, LabCluster

WORKER = """
import os, socket, subprocess, time

class Worker:
    def train(self, data, loss_fn=None):
        return {"loss": 0.5 if loss_fn is None else loss_fn(data), "rows": len(data), "rank": int(os.environ["RANK"])}

    def prepare_for_training(self):
        return int(os.environ["RANK"])

    def who(self):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
        return [socket.gethostname(), *(os.environ[name] for name in names)]

    def spawn(self):
        subprocess.Popen(["sleep", "987654"], start_new_session=True)

    def fail_on(self, rank):
        if int(os.environ["RANK"]) == rank:
            raise KeyError("no such row")

    def die_on(self, rank):
        if int(os.environ["RANK"]) == rank:
            os._exit(3)
        time.sleep(600)
"""

SNIPPET = """
import json
from rollcall.cluster import *

data, batch, i, loss_fn, said = list(range(20)), [1, 2, 3], 5, len, {}
if True:  # as users write it
    init_ray()
    cluster = RayVirtualCluster(bundle_ct_per_node_list=[8, 8, 8, 8], num_gpus_per_node=8, use_gpus=True)
    builder = RayWorkerBuilder("my.module.Worker")
    group = RayWorkerGroup(cluster=cluster, remote_worker_builder=builder, workers_per_node=2, name_prefix="policy")
    futures = group.run_all_workers_single_data(method_name="train", data=data, loss_fn=loss_fn)
    results = group.get_all_worker_results(futures)
    said["single"] = results
    futures = group.run_all_workers_sharded_data(method_name="train", data=data, in_sharded_axes=["batch"],
                                                 replicate_on_axes=["model"], output_is_replicated=["loss"])
    said["sharded"] = group.get_all_worker_results(futures)
    future = group.run_single_worker_single_data(method_name="train", worker_idx=i, data=batch)
    results = group.get_all_worker_results(MultiWorkerFuture(futures=[future]))
    said["one"] = results
    futures = group.run_all_workers_single_data(method_name="prepare_for_training", run_rank_0_only_axes=["setup"])
    said["setup"] = group.get_all_worker_results(futures)
    said["sizes"] = [cluster.world_size(), cluster.node_count(), group.workers[0].is_alive(), group.dp_size]
    said["metadata"] = [[worker["name"], worker["node_rank"], worker["address"]] for worker in group.worker_metadata]

said["who"] = group.get_all_worker_results(group.run_all_workers_single_data("who"))
group.get_all_worker_results(group.run_all_workers_single_data("spawn"))
for method in ("fail_on", "die_on"):
    try:
        group.get_all_worker_results(group.run_all_workers_single_data(method, 6), timeout_s=120)
    except WorkerError as error:
        said[method] = [type(error).__name__, str(error)]
said["alive"] = [worker.is_alive() for worker in group.workers]
try:
    RayVirtualCluster(bundle_ct_per_node_list=[1], timeout_s=1)
except ClusterError as error:
    said["full"] = str(error)
group.shutdown()
cluster.shutdown()
print(json.dumps(said))
"""


@pytest.mark.slow  # `test_worker_groups.py` has the same calls on two nodes of one host
def test_the_documented_snippet_runs_on_four_hosts_and_leaves_nothing_behind(lab_cluster: LabCluster):
    folder = lab_cluster.lab.shared / "groups"
    (folder / "my").mkdir(parents=True)
    (folder / "my/module.py").write_text(WORKER)
    (folder / "snippet.py").write_text(SNIPPET)
    done = lab_cluster.head.run([sys.executable, str(folder / "snippet.py")], env=ENV, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])

    assert said["single"] == [{"loss": 20, "rows": 20, "rank": rank} for rank in range(8)]
    assert [result["rows"] for result in said["sharded"]] == [3, 3, 3, 3, 2, 2, 2, 2]
    assert ["loss" in result for result in said["sharded"]] == [True] + [False] * 7
    assert said["one"] == [{"loss": 0.5, "rows": 3, "rank": 5}] and said["setup"] == [0]
    assert said["sizes"] == [32, 4, True, 8]
    assert said["metadata"] == [[f"policy-{rank}", rank // 2, lab_cluster.hosts[rank // 2].ip] for rank in range(8)]
    assert said["who"] == [
        [f"node{rank // 2}", str(rank), str(rank % 2), "8", str(rank // 2), lab_cluster.head.ip, str(rank % 2)]
        for rank in range(8)
    ]
    assert said["fail_on"][0] == "WorkerError" and "KeyError: 'no such row'" in said["fail_on"][1]
    assert f"policy rank 6 on node 3 ({lab_cluster.hosts[3].ip}) raised" in said["fail_on"][1]
    assert said["die_on"][0] == "WorkerDiedError" and "policy rank 6 on node 3" in said["die_on"][1]
    assert said["alive"] == [rank != 6 for rank in range(8)]
    for host in lab_cluster.hosts:
        assert f"({host.ip}) has 8, 0 of them free" in said["full"]
        left = [process.cmdline for process in host.processes()]
        assert not [line for line in left if "987654" in line or "Host" in line or "policy" in line], host


def test_a_worker_that_cannot_be_made_on_a_chosen_node_is_named_with_its_address(lab_cluster: LabCluster):
    folder = lab_cluster.lab.shared / "elsewhere"
    folder.mkdir()
    script = folder / "driver.py"
    script.write_text(
        "from rollcall.cluster import *\ninit_ray()\n"
        "with VirtualCluster([1], node_ranks=[2], use_gpus=False) as cluster:\n"
        "    group = WorkerGroup(cluster=cluster, remote_worker_builder=WorkerBuilder('missing.Worker'))\n"
    )
    done = lab_cluster.head.run([sys.executable, str(script)], env=ENV, timeout_s=120)
    assert done.returncode == 1
    assert f"worker rank 0 on node 2 ({lab_cluster.hosts[2].ip}) raised" in done.stderr
    assert "No module named 'missing'" in done.stderr
