"""Clusters on real hosts: how they come up, who gets in, what is left of them.

One cluster of four hosts (`lab_cluster`) serves all tests that only look; `beside` is a second one on two of its hosts.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Host, Lab, needs_lab
from lab.cluster import ENV, NODE_S, LabCluster, bring_up, leftovers, own_files, publish_stale, rollcall

pytestmark = [needs_lab, pytest.mark.chaos, pytest.mark.slow]

WAIT_S = 600.0
CLUSTER = "beside"
HTTP = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode() if len(sys.argv) > 2 else None)
request.add_header("content-type", "application/json")
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error)
"""
# What answers without a token on each port of a host. gRPC asks for one service after the other, since a server knows its own
# alone.
KNOCK = """
import json, sys, urllib.error, urllib.request
import grpc
CALLS = ("CoreWorkerService/PushTask", "NodeManagerService/GetNodeStats", "ObjectManagerService/Pull",
    "NodeInfoGcsService/GetAllNodeInfo", "RayletDriver/Init", "ReporterService/ReportOCMetrics")
def knock(address):
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return "metrics" if answer.read(6) == b"# HELP" else "open"
    except urllib.error.HTTPError as error:
        return "refused" if error.code in (401, 403) else f"answers {error.code}"
    except Exception:  # not a web server, or nobody: gRPC tells them apart
        codes = set()
    with grpc.insecure_channel(address) as channel:
        for call in CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=10)
                return f"answers {call}"
            except grpc.RpcError as error:
                codes.add(error.code().name)
    return "refused" if "UNAUTHENTICATED" in codes else f"{sorted(codes)}"
print(json.dumps({port: knock(f"{sys.argv[1]}:{port}") for port in sys.argv[2:]}))
"""
# A driver and a worker on the node it is started on.
DRIVER = """
import time
from rollcall.process.ray.connect import connect
record = connect().record
import ray
@ray.remote(num_cpus=0, resources={f"rollcall_node_{record.rank}": 0.001})
class Worker:
    def work(self):
        print("working", flush=True)
worker = Worker.remote()
ray.get(worker.work.remote())
print("working", flush=True)
time.sleep(600)
"""
# Ray alone, as someone would who knows nothing of rollcall; it gives up after one try.
RAY = {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def status(host: Host, *options: str) -> dict[str, Any]:
    result = rollcall(host, "status", "--json", *options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def ranks_alive(host: Host, *options: str) -> list[int]:
    return [node["rank"] for node in status(host, *options)["nodes"] if node["alive"]]


def published(cluster: LabCluster, *, name: str = "default") -> dict[str, Any]:
    return json.loads((cluster.rendezvous / name / "head.json").read_text())


def fetch(host: Host, url: str, *body: str) -> str:
    return host.run([sys.executable, "-c", HTTP, url, *body]).stdout.strip()


# Bring-up


def test_nodes_that_come_in_any_order_past_a_stale_file_become_one_cluster(lab_cluster: LabCluster) -> None:
    head = published(lab_cluster)
    assert list(lab_cluster.joined) == [3, 0, 2, 1]
    for rank, result in lab_cluster.joined.items():
        host = lab_cluster.hosts[rank]
        assert "Ray started" in result.stdout
        assert f"{host.ip}, rank {rank} of 4, 8 logical slots" in result.stdout
        assert head["address"] in result.stdout and head["cluster_id"] in result.stdout
    waited = lab_cluster.joined[3].stdout  # came before rank 0, and found what an earlier cluster left
    assert f"names a head at {lab_cluster.head.ip}:6379" in waited and "which does not answer" in waited


def test_status_shows_every_rank_with_its_host_address_slots_and_memory(lab_cluster: LabCluster) -> None:
    for host in (lab_cluster.head, lab_cluster.hosts[3]):
        found = status(host)
        rows = [(node["rank"], node["host"], node["address"], node["slots"], node["alive"]) for node in found["nodes"]]
        assert rows == [(rank, host.name, host.ip, 8, True) for rank, host in enumerate(lab_cluster.hosts)]
        assert all(node["memory_gib"] > 0 for node in found["nodes"])
        assert [node["is_head"] for node in found["nodes"]] == [True, False, False, False]
    lines = rollcall(lab_cluster.hosts[1], "status").stdout.splitlines()
    for rank, host in enumerate(lab_cluster.hosts):
        row = next(line for line in lines if host.name in line)
        assert row.startswith(str(rank)) and host.ip in row and "8 cpu" in row and "GiB" in row and "alive" in row
    assert "32 slots on 4 of 4 nodes" in lines[-1]


def test_check_passes_when_exactly_that_many_have_joined(lab_cluster: LabCluster) -> None:
    for host in (lab_cluster.head, lab_cluster.hosts[2]):
        result = rollcall(host, "check", "32", "--timeout", "60")
        assert (result.returncode, result.stdout) == (0, "all 32 accelerators are present, on 4 nodes\n"), result.stderr


def test_check_refuses_more_than_were_expected(lab_cluster: LabCluster) -> None:
    result = rollcall(lab_cluster.head, "check", "24", "--timeout", "60")
    assert result.returncode == 1
    assert "32 accelerators have joined, but 24 were expected" in result.stderr and "rank 3 node3" in result.stderr


def test_check_ends_at_its_deadline_when_all_nodes_are_there_with_too_few(lab_cluster: LabCluster) -> None:
    result = rollcall(lab_cluster.head, "check", "40", "--timeout", "1")
    assert result.returncode == 1
    assert "32 of 40 accelerators have joined" in result.stderr and "all 4 nodes have joined" in result.stderr


@pytest.mark.parametrize("rank", [0, 2])
def test_a_node_that_already_runs_this_cluster_says_so(lab_cluster: LabCluster, rank: int) -> None:
    host = lab_cluster.hosts[rank]
    before = {process.pid for process in host.processes() if process.name in ("raylet", "gcs_server")}
    options = ["--rank", str(rank), "--num-nodes", "4", "--rendezvous", str(lab_cluster.rendezvous), "--slots", "8"]
    result = rollcall(host, "node", *options)
    assert result.returncode == 0, result.stderr
    assert "Ray is already running here, as part of this cluster" in result.stdout
    assert published(lab_cluster)["cluster_id"] in result.stdout
    assert before == {process.pid for process in host.processes() if process.name in ("raylet", "gcs_server")}


def test_a_rank_that_is_taken_is_not_given_twice(lab_cluster: LabCluster) -> None:
    options = ["--num-nodes", "4", "--rendezvous", str(lab_cluster.rendezvous), "--slots", "8"]
    second_head = rollcall(lab_cluster.outsider, "node", "--rank", "0", *options)
    assert second_head.returncode == 1
    assert f"rank 0 is taken by node0 ({lab_cluster.head.ip})" in second_head.stderr
    too_high = rollcall(lab_cluster.outsider, "node", "--rank", "4", *options)
    assert too_high.returncode == 1 and "there is no rank 4 in a cluster of 4 nodes" in too_high.stderr
    assert lab_cluster.outsider.processes() == []


def test_of_two_hosts_with_one_rank_that_come_at_the_same_time_the_second_is_refused(tmp_path: Path) -> None:
    """With one temporary directory, as hosts have it."""
    with Lab(hosts=3, shared=tmp_path / "shared") as lab:
        head, *twins = lab.hosts
        options = ["--num-nodes", "2", "--rendezvous", str(lab.shared), "--slots", "1"]
        bring_up({0: head}, *options[2:], num_nodes=2)
        command = [sys.executable, "-m", "rollcall", "node", "--rank", "1", *options]
        started = {host.name: host.start(command, env=ENV) for host in twins}
        status = {name: node.wait(timeout_s=NODE_S) for name, node in started.items()}
        assert sorted(status.values()) == [0, 1], {name: node.output for name, node in started.items()}
        first, second = sorted(status, key=lambda name: status[name])
        ips = {host.name: host.ip for host in twins}
        assert (
            f"rank 1 is taken by {first} ({ips[first]}), which is alive; give this node ({second})"
            in started[second].output
        )
        seen = json.loads(rollcall(head, "status", "--json").stdout)
        assert [node["host"] for node in seen["nodes"] if node["alive"]] == [head.name, first]
        late = rollcall(next(host for host in twins if host.name == second), "node", "--rank", "1", *options)
        assert (
            late.returncode == 1
            and f"rank 1 is taken by {first}" in late.stderr
            and "waiting to see" not in late.stderr
        )


def test_a_host_that_is_no_part_of_the_cluster_says_so(lab_cluster: LabCluster) -> None:
    for verb in (["status"], ["check", "32", "--timeout", "1"]):
        result = rollcall(lab_cluster.outsider, *verb)
        assert result.returncode == 1 and "rollcall node" in result.stderr and "Traceback" not in result.stderr
    result = rollcall(lab_cluster.outsider, "down")
    assert (result.returncode, result.stdout) == (0, "no process of cluster 'default' is running on this node\n")


# Nobody else gets in


def test_nobody_joins_without_the_token(lab_cluster: LabCluster) -> None:
    outsider, head = lab_cluster.outsider, published(lab_cluster)["address"]
    options = ["--rank", "3", "--num-nodes", "4", "--head-address", head, "--slots", "8", "--timeout", "20"]
    without = rollcall(outsider, "node", *options)
    assert without.returncode == 1 and "ROLLCALL_TOKEN" in without.stderr
    wrong = rollcall(outsider, "node", *options, env={"ROLLCALL_TOKEN": "0123456789abcdef" * 4})
    assert wrong.returncode == 1 and "does not accept the token" in wrong.stderr
    join = ["ray", "start", f"--address={head}", f"--node-ip-address={outsider.ip}"]
    drive = [sys.executable, "-c", f"import ray; ray.init(address='{head}'); print(ray.cluster_resources())"]
    for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}):
        for tried in [outsider.start(command, env={**RAY, **token}) for command in (join, drive)]:
            assert tried.wait(timeout_s=WAIT_S) != 0 and "InvalidAuthToken" in tried.output, tried.output
    assert outsider.processes() == [] and ranks_alive(lab_cluster.head) == [0, 1, 2, 3]


