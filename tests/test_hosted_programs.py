"""Programs on other nodes: a host starts, watches and ends them, and one that is lost with its host is run again elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import programs
import pytest
from endpoints import Writer, chat_tokenizer, plain_sampling
from hosts import end_host
from programs import TWO_TURNS, prompt_of

from rollcall.base.process_table import Process
from rollcall.base.types import Completion, EndReason
from rollcall.config import parse_config
from rollcall.config.environments import AgentEnvironment
from rollcall.environments import answering, hosted
from rollcall.environments import program as program_module
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.host import EnvironmentHost, HostPlace, make_here
from rollcall.environments.hosted import HostedEnvironments
from rollcall.environments.program import KEY, past_proxies
from rollcall.environments.protocol import Ended, EnvironmentFailed, EnvironmentLost
from rollcall.nodes.door import CHALLENGE, enter, new_secret
from rollcall.nodes.framing import CALL, HEAD, JSON, frame
from rollcall.plan.judge import workable_plan
from rollcall.process.groups.cluster import VirtualCluster
from rollcall.process.groups.inprocess import InProcessBackend
from rollcall.run import environment_hosts
from rollcall.run.environment_hosts import EnvironmentHosts
from rollcall.run.team import Site

SECRET = new_secret()
WAIT_S = 120.0
ASK = 'chat([{"role": "user", "content": "x"}])\n'
# A host as a process of its own. It ends with its stdin, unless it is killed before.
HOST = """
import json, sys
from hosts import end_host
from rollcall.environments.host import EnvironmentHost
from rollcall.config.environments import AgentEnvironment
from rollcall.environments.program import ProgramsHere
given = json.loads(sys.stdin.readline())
host = EnvironmentHost(ProgramsHere(AgentEnvironment(run=given["run"], env=given["env"], max_running=4)))
print(host.listen("127.0.0.1", name=given["name"], secret=given["secret"]).port, flush=True)
sys.stdin.read()
end_host(host)
"""


class Hosts:
    """On this machine, each as if on a node of its own."""

    def __init__(self) -> None:
        self.opened: list[EnvironmentHost] = []
        self.processes: list[subprocess.Popen[str]] = []

    def open(self, command: str, **section: Any) -> HostPlace:
        """In a thread of this process."""
        host = EnvironmentHost(make_here(AgentEnvironment(run=command, **section), chat_template=None))
        self.opened.append(host)
        return host.listen("127.0.0.1", name=f"node {len(self.opened)}", secret=SECRET)

    def start(self, command: str, *, env: tuple[str, ...] = (), **variables: str) -> HostPlace:
        """In a process of its own, with these variables."""
        process = subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdin is not None and process.stdout is not None
        name = f"process {process.pid}"
        process.stdin.write(json.dumps({"run": command, "env": env, "name": name, "secret": SECRET}) + "\n")
        process.stdin.flush()
        port = int(process.stdout.readline())
        return HostPlace(name=name, address="127.0.0.1", port=port, secret=SECRET, num_cpus=1, tools={})

    def close(self) -> None:
        for host in self.opened:
            end_host(host)
        for process in self.processes:
            process.communicate()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    found = Hosts()
    with ExitStack() as ends:
        ends.callback(found.close)
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


def never(number: int) -> HostPlace:
    raise AssertionError(f"host {number} is not lost")


def hosted_at(*places: HostPlace, renew: Callable[[int], HostPlace] = never) -> HostedEnvironments:
    return HostedEnvironments(places, renew=renew, wait_s=20.0)


def play(
    tokenizer: Any, environments: HostedEnvironments, *, address: str = "127.0.0.1", **options: Any
) -> tuple[list[Completion], Writer]:
    fields = {name: options.pop(name) for name in list(options) if name in AgentEnvironment.model_fields}
    section = AgentEnvironment(run="the hosts know it", **fields)
    agents = AgentEnvironments(section, programs=environments, address=address)
    return play_in(tokenizer, agents, **options)


def play_in(
    tokenizer: Any,
    agents: AgentEnvironments,
    *,
    count: int = 1,
    during: Callable[[], Coroutine[Any, Any, None]] | None = None,
    columns: dict[str, Any] | None = None,
) -> tuple[list[Completion], Writer]:
    """``during`` runs beside the episodes."""
    writer = Writer(tokenizer=tokenizer, says=lambda prompt: f"{len(prompt)} read")

    async def work() -> list[Completion]:
        player = agents.player(tokenizer=tokenizer, max_prompt_tokens=1000, max_response_tokens=500)
        episodes = [
            player.play(
                prompt_of("hello", tokenizer, level=number, **columns or {}),
                seed=number,
                sampling=plain_sampling(500),
                session=f"episode-{number}",
                sample=writer.sample,
            )
            for number in range(count)
        ]
        try:
            beside = asyncio.create_task(during()) if during is not None else None
            made = await asyncio.wait_for(asyncio.gather(*episodes), WAIT_S)
            if beside is not None:
                await beside
            return made
        finally:
            await agents.aclose()

    return asyncio.run(work()), writer


def played(tokenizer: Any, environments: HostedEnvironments, **options: Any) -> Completion:
    (completion,), _ = play(tokenizer, environments, **options)
    return completion


async def appears(path: Path) -> None:
    give_up = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < give_up, f"{path.name} never came"
        await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether that process has ended, within a while."""
    give_up = time.monotonic() + WAIT_S
    while Process.of(pid) is not None and time.monotonic() < give_up:
        time.sleep(0.02)
    return Process.of(pid) is None


