"""verifiers 0.4: an environment server for a v1 taskset, and the program of one episode, which asks it.

    rollcall ──starts──▶ serve (this file, in the Python that has verifiers) ──▶ verifiers' Env: harnesses, tools, scoring
        └──for each episode──▶ ask (this file, in Rollcall's Python) ──a line of JSON──▶ serve
                                      verifiers' harness ──OpenAI API──▶ the endpoint of the episode

verifiers plays the episode as it does in its own evaluations; only the model's address is ours. This file runs by its path and imports
the standard library alone, and verifiers where it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from typing import Any

_LONGEST_LINE = 64 << 20  # bytes
_END_S = 10.0


def main() -> None:
    verb, *rest = sys.argv[1:]
    if verb == "ask":
        ask(*rest)
    else:
        asyncio.run(_serve(json.loads(sys.stdin.readline())))


# The program of one episode


def ask(address: str) -> None:
    """Prints what the episode was worth, as a program of an episode does."""
    given = {
        "base_url": os.environ["OPENAI_BASE_URL"],
        "key": os.environ["OPENAI_API_KEY"],
        "row": json.loads(os.environ["ROLLCALL_ROW"]),
    }
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            line.sendall(json.dumps(given).encode() + b"\n")
            answer = line.makefile("rb").readline()
    except OSError as error:
        sys.exit(
            f"the environment server of verifiers does not answer ({error}); it has ended, and its output says why"
        )
    if not answer:
        sys.exit("the environment server of verifiers has ended during the episode; its output says why")
    told = json.loads(answer)
    if "error" in told:
        sys.exit(told["error"])
    print(json.dumps(told))


# The server


async def _serve(setup: dict[str, Any]) -> None:
    """Until stdin ends. Says on stdout, in one line, that it is ready, or why it cannot be."""
    limit = setup["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with os.fdopen(os.dup(1), "w") as ready:
        os.dup2(2, 1)  # what verifiers prints is for people
        try:
            server = _Server(setup)
        except Exception as error:  # noqa: BLE001 - a taskset is a program and may raise anything
            ready.write(json.dumps({"refused": f"{type(error).__name__}: {error}"}) + "\n")
            return
        async with server.env.serving():
            listening = await asyncio.start_unix_server(server.answer, setup["address"], limit=_LONGEST_LINE)
            ready.write(json.dumps({"num_tasks": server.num_tasks}) + "\n")
            ready.flush()
            await _until_hung_up()
            listening.close()
            for task in server.playing:
                task.cancel()
            await asyncio.gather(*server.playing, return_exceptions=True)


async def _until_hung_up() -> None:
    """Until stdin ends. Then this process has ``_END_S`` to end, whatever holds its loop."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def watch() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    await ended.wait()


class _Server:
    def __init__(self, setup: dict[str, Any]) -> None:
        self.env = _part("utils.loaders").load_environment(_env_config(setup))
        taskset = self.env.taskset
        self._tasks = iter(taskset)
        self._read = [] if not taskset.bounded else list(self._tasks)
        self.num_tasks = len(self._read) or None  # None: there is no end of them
        if taskset.bounded and not self._read:
            raise ValueError("the taskset has no tasks")
        self.playing: set[asyncio.Task[Any]] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One episode. The asker may go away, and its episode with it."""
        given = json.loads(await reader.readline())
        episode = asyncio.create_task(self._play(given))
        gone = asyncio.create_task(reader.read())
        self.playing.add(episode)
        try:
            await asyncio.wait({episode, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not episode.done():
                episode.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                writer.write(json.dumps(await episode).encode() + b"\n")
                await writer.drain()
        finally:
            gone.cancel()
            self.playing.discard(episode)
            writer.close()

    async def _play(self, given: dict[str, Any]) -> dict[str, Any]:
        vf = _part()
        name = f"ROLLCALL_API_KEY_{id(given)}"  # verifiers takes keys from variables, and gives no harness those with API_KEY in their names
        os.environ[name] = given["key"]
        try:
            client = vf.EvalClientConfig(base_url=given["base_url"], api_key_var=name)
            [slot] = self.env.slots(self._task(given["row"]))
            episode = await self.env.run_slot(slot, vf.ModelContext(model="policy", client=client))
        except Exception as error:  # noqa: BLE001 - told to the run, as the error of this episode
            return {"error": f"verifiers: {type(error).__name__}: {error}"}
        finally:
            del os.environ[name]
        return _worth(episode)

    def _task(self, row: dict[str, Any]) -> Any:
        """The row's number decides. A taskset without an end is read as far as that."""
        number = int(row.get("index", 0))
        if self.num_tasks is not None:
            return self._read[number % self.num_tasks]
        self._read += itertools.islice(self._tasks, max(0, number + 1 - len(self._read)))
        return self._read[number]


def _part(name: str = "") -> Any:
    """A module of verifiers v1, which only the Python that serves has."""
    return importlib.import_module(f"verifiers.v1.{name}".rstrip("."))


def _env_config(setup: dict[str, Any]) -> Any:
    """The user's `[env]` block of verifiers. A role that does not say otherwise is played on this machine, in a plain chat."""
    config = dict(setup["config"])
    usual = {
        "harness": {"id": "null"},
        "runtime": {"type": "subprocess"},
        "max_turns": setup["max_turns"],
    }
    fields = _part("utils.loaders").env_config_type(config["taskset"]["id"], config.get("id") or "").model_fields
    agent = _part("configs.agent").AgentConfig
    for role in (name for name, field in fields.items() if isinstance(field.default, agent)):
        config[role] = {**usual, **config.get(role, {})}
    return _part("utils.loaders").resolve_env_config(config)


def _worth(episode: Any) -> dict[str, Any]:
    """The mean reward of the episode's traces: one, or one for each role."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok and errors:
        return {"error": f"verifiers: {errors[-1].type}: {errors[-1].message}"}
    traces = episode.traces
    metrics: dict[str, float] = {}
    for trace in traces:
        found = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        found |= {name: value for name, value in trace.metrics.items() if value is not None}
        prefix = f"{trace.agent.name}/" if len(traces) > 1 else ""
        metrics |= {f"{prefix}{name}": float(value) for name, value in found.items()}
    return {"reward": sum(trace.reward for trace in traces) / len(traces), "metrics": metrics}


if __name__ == "__main__":
    main()