def test_the_dashboard_is_on_loopback_and_wants_the_token_there_too(lab_cluster: LabCluster) -> None:
    port = int(published(lab_cluster)["dashboard"].rpartition(":")[2])
    outside, inside = f"http://{lab_cluster.head.ip}:{port}", f"http://127.0.0.1:{port}"
    for host in (lab_cluster.outsider, lab_cluster.hosts[1], lab_cluster.head):
        assert "Connection refused" in fetch(host, f"{outside}/api/version")
    job = json.dumps({"entrypoint": "touch /tmp/broken-in"})
    for path, *body in (["/api/jobs/"], ["/nodes?view=summary"], ["/api/jobs/", job]):
        assert fetch(lab_cluster.head, inside + path, *body) == "401"
    assert not (lab_cluster.head.root / "tmp/broken-in").exists()


def test_the_agents_on_the_other_nodes_want_the_token_too(lab_cluster: LabCluster) -> None:
    for node in status(lab_cluster.head)["nodes"]:
        port = node["ports"].get("dashboard_agent_listen")
        assert port, f"the agent of {node['host']} is listed"
        job = json.dumps({"entrypoint": "touch /tmp/broken-in"})
        for path, *body in (["/api/job_agent/jobs/", job], ["/logs"]):
            answer = fetch(lab_cluster.outsider, f"http://{node['address']}:{port}{path}", *body)
            assert answer in ("401", "403", "<urlopen error [Errno 111] Connection refused>"), (
                node["host"],
                path,
                answer,
            )


