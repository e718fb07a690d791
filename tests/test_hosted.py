"""Environments on other nodes: played through a host, and played again elsewhere when the host is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hosts import end_host
from tiny import make_tokenizer

from rollcall.base.errors import RestartsSpentError, WorkerLostError
from rollcall.base.types import Completion, EndReason, Prompt
from rollcall.config.environments import StepEnvironment
from rollcall.engine.protocol import Sampling
from rollcall.environments import hosted
from rollcall.environments.conversation import Conversations
from rollcall.environments.episode import Player
from rollcall.environments.host import EnvironmentHost, HostPlace, make_here
from rollcall.environments.hosted import HostedEnvironments
from rollcall.environments.protocol import EnvironmentFailed, EnvironmentLost
from rollcall.nodes.door import new_secret

SECTION = StepEnvironment(path="tests.environments_of_users:Guess", call_timeout_s=20.0)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=40, stop_token_ids=(0,), stop_strings=())
SECRET = new_secret()


class Hosts:
    """On this machine, each as if on a node of its own."""

    def __init__(self) -> None:
        self.opened: list[EnvironmentHost] = []

    def open(self, name: str) -> HostPlace:
        host = EnvironmentHost(make_here(SECTION, chat_template=None))
        self.opened.append(host)
        return host.listen("127.0.0.1", name=name, secret=SECRET)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    found = Hosts()
    with ExitStack() as ends:
        ends.callback(lambda: [end_host(host) for host in found.opened])
        yield found


def never(number: int) -> HostPlace:
    raise AssertionError(f"host {number} is not lost")


def environments_at(
    *places: HostPlace, renew: Callable[[int], HostPlace] = never, wait_s: float = 20.0
) -> HostedEnvironments:
    return HostedEnvironments(places, renew=renew, wait_s=wait_s)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def closing() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(closing())


def test_an_environment_is_played_through_its_host_and_failures_are_its_own(hosts: Hosts) -> None:
    environments = environments_at(hosts.open("node 0"))

    async def play() -> None:
        environment = await (await environments.find_host()).start("")
        assert await environment.reset({"answer": "4", "seen": np.arange(2)}) == "Guess."
        assert (await environment.step("3", [5, 6])).messages[0].name == "judge"
        assert (await environment.step("4", [5, 6])).metrics == {"tokens": 2.0}
        assert await environment.reward() is None
        assert await environment.attributes() == {"number": "4"}
        await environment.close(broken=False)
        again = await (await environments.find_host()).start("")
        with pytest.raises(EnvironmentFailed, match="KeyError: 'answer'"):
            await again.reset({})
        await again.close(broken=True)
        await environments.aclose()

    run(play())


def test_a_connection_to_a_host_that_is_lost_meanwhile_is_closed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = environments_at(hosts.open("node 0"), renew=lambda number: hosts.open("again"))
    connect, made = hosted._connect, []

    async def losing(place: HostPlace) -> Any:
        made.append(await connect(place))
        if place.name == "node 0":
            environments.lose(environments._hosts[0], place, "its node is gone")
        return made[-1]

    monkeypatch.setattr(hosted, "_connect", losing)

    async def play() -> None:
        found = await environments.find_host()
        assert found.place.name == "again" and environments._hosts[0].playing == {found}
        assert made[0].fileno() == -1
        await found.close(broken=False)
        await environments.aclose()

    run(play())


def test_episodes_go_to_the_host_with_the_fewest_for_its_cpus(hosts: Hosts) -> None:
    place = hosts.open("node 0")
    small, large = (
        HostPlace(name=name, address=place.address, port=place.port, secret=SECRET, num_cpus=cpus, tools=place.tools)
        for name, cpus in (("small", 1), ("large", 3))
    )
    environments = environments_at(small, large)

    async def play() -> None:
        found = [await environments.find_host() for _ in range(8)]
        names = [one.place.name for one in found]
        assert names.count("large") == 6
        for one in found:
            await one.close(broken=False)
        await environments.aclose()

    run(play())


def test_who_does_not_know_the_secret_is_not_let_in_and_an_impostor_is_not_believed(hosts: Hosts) -> None:
    place = hosts.open("node 0")
    stranger = HostPlace(
        name="node 0", address=place.address, port=place.port, secret="another", num_cpus=1, tools=place.tools
    )
    asked: list[int] = []

    def renew(number: int) -> HostPlace:
        asked.append(number)
        return place

    environments = environments_at(stranger, renew=renew)

    async def play() -> None:
        found = await environments.find_host()
        assert found.place is place and asked == [0]
        await found.close(broken=False)
        await environments.aclose()

    run(play())


def test_an_episode_whose_host_is_lost_is_played_again_from_its_beginning(hosts: Hosts) -> None:
    """The first host goes in the middle of the first turn; the episode's tokens are those of the second alone."""
    tokenizer = make_tokenizer()
    environments = environments_at(hosts.open("node 0"), renew=lambda number: hosts.open("node 0, again"))
    seeds: list[int] = []

    async def sample(ids: Any, *, seed: int, sampling: Sampling, session: str) -> Completion:
        seeds.append(seed)
        if len(seeds) == 2:
            await asyncio.to_thread(end_host, hosts.opened[0])
        token_ids = np.array(tokenizer("4" if len(seeds) % 2 == 0 else "3")["input_ids"], dtype=np.int32)
        return replace(Completion.given(token_ids, text=tokenizer.decode(token_ids)), seed=seed)

    async def play() -> None:
        player = Player(
            section=SECTION, environments=environments, conversations=Conversations(tokenizer), max_prompt_tokens=64
        )
        ids = np.array(tokenizer("3a=")["input_ids"], dtype=np.int32)
        prompt = Prompt(id="row", token_ids=ids, text="3a=", answer="4", metadata={})
        episode = (await player.play(prompt, seed=5, sampling=SAMPLING, session="s", sample=sample)).episode
        assert episode is not None and episode.ended is EndReason.DONE and not episode.error
        assert [turn.text for turn in episode.turns] == ["3", "4"]
        assert seeds[:2] == seeds[2:], "the same episode as the first time"
        await environments.aclose()

    run(play())


