"""Environments of other packages. What needs a package asks for its environment: `scripts/setup_peers.sh .peers textarena gymnasium openenv`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from peers import peer

from rollcall.base.errors import ConfigError
from rollcall.config.environments import ClassEnvironment, StepEnvironment
from rollcall.environments.host import make_environments
from rollcall.environments.packages import package
from rollcall.environments.packages.openenv import Server
from rollcall.environments.packages.textarena import listed_move
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.protocol import StepResult
from rollcall.environments.stepwise import load_stepwise

USERS = "tests.environments_of_users"
PACKAGES = "rollcall.environments.packages"


async def play(section: StepEnvironment, moves: list[str], **row: Any) -> tuple[str | None, list[StepResult]]:
    """An episode in processes, until it is done or there are no more moves."""
    environments = make_environments(section, chat_template=None)
    assert isinstance(environments, ProcessEnvironments)
    try:
        environment = await environments.start("")
        opening = await environment.reset(row)
        results = []
        for move in moves:
            results.append(await environment.step(move, []))
            if results[-1].done:
                break
        await environment.close(broken=False)
        return opening, results
    finally:
        await environments.aclose()


# Arguments and a Python of their own


def test_a_class_gets_its_arguments_and_wrong_ones_are_refused() -> None:
    player = load_stepwise(f"{USERS}:Countdown", key="environment.path", kwargs={"start": 3})
    assert player.reset({}, lambda value: value) == "3"
    with pytest.raises(ValueError, match=r"cannot be instantiated with environment.kwargs=\{'begin': 3\}"):
        load_stepwise(f"{USERS}:Countdown", key="environment.path", kwargs={"begin": 3})


def test_arguments_of_several_classes_are_a_map_by_name() -> None:
    paths: Any = {"a": "m:A", "b": "m:B"}
    assert StepEnvironment(path=paths, kwargs={"b": {"start": 1}}).kwargs == {"b": {"start": 1}}
    with pytest.raises(ValueError, match="kwargs.c is not a class in path; the names in path are a, b"):
        StepEnvironment(path=paths, kwargs={"c": {}})
    with pytest.raises(ValueError, match="kwargs.a is not a map"):
        ClassEnvironment(path=paths, kwargs={"a": 1})
    with pytest.raises(ValueError, match="kwargs has no effect without a class"):
        ClassEnvironment(tools=["m:f"], kwargs={"a": 1})


def test_another_python_without_our_libraries_runs_an_environment() -> None:
    python = getattr(sys, "_base_executable", sys.executable)
    section = StepEnvironment(path=f"{USERS}:Countdown", kwargs={"start": 2}, python=python)
    opening, results = asyncio.run(play(section, ["x", "x", "x"]))
    assert opening == "2"
    assert [result.done for result in results] == [False, True]
    assert results[-1].metrics == {"is_base": 1.0}


def test_a_client_of_openenv_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(
        ModuleNotFoundError, match="aiohttp is not installed in .*; install it there, or set environment.python"
    ):
        asyncio.run(Server("http://127.0.0.1:9").reset({}))


def test_a_python_that_is_not_there_is_refused() -> None:
    section = StepEnvironment(path=f"{USERS}:Countdown", python="/nowhere/bin/python")
    with pytest.raises(ConfigError, match="environment.python=/nowhere/bin/python is not a program"):
        make_environments(section, chat_template=None)


# OpenEnv


@asynccontextmanager
async def openenv_server(*, leaves_at: str = "") -> AsyncIterator[tuple[str, list[Any]]]:
    """Speaks its protocol: counts down from the number it was reset with. ``leaves_at``: the message at which it goes away."""
    from aiohttp import web

    heard: list[Any] = []

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        left = 0
        async for raw in socket:
            message = json.loads(raw.data)
            heard.append(message)
            if message["type"] == leaves_at:
                break
            if message["type"] == "state":
                await socket.send_json({"type": "state", "data": {"step_count": 7, "episode_id": "e"}})
                continue
            if message["type"] == "reset":
                left = message["data"]["seed"]
            elif message["data"].get("message") == "bad":
                await socket.send_json(
                    {"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}
                )
                continue
            elif message["data"].get("message") == "bug":
                await socket.send_json({"type": "error", "data": {"message": "division", "code": "EXECUTION_ERROR"}})
                continue
            else:
                left -= 1
            data = {"observation": {"text": f"{left} left"}, "reward": 0.5, "done": left == 0}
            await socket.send_json({"type": "observation", "data": data})
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/ws", talk)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1], heard
    finally:
        await runner.cleanup()


def test_an_openenv_server_is_played_over_its_socket() -> None:
    async def check() -> None:
        async with openenv_server() as (port, heard):
            server = Server(f"http://127.0.0.1:{port}/", action="message")
            assert (await server.reset({"index": 2, "prompt": "", "answer": "", "level": 3})).text == "2 left"
            assert heard[0] == {"type": "reset", "data": {"seed": 2, "level": 3}}
            refused = await server.step("bad", [])
            assert "no such move" in str(refused.observation) and not refused.done
            first = await server.step("go", [])
            assert (first.observation, first.reward, first.done) == ("1 left", 0.5, False)
            last = await server.step("go", [])
            assert last.done and last.metrics == {"step_count": 7.0}
            assert (await server.reset({"index": 5})).text == "5 left"
            with pytest.raises(RuntimeError, match="refused step: division"):
                await server.step("bug", [])
            await server._client.close()

    asyncio.run(check())


def test_an_openenv_server_that_goes_away_fails_the_episode() -> None:
    async def check() -> None:
        async with openenv_server(leaves_at="step") as (port, _):
            server = Server(f"ws://127.0.0.1:{port}", action="message")
            await server.reset({"index": 2})
            with pytest.raises(RuntimeError, match="closed the connection during step"):
                await server.step("go", [])
        with pytest.raises(RuntimeError, match="no OpenEnv server answers at"):
            await server.reset({"index": 2})
        await server._client.close()

    asyncio.run(check())


def test_without_a_field_the_action_is_json_and_an_address_must_be_one() -> None:
    server = Server("http://127.0.0.1:1")
    assert "JSON object" in str(asyncio.run(server.step("go", [])).observation)
    with pytest.raises(ValueError, match="is not an address"):
        Server("localhost:8000")


# Packages themselves


def test_a_package_that_is_missing_says_where_it_should_be() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed in .*python.*environment.python"):
        package("no_such_package")


def test_an_opponent_moves_as_the_games_text_lists() -> None:
    assert listed_move("Board [x]\nAvailable Moves: '[0]', '[7]'\nYour move.") in ("[0]", "[7]")
    with pytest.raises(ValueError, match="set opponent to"):
        listed_move("Say something.")


def test_a_reasoning_gym_task_may_be_tried_again() -> None:
    pytest.importorskip("reasoning_gym")
    from rollcall.environments.packages.reasoning_gym import Task

    task = Task("chain_sum", tries=2)
    question = task.reset({"index": 3}).text
    assert task.reset({"index": 3}).text == question != task.reset({"index": 4}).text
    assert "Try again" in str(task.step("<answer>no</answer>", []).observation)
    right = task.step(f"so <answer>{task._entry['answer']}</answer>", [])
    assert right.done and right.reward == 1.0 and right.metrics == {"tries": 2.0}


@pytest.mark.slow
def test_textarena_games_are_played() -> None:
    section = StepEnvironment(
        path=f"{PACKAGES}.textarena:Game", kwargs={"game": "GuessTheNumber-v0"}, python=peer("textarena")
    )
    opening, results = asyncio.run(play(section, [f"[{number}]" for number in range(1, 21)], index=3))
    assert "between 1 and 20" in str(opening)
    assert "The target number is higher." in results[0].messages[0].content
    assert results[-1].done and results[-1].reward == 1.0
    against = StepEnvironment(path=section.path, kwargs={"game": "TicTacToe-v0"}, python=section.python)
    _, results = asyncio.run(play(against, ["nonsense", "nonsense"], index=3))
    assert results[-1].reward == -1.0 and results[-1].metrics["invalid_move"] == 1.0


@pytest.mark.slow
def test_gymnasium_text_environments_are_played() -> None:
    lake = StepEnvironment(
        path=f"{PACKAGES}.gymnasium:Text",
        kwargs={"id": "FrozenLake-v1", "options": {"is_slippery": False}},
        python=peer("gymnasium"),
    )
    moves = ["hm", "down", "down", "I go right", "right", "down", "right"]
    opening, results = asyncio.run(play(lake, moves, index=0))
    assert "[S]FFF" in str(opening) and "left, down, right, up" in str(opening)
    assert results[0].metrics == {"no_action": 1.0}
    assert results[-1].done and results[-1].reward == 1.0
    cards = StepEnvironment(path=lake.path, kwargs={"id": "Blackjack-v1"}, python=lake.python)
    opening, results = asyncio.run(play(cards, ["stick"], index=0))
    assert "your sum, the dealer's card" in str(opening) and results[-1].done