def test_every_port_of_a_node_wants_the_token(lab_cluster: LabCluster) -> None:
    driver = lab_cluster.hosts[1].start([sys.executable, "-c", DRIVER])
    give_up = time.monotonic() + WAIT_S
    while "working" not in driver.output:
        assert driver.poll() is None and time.monotonic() < give_up, driver.output
        time.sleep(0.2)
    for host in (lab_cluster.head, lab_cluster.hosts[1]):
        ports = listening(host)
        result = lab_cluster.outsider.run([sys.executable, "-c", KNOCK, host.ip, *map(str, ports)])
        still = {str(port) for port in listening(host)}  # Ray ends idle workers as it likes
        answers: dict[str, str] = {port: said for port, said in json.loads(result.stdout).items() if port in still}
        assert set(answers.values()) == {"refused"}, (host, answers, result.stderr)
        found = next(node for node in status(lab_cluster.head)["nodes"] if node["address"] == host.ip)["ports"]
        for name in ("node_manager", "object_manager", "runtime_env_agent"):
            assert answers[str(found[name])] == "refused", name
    assert len(answers) >= len(found) + 2, "driver and worker are among them"
    driver.kill()


def listening(host: Host) -> list[int]:
    """Ports that other hosts reach."""
    lines = host.run(["ss", "--listening", "--tcp", "--numeric", "--no-header"]).stdout.splitlines()
    addresses = [line.split()[3].rpartition(":")[::2] for line in lines]
    return sorted({int(port) for address, port in addresses if "127.0.0.1" not in address and address != "[::1]"})