def test_a_call_that_was_given_up_is_the_hosts_loss_if_the_host_does_not_answer(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "ANSWER_S", 0.2)
    environments = environments_at(hosts.open("node 0"), renew=lambda number: hosts.open("again"))
    stuck = threading.Event()

    async def play() -> None:
        environment = await (await environments.find_host()).start("")
        await environment.close(broken=True)  # it answers
        environment = await (await environments.find_host()).start("")
        hosts.opened[0]._loop.call_soon_threadsafe(stuck.wait, 20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.reset({"answer": "4"}), 0.1)
        with pytest.raises(EnvironmentLost):
            await environment.close(broken=True)
        assert (await environments.find_host()).place.name == "again"
        await environments.aclose()

    try:
        run(play())
    finally:
        stuck.set()


def test_a_host_that_does_not_come_back_ends_the_wait_as_a_loss(hosts: Hosts) -> None:
    place, is_over = hosts.open("node 0"), threading.Event()
    end_host(hosts.opened[0])

    def renew(number: int) -> HostPlace:
        is_over.wait(30)
        return place

    environments = environments_at(place, renew=renew, wait_s=0.2)

    async def play() -> None:
        with pytest.raises(WorkerLostError, match="no node for environments is left, and none came back within 0.2 s"):
            await environments.find_host()
        is_over.set()
        await environments.aclose()

    run(play())


def test_a_host_that_cannot_be_replaced_ends_the_run_with_the_reason(hosts: Hosts) -> None:
    place = hosts.open("node 0")
    end_host(hosts.opened[0])

    def renew(number: int) -> HostPlace:
        raise RestartsSpentError("that is loss 11")

    environments = environments_at(place, renew=renew)

    async def play() -> None:
        with pytest.raises(RestartsSpentError, match="loss 11"):
            await environments.find_host()
        await environments.aclose()

    run(play())