def writes_pid(path: Path) -> str:
    """Python that leaves the program's number at ``path``, whole or not at all."""
    return f'open("{path}.new", "w").write(str(os.getpid())); os.rename("{path}.new", "{path}")\n'


def variables() -> dict[str, str]:
    """Of an episode whose endpoint nobody asks."""
    return {KEY: secrets.token_urlsafe(8), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "ROLLCALL_ROW": "{}"}


def test_a_program_on_a_host_plays_the_episode_that_it_plays_here(tmp_path: Path, tokenizer: Any, hosts: Hosts) -> None:
    command = programs.write(tmp_path, TWO_TURNS)
    completions, writer = play(tokenizer, hosted_at(hosts.start(command)), count=2)
    here, writer_here = programs.play(tokenizer, command, count=2)
    for completion, other in zip(completions, here, strict=True):
        episode = completion.episode
        assert episode and (episode.ended, episode.error, episode.reward) == (EndReason.DONE, "", 0.5), episode
        assert other.episode and (episode.turns, episode.metrics) == (other.episode.turns, other.episode.metrics)
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        assert completion.mask.tolist() == other.mask.tolist()
    assert sorted(writer.seeds) == sorted(writer_here.seeds)


@pytest.mark.slow
def test_it_gets_the_variables_that_are_named_with_the_values_of_its_host(
    tmp_path: Path, tokenizer: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SETTING", "here")
    body = f'json.dump(dict(os.environ), open({str(tmp_path / "env.json")!r}, "w"))\n{ASK}'
    place = hosts.start(programs.write(tmp_path, body), env=("MY_SETTING",), MY_SETTING="there", MY_SECRET="hidden")
    completion = played(tokenizer, hosted_at(place), env=["MY_SETTING"])
    assert completion.episode and completion.episode.ended is EndReason.DONE, completion.episode
    given = json.loads((tmp_path / "env.json").read_text())
    assert given["MY_SETTING"] == "there" and "MY_SECRET" not in given
    assert given["TMPDIR"].split("-")[3] == str(hosts.processes[0].pid) and not os.path.exists(given["TMPDIR"])


def test_the_placement_makes_hosts_that_have_what_the_run_file_declares(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles as a cluster starts them, but with both nodes in this process."""
    monkeypatch.setattr(environment_hosts, "be_reachable", lambda about: None)
    monkeypatch.setenv("MY_OWN", "shell")
    body = f'json.dump(dict(os.environ), open({str(tmp_path / "env.json")!r}, "w"))\n{ASK}print(os.getcwd())'
    config = parse_config(
        {
            "run": {"dir": str(tmp_path / "run")},
            "cluster": {
                "num_nodes": 2, "accelerator": "cpu", "env": {"MY_SETTING": "declared"}, "node_env": {1: {"MY_NODE": "1"}},
                "component_placement": {"actor,rollout": "0", "environment": "1"},
            },
            "environment": {
                "type": "agent", "run": programs.write(tmp_path, body), "env": ["MY_SETTING", "MY_NODE", "MY_OWN"]
            },
        }
    )  # fmt: skip
    assert config.cluster is not None and config.environment is not None
    plan = workable_plan(config, config.cluster)
    with VirtualCluster([1, 1], use_gpus=False, backend=InProcessBackend()) as cluster:
        site = Site(plan=plan, section=config.cluster, kept=[0, 1], cluster=cluster)
        hosts = EnvironmentHosts(config.environment, site=site, trainer=config.trainer, run_dir=config.run.dir)
        environments = hosts.start(tokenizer.chat_template)
        assert isinstance(environments, AgentEnvironments) and hosts.group.world_size == 1
        assert [spec.kind for spec in hosts.group.specs] == ["environment"], "as the debugger shows it"
        (completion,), _ = play_in(tokenizer, environments)
    assert completion.episode and completion.episode.ended is EndReason.DONE, completion.episode
    given = json.loads((tmp_path / "env.json").read_text())
    assert [given[name] for name in ("MY_SETTING", "MY_NODE", "MY_OWN")] == ["declared", "1", "shell"]


def test_it_finds_the_endpoint_at_the_address_that_it_can_reach(tmp_path: Path, tokenizer: Any, hosts: Hosts) -> None:
    body = f"""
{ASK}
here = 0
line = http.client.HTTPConnection("127.0.0.1", base.port, timeout=20)  # A stranger may listen there, who knows no key.
try:
    line.request("GET", base.path + "/models", headers={{"Authorization": "Bearer " + key}})
    here = int(line.getresponse().status == 200)
except (OSError, http.client.HTTPException):
    pass
print(json.dumps({{"reward": 1, "metrics": {{"last": int(base.hostname[-1]), "here": here}}}}))
"""
    completion = played(tokenizer, hosted_at(hosts.open(programs.write(tmp_path, body))), address="127.0.0.2")
    assert completion.episode and completion.episode.metrics == {"last": 2.0, "here": 0.0, "requests_refused": 0.0}


@pytest.mark.slow
def test_episodes_of_a_killed_host_are_played_again_elsewhere_with_the_same_seeds(
    tmp_path: Path, tokenizer: Any, hosts: Hosts
) -> None:
    """The program has been answered once when its host is killed; it ends with the host, and nothing of it is in the episode."""
    body = f"""
messages = [{{"role": "user", "content": row["prompt"]}}]
messages += [chat(messages)[1], {{"role": "user", "content": "go on"}}]
if not os.path.exists("{tmp_path}/first"):
    {writes_pid(tmp_path / "first")}
    time.sleep(600)
chat(messages)
print(json.dumps({{"reward": 1}}))
"""
    command = programs.write(tmp_path, body)
    first, second = hosts.start(command), hosts.start(command)
    is_over = threading.Event()

    def renew(number: int) -> HostPlace:
        assert number == 0 and is_over.wait(WAIT_S)
        return first

    async def kill() -> None:
        await appears(tmp_path / "first")
        hosts.processes[0].kill()

    (completion,), writer = play(tokenizer, hosted_at(first, second, renew=renew), during=kill)
    is_over.set()
    episode = completion.episode
    assert episode and (episode.ended, episode.reward, episode.error) == (EndReason.DONE, 1.0, ""), episode
    assert len(episode.turns) == 2 and not episode.branches
    assert writer.seeds[0] == writer.seeds[1] != writer.seeds[2] and len(writer.seeds) == 3
    assert is_gone(int((tmp_path / "first").read_text()))


def test_a_program_that_hangs_is_ended_on_its_host_with_all_it_started(tmp_path: Path, hosts: Hosts) -> None:
    body = f"""
import subprocess
others = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
open("{tmp_path}/others", "w").write(" ".join(str(one.pid) for one in others))
print("so far", flush=True)
{writes_pid(tmp_path / "pid")}
time.sleep(600)
"""
    environments = hosted_at(hosts.open(f"{programs.write(tmp_path, body)}; true"))

    async def work() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task((await environments.find_host()).run(variables(), stop=stop))
        await appears(tmp_path / "pid")
        stop.set()
        ended = await running
        assert "SIGKILL" in ended.how and ended.stdout == "so far\n"
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    for pid in [(tmp_path / "pid").read_text(), *(tmp_path / "others").read_text().split()]:
        assert Process.of(int(pid)) is None, "before it is told that the program has ended"


def test_an_episode_on_a_host_has_its_time_limit(tokenizer: Any, hosts: Hosts) -> None:
    completion = played(tokenizer, hosted_at(hosts.open("sleep 600")), episode_timeout_s=1)
    assert completion.episode and completion.episode.ended is EndReason.TIMEOUT, completion.episode


def test_a_limit_that_is_met_ends_it_and_what_it_has_printed_still_counts(
    tmp_path: Path, tokenizer: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.environments.agent.GRACE_S", 0.2)
    body = f"""
while {ASK.strip()}[0] == 200:
    pass
print(json.dumps({{"reward": 0.5}}), flush=True)
time.sleep(600)
"""
    completion = played(tokenizer, hosted_at(hosts.open(programs.write(tmp_path, body))), max_turns=2)
    assert completion.episode and completion.episode.ended is EndReason.TURNS and completion.episode.reward == 0.5


def test_failures_are_the_programs_own(
    tmp_path: Path, tokenizer: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = hosted_at(hosts.open(programs.write(tmp_path, f'{ASK}raise ValueError("my own mistake")')))
    episode = played(tokenizer, environments).episode
    assert episode and episode.ended is EndReason.ERROR and "my own mistake" in episode.error
    environments = hosted_at(hosts.open("true"))
    episode = played(tokenizer, environments, columns={"long": "x" * 200_000}).episode
    assert episode and "ROLLCALL_ROW has 200," in episode.error and "remove long columns" in episode.error
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    episode = played(tokenizer, hosted_at(hosts.open("true"))).episode
    assert episode and episode.ended is EndReason.ERROR and "folder for temporary files" in episode.error


def test_what_goes_wrong_on_a_host_fails_the_episode_and_not_the_host(
    tokenizer: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*args: Any, **keys: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(program_module, "_start", breaks)
    episode = played(tokenizer, hosted_at(hosts.open("true"))).episode
    assert (
        episode and episode.ended is EndReason.ERROR and "its host failed: RuntimeError: can't start" in episode.error
    )


def test_a_process_whose_name_is_no_text_is_in_nobodys_way(tmp_path: Path, tokenizer: Any, hosts: Hosts) -> None:
    """Linux cuts names to 15 bytes, also within a character."""
    named = "open('/proc/self/comm', 'wb').write(b'\\xd0\\xbf\\xd1'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None and neighbour.stdout.readline()
        completion = played(tokenizer, hosted_at(hosts.open(programs.write(tmp_path, ASK))))
        neighbour.kill()
    assert completion.episode and completion.episode.ended is EndReason.DONE, completion.episode


def test_a_host_goes_on_speaking_while_it_ends_programs(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "BEAT_S", 0.1)
    monkeypatch.setattr(hosted, "SILENT_S", 3.0)
    kill = program_module.kill_leftovers
    monkeypatch.setattr(program_module, "kill_leftovers", lambda *args, **keys: (time.sleep(4), kill(*args, **keys)))
    environments = hosted_at(hosts.open(f"touch {tmp_path}/began; sleep 600"))

    async def work() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task((await environments.find_host()).run(variables(), stop=stop))
        await appears(tmp_path / "began")
        stop.set()
        assert "SIGKILL" in (await running).how
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_a_broken_handshake_is_tried_again_before_a_host_counts_as_lost(
    tmp_path: Path, tokenizer: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = [ConnectionResetError("by a crowd"), ConnectionError("the connection was closed")]

    def crowded(*place: Any, **options: Any) -> Any:
        if breaks:
            raise breaks.pop()
        return enter(*place, **options)

    monkeypatch.setattr(hosted, "enter", crowded)
    completion = played(tokenizer, hosted_at(hosts.open(programs.write(tmp_path, ASK))))
    assert completion.episode and completion.episode.ended is EndReason.DONE and not breaks


def end_in_the_middle(
    tokenizer: Any, programs: HostedEnvironments, *, began: Path, before: Callable[[], object] = lambda: None
) -> None:
    """A run that ends while its one episode goes on, which ``began`` shows."""
    agents = AgentEnvironments(AgentEnvironment(run="the hosts know it"), programs=programs)
    writer = Writer(tokenizer=tokenizer, says=str)

    async def work() -> None:
        player = agents.player(tokenizer=tokenizer, max_prompt_tokens=1000, max_response_tokens=500)
        prompt = prompt_of("hello", tokenizer)
        one = player.play(prompt, seed=0, sampling=plain_sampling(), session="episode-0", sample=writer.sample)
        playing = asyncio.create_task(one)
        await appears(began)
        before()
        await agents.aclose()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_a_host_that_is_lost_at_the_end_of_a_run_is_not_replaced(
    tmp_path: Path, tokenizer: Any, hosts: Hosts, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "ANSWER_S", 0.2)
    place = hosts.open(f"touch {tmp_path}/began; sleep 600")
    renewed: list[int] = []
    environments = hosted_at(place, renew=lambda number: (renewed.append(number), place)[1])

    def stand_still() -> None:
        hosts.opened[0]._loop.call_soon_threadsafe(stuck.wait, WAIT_S)

    end_in_the_middle(tokenizer, environments, began=tmp_path / "began", before=stand_still)
    assert renewed == []


def test_a_limit_of_the_node_below_that_of_the_run_holds(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module.resource, "getrlimit", lambda which: (-1, 1 << 30))
    environments = hosted_at(hosts.open("ulimit -d", memory_mb=2048))

    async def work() -> Ended:
        return await (await environments.find_host()).run(variables(), stop=asyncio.Event())

    assert asyncio.run(asyncio.wait_for(work(), WAIT_S)).stdout == f"{1 << 20}\n"


def test_no_proxy_is_asked_for_the_endpoint() -> None:
    given = {"OPENAI_BASE_URL": "http://10.0.0.7:80/v1", "NO_PROXY": "internal"}
    assert past_proxies(given) == {**given, "NO_PROXY": "internal,10.0.0.7", "no_proxy": "10.0.0.7"}


@pytest.mark.parametrize("how", ["cut", "given up"])
def test_a_program_ends_when_its_connection_breaks_or_nobody_waits_for_it(
    tmp_path: Path, hosts: Hosts, how: str
) -> None:
    place = hosts.open(programs.write(tmp_path, f"{writes_pid(tmp_path / 'pid')}time.sleep(600)"))
    environments = hosted_at(place, renew=lambda number: place)

    async def work() -> None:
        line = await environments.find_host()
        running = asyncio.create_task(line.run(variables(), stop=asyncio.Event()))
        await appears(tmp_path / "pid")
        if how == "cut":
            line._worker.link.connection.shutdown(socket.SHUT_RDWR)
            with pytest.raises(EnvironmentLost, match="the connection broke off"):
                await running
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_run_that_ends_ends_the_programs_on_its_hosts(tmp_path: Path, tokenizer: Any, hosts: Hosts) -> None:
    place = hosts.open(programs.write(tmp_path, f"{writes_pid(tmp_path / 'pid')}time.sleep(600)"))
    end_in_the_middle(tokenizer, hosted_at(place), began=tmp_path / "pid")
    assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """A host's loop waits for it, until the test has ended."""
    event = threading.Event()
    yield event
    event.set()


def test_what_a_stuck_host_was_running_is_not_played_again_once_it_is_given_up(
    tmp_path: Path, hosts: Hosts, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "ANSWER_S", 0.2)
    place = hosts.open(f"touch {tmp_path}/began; sleep 600")
    environments = hosted_at(place, renew=lambda number: place)

    async def work() -> None:
        running = asyncio.create_task((await environments.find_host()).run(variables(), stop=asyncio.Event()))
        await appears(tmp_path / "began")
        hosts.opened[0]._loop.call_soon_threadsafe(stuck.wait, WAIT_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_a_host_that_says_nothing_of_its_program_is_lost(
    tmp_path: Path, hosts: Hosts, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it speaks, a program may take its time."""
    monkeypatch.setattr(answering, "BEAT_S", 0.1)
    monkeypatch.setattr(hosted, "SILENT_S", 3.0)
    place = hosts.open(f"touch {tmp_path}/began; sleep 4; echo well")
    environments = hosted_at(place, renew=lambda number: place)

    async def work() -> None:
        ended = await (await environments.find_host()).run(variables(), stop=asyncio.Event())
        assert ended == Ended(how="", stdout="well\n", stderr="")
        (tmp_path / "began").unlink()
        running = asyncio.create_task((await environments.find_host()).run(variables(), stop=asyncio.Event()))
        await appears(tmp_path / "began")
        hosts.opened[0]._loop.call_soon_threadsafe(stuck.wait, WAIT_S)
        with pytest.raises(EnvironmentLost, match="has not answered run within 3 s"):
            await running
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_a_frozen_host_that_is_killed_leaves_no_program(tmp_path: Path, hosts: Hosts) -> None:
    place = hosts.start(programs.write(tmp_path, f"{writes_pid(tmp_path / 'pid')}time.sleep(600)"))
    environments = hosted_at(place, renew=lambda number: place)

    async def work() -> None:
        running = asyncio.create_task((await environments.find_host()).run(variables(), stop=asyncio.Event()))
        await appears(tmp_path / "pid")
        hosts.processes[0].send_signal(signal.SIGSTOP)
        hosts.processes[0].kill()
        with pytest.raises(EnvironmentLost):
            await running
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_stranger_without_the_secret_starts_nothing(tmp_path: Path, hosts: Hosts) -> None:
    place = hosts.open(f"touch {tmp_path}/started")
    call = frame(HEAD.pack(1, CALL) + JSON.dumps(["run", [variables()]]))
    for greeting in (b"", bytes(2 * CHALLENGE), secrets.token_bytes(2 * CHALLENGE)):
        with socket.create_connection((place.address, place.port), timeout=WAIT_S) as line:
            assert len(line.recv(CHALLENGE)) == CHALLENGE
            try:
                line.sendall(greeting + call)
                assert line.recv(1) == b"", "the door stays shut"
            except ConnectionError:
                pass
    with pytest.raises(OSError):
        enter(place.address, place.port, secret="another", timeout_s=WAIT_S)
    assert not (tmp_path / "started").exists()


def test_a_host_runs_nothing_but_its_own_command(tmp_path: Path, hosts: Hosts) -> None:
    """Who knows the secret can start the program of the run, and only that."""
    environments = hosted_at(hosts.open("echo mine"))

    async def work() -> None:
        line = await environments.find_host()
        with pytest.raises(EnvironmentFailed, match="its host failed: TypeError"):
            await line.call("run", variables(), f"touch {tmp_path}/started")
        await line.close(broken=True)
        line = await environments.find_host()
        said = await line.call("run", {**variables(), "command": f"touch {tmp_path}/started"})
        assert isinstance(said, Ended) and said.stdout == "mine\n"
        await line.close(broken=False)
        line = await environments.find_host()
        with pytest.raises(EnvironmentFailed, match="OPENAI_BASE_URL has 200,000 bytes"):
            await line.run({**variables(), "OPENAI_BASE_URL": "x" * 200_000}, stop=asyncio.Event())
        await environments.aclose()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert not (tmp_path / "started").exists()