def files_with(text: str, *, among: Iterable[Path]) -> list[Path]:
    found = []
    for path in among:
        try:
            if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
                found.append(path)
        except FileNotFoundError:
            continue  # Ray moves its logs about
    return sorted(found)


def assert_only_in_its_file(token: str, host: Host) -> None:
    own = host.root / "tmp/rollcall-0/default/token"
    assert files_with(token, among=own_files(host)) == [own]
    assert own.stat().st_mode & 0o777 == 0o600
    assert not [process for process in host.processes() if token in process.cmdline]


def test_the_token_is_in_its_own_files_and_nowhere_else(lab_cluster: LabCluster) -> None:
    token, folder = lab_cluster.token, lab_cluster.rendezvous
    assert len(token) >= 32
    for host in lab_cluster.hosts:
        assert_only_in_its_file(token, host)
    assert files_with(token, among=folder.rglob("*")) == [folder / "default/token"]
    assert (folder / "default/token").stat().st_mode & 0o777 == 0o600
    assert (folder / "default").stat().st_mode & 0o777 == 0o700
    assert all(token not in result.stdout for result in lab_cluster.joined.values())


# A second cluster on the same hosts


@pytest.fixture(scope="module")
def beside(lab_cluster: LabCluster) -> Iterator[list[Host]]:
    """Two of three nodes of another cluster on node0 and node1, over eth1.

    The file it finds names a head that is alive, and is the first cluster's.
    """
    hosts = lab_cluster.hosts[:2]
    address = published(lab_cluster)["address"]
    publish_stale(lab_cluster.rendezvous, address=address, token=lab_cluster.token, cluster=CLUSTER)
    options = ["--cluster", CLUSTER, "--rendezvous", str(lab_cluster.rendezvous), "--interface", "eth1", "--slots", "4"]
    bring_up(dict(enumerate(hosts)), *options, num_nodes=3)
    yield hosts
    for host in hosts:
        rollcall(host, "down", "--cluster", CLUSTER)


def test_a_second_cluster_of_another_name_lives_beside_the_first(lab_cluster: LabCluster, beside: list[Host]) -> None:
    found = status(beside[1], "--cluster", CLUSTER)
    assert found["cluster"] == CLUSTER and found["cluster_id"] != published(lab_cluster)["cluster_id"]
    rows = [(node["rank"], node["host"], node["slots"]) for node in found["nodes"] if node["alive"]]
    assert rows == [(0, "node0", 4), (1, "node1", 4)]
    assert ranks_alive(beside[1]) == [0, 1, 2, 3]


def test_interface_decides_which_address_the_others_are_given(lab_cluster: LabCluster, beside: list[Host]) -> None:
    found = status(beside[0], "--cluster", CLUSTER)
    assert [node["address"] for node in found["nodes"]] == [host.ip_eth1 for host in beside]
    assert published(lab_cluster, name=CLUSTER)["address"].startswith(f"{beside[0].ip_eth1}:")


def test_check_ends_at_its_deadline_and_names_the_missing_rank(beside: list[Host]) -> None:
    result = rollcall(beside[0], "check", "12", "--cluster", CLUSTER, "--timeout", "3")
    assert result.returncode == 1
    for line in result.stderr.splitlines():  # while it waits, and when it gives up
        assert "8 of 12 accelerators have joined: rank 0 node0" in line and "missing: rank 2" in line
    assert "after 3 s (--timeout)" in result.stderr.splitlines()[-1]


def test_down_stops_that_cluster_alone_and_leaves_nothing_of_it(lab_cluster: LabCluster, beside: list[Host]) -> None:
    before = [processes_of("default", host) for host in beside]
    for host in beside:
        result = rollcall(host, "down", "--cluster", CLUSTER)
        assert result.returncode == 0 and f"processes of cluster '{CLUSTER}'" in result.stdout, result.stderr
        assert processes_of(CLUSTER, host) == []
        assert [path for path in own_files(host) if CLUSTER in path.parts and path.is_file()] == []
    assert [path for path in (lab_cluster.rendezvous / CLUSTER).rglob("*") if path.is_file()] == []
    assert [processes_of("default", host) for host in beside] == before
    assert ranks_alive(lab_cluster.head) == [0, 1, 2, 3]


def processes_of(cluster: str, host: Host) -> list[int]:
    """By the cluster's folder on their command line, as most of Ray's have it."""
    return [process.pid for process in host.processes() if f"/rollcall-0/{cluster}/" in process.cmdline]


def test_two_users_have_a_cluster_of_the_same_name_on_one_host(lab_cluster: LabCluster) -> None:
    host, before = lab_cluster.head, processes_of("default", lab_cluster.head)
    env = {"HOME": "/tmp/another", "ROLLCALL_TOKEN": secrets.token_hex(32)}
    host.run(["install", "-d", "-o", "12345", env["HOME"]])
    as_another = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", sys.executable, "-m", "rollcall"]
    if host.run([*as_another, "version"], env=env).returncode:
        pytest.skip("another user may not read this checkout or its environment")
    try:
        options = ["--rank", "0", "--num-nodes", "1", "--head-address", f"{host.ip}:6399", "--slots", "3"]
        started = host.run([*as_another, "node", *options], env=env, timeout_s=NODE_S)
        assert started.returncode == 0 and "/tmp/rollcall-12345/default" in started.stdout, started.stderr
        theirs = json.loads(host.run([*as_another, "status", "--json"], env={"HOME": env["HOME"]}).stdout)
        assert [(node["rank"], node["slots"]) for node in theirs["nodes"]] == [(0, 3)]
        assert ranks_alive(host) == [0, 1, 2, 3]
    finally:
        down = host.run([*as_another, "down"], env={"HOME": env["HOME"]})
    assert down.returncode == 0 and "processes of cluster 'default'" in down.stdout, down.stderr
    assert processes_of("default", host) == before and ranks_alive(host) == [0, 1, 2, 3]


# Without a shared folder, over IPv6, to the end


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, str]]:
    """A master, a worker and a stranger over IPv6, with the token in the environment; and the token."""
    token = secrets.token_hex(32)
    with Lab(hosts=3, shared=tmp_path_factory.mktemp("pair") / "shared") as lab:
        address = f"[{lab.hosts[0].ip6}]:6380"
        for host, seat in ((lab.hosts[0], ["--master", "--dashboard-host", "::"]), (lab.hosts[1], ["--worker", "1"])):
            options = ["--num-nodes", "2", "--head-address", address, "--slots", "8"]
            result = rollcall(host, "node", *seat, *options, env={"ROLLCALL_TOKEN": token}, timeout_s=NODE_S)
            assert result.returncode == 0, result.stderr
            assert "Ray started" in result.stdout and f"{host.ip6}, rank" in result.stdout
        yield lab, token


def test_master_and_worker_meet_at_an_address_with_a_token_from_the_environment(pair: tuple[Lab, str]) -> None:
    lab, _ = pair
    for host in lab.hosts[:2]:
        rows = [(node["rank"], node["address"], node["slots"]) for node in status(host)["nodes"]]
        assert rows == [(0, lab.hosts[0].ip6, 8), (1, lab.hosts[1].ip6, 8)]
    assert rollcall(lab.hosts[1], "check", "16", "--timeout", "60").returncode == 0
    assert list(lab.shared.iterdir()) == []


def test_a_dashboard_that_was_asked_to_listen_outside_wants_the_token(pair: tuple[Lab, str]) -> None:
    lab, _ = pair
    url = status(lab.hosts[0])["dashboard_url"]
    assert lab.hosts[0].ip6 in url
    for path, *body in (["/api/jobs/"], ["/api/jobs/", json.dumps({"entrypoint": "touch /tmp/broken-in"})]):
        assert fetch(lab.hosts[2], url + path, *body) == "401"


def test_a_token_from_the_environment_is_written_to_its_own_file_alone(pair: tuple[Lab, str]) -> None:
    lab, token = pair
    for host in lab.hosts[:2]:
        assert_only_in_its_file(token, host)


def test_a_node_without_power_is_soon_shown_dead_and_may_come_back(pair: tuple[Lab, str]) -> None:
    lab, token = pair
    head, worker = lab.hosts[:2]
    worker.power_off()
    give_up = time.monotonic() + WAIT_S
    while ranks_alive(head) != [0]:
        assert time.monotonic() < give_up, f"rank 1 is not shown dead after {WAIT_S:g} s"
    assert [line for line in rollcall(head, "status").stdout.splitlines() if "node1" in line and "dead" in line]
    result = rollcall(head, "check", "16", "--timeout", "1")
    assert result.returncode == 1 and "missing: rank 1" in result.stderr
    worker.restart()
    options = ["--worker", "1", "--head-address", f"[{head.ip6}]:6380", "--slots", "8"]
    result = rollcall(worker, "node", *options, env={"ROLLCALL_TOKEN": token}, timeout_s=NODE_S)
    assert result.returncode == 0, result.stderr
    assert ranks_alive(head) == [0, 1]


def test_down_on_every_host_leaves_nothing(pair: tuple[Lab, str]) -> None:
    lab, _ = pair
    for host in (lab.hosts[1], lab.hosts[0]):
        result = rollcall(host, "down")
        assert result.returncode == 0 and "processes of cluster 'default'" in result.stdout, result.stderr
    assert leftovers(lab.hosts) == {}


def test_two_hosts_become_a_cluster_that_a_stranger_cannot_join(tmp_path: Path) -> None:
    with Lab(hosts=3, shared=tmp_path / "shared") as lab:
        *hosts, outsider = lab.hosts
        publish_stale(lab.shared, address=f"{hosts[0].ip}:6379", token="of-another-time")
        bring_up({rank: hosts[rank] for rank in (1, 0)}, "--rendezvous", str(lab.shared), "--slots", "8")
        assert rollcall(hosts[1], "check", "16", "--timeout", "60").returncode == 0
        head = json.loads((lab.shared / "default/head.json").read_text())["address"]
        options = ["--rank", "1", "--num-nodes", "2", "--head-address", head, "--slots", "8", "--timeout", "20"]
        wrong = rollcall(outsider, "node", *options, env={"ROLLCALL_TOKEN": "0123456789abcdef" * 4})
        assert wrong.returncode == 1 and "does not accept the token" in wrong.stderr
        assert outsider.processes() == [] and ranks_alive(hosts[0]) == [0, 1]
        for host in hosts:
            assert rollcall(host, "down").returncode == 0
        assert leftovers(lab.hosts) == {}


def test_four_hosts_from_nothing_to_nothing(tmp_path: Path) -> None:
    """Rank 3 is missing, then brings more than was asked for; at the end all is gone."""
    with Lab(hosts=4, shared=tmp_path / "shared") as lab:
        options = ["--rendezvous", str(lab.shared)]
        bring_up({rank: lab.hosts[rank] for rank in (1, 0, 2)}, *options, "--slots", "8", num_nodes=4)
        result = rollcall(lab.hosts[0], "check", "32", "--timeout", "5")
        assert result.returncode == 1
        assert "24 of 32 accelerators have joined" in result.stderr and "missing: rank 3" in result.stderr
        waiting = lab.hosts[2].start([sys.executable, "-m", "rollcall", "check", "32", "--timeout", "200"])
        bring_up({3: lab.hosts[3]}, *options, "--slots", "16", num_nodes=4)
        assert waiting.wait(timeout_s=NODE_S) == 1
        assert "40 accelerators have joined, but 32 were expected" in waiting.output
        for host in lab.hosts:
            assert rollcall(host, "down").returncode == 0
        assert leftovers(lab.hosts) == {}
        assert [path for path in lab.shared.rglob("*") if path.is_file()] == []
