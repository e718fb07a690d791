"""An environment server for verifiers 0.4 v1 tasksets.

    taskset.py ──play, stop──▶ this process, in the Python that has verifiers ──▶ verifiers' Env: harnesses, tools, scoring
                                      verifiers' harness ──OpenAI API──▶ the episode's endpoint

verifiers plays an episode as in its own evaluations. We only replace the model's address.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

from rollcall.environments.answering import answer_calls
from rollcall.process.child import dump_stacks_to

SETUP = "ROLLCALL_TASKSET_SETUP"  # environment variable that describes what to serve, as JSON
_END_S = 10.0


def main() -> None:
    connection_fd, lifeline_fd, crash_fd = map(int, sys.argv[-3:])
    for fd in (connection_fd, lifeline_fd, crash_fd):
        os.set_inheritable(fd, False)
    dump_stacks_to(crash_fd)
    threading.Thread(target=_end_after_parent, args=(lifeline_fd,), daemon=True).start()
    asyncio.run(_serve(socket.socket(fileno=connection_fd), json.loads(os.environ.pop(SETUP))))


def _end_after_parent(lifeline_fd: int) -> None:
    """After the parent dies, give this process ``_END_S`` seconds to end its episodes. Then exit, even if the event loop is blocked."""
    os.read(lifeline_fd, 1)
    time.sleep(_END_S)
    os._exit(1)


async def _serve(connection: socket.socket, setup: dict[str, Any]) -> None:
    limit = setup["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    async with AsyncExitStack() as serving:
        server: _Server | Exception
        try:
            server = _Server(setup)
            await serving.enter_async_context(server.env.serving())
        except Exception as error:  # noqa: BLE001 - a taskset is user code and may raise anything
            server = error

        async def do(method: str, arguments: list[Any]) -> Any:
            if isinstance(server, Exception):
                raise server
            if method == "play":
                return await server.play(*arguments)
            if method == "stop":
                server.stop(*arguments)
            return None

        await answer_calls(connection, do)


class _Server:
    def __init__(self, setup: dict[str, Any]) -> None:
        self.env = _part("utils.loaders").load_environment(_env_config(setup))
        taskset = self.env.taskset
        self._tasks = iter(taskset)
        self._read = [] if not taskset.bounded else list(self._tasks)
        self._num_tasks = len(self._read) or None  # None if there are infinitely many
        if taskset.bounded and not self._read:
            raise ValueError("the taskset has no tasks")
        self._playing: dict[int, asyncio.Task[dict[str, Any]]] = {}

    def stop(self, number: int) -> None:
        if (playing := self._playing.get(number)) is not None:
            playing.cancel()

    async def play(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """Play an episode. Return its reward and metrics, or an empty dict if it was cancelled."""
        playing = self._playing[number] = asyncio.ensure_future(self._play(given))
        try:
            await asyncio.wait({playing})
            return {} if playing.cancelled() else playing.result()
        finally:
            playing.cancel()
            await asyncio.wait({playing})
            del self._playing[number]

    async def _play(self, given: dict[str, Any]) -> dict[str, Any]:
        vf = _part()
        name = f"ROLLCALL_API_KEY_{id(given)}"  # verifiers hides variables named *API_KEY* from harnesses
        os.environ[name] = given["key"]
        try:
            client = vf.EvalClientConfig(base_url=given["base_url"], api_key_var=name)
            [slot] = self.env.slots(self._task(given["row"]))
            return _worth(await self.env.run_slot(slot, vf.ModelContext(model="policy", client=client)))
        finally:
            del os.environ[name]

    def _task(self, row: dict[str, Any]) -> Any:
        """Return the task with the row's index. Read an infinite taskset only up to that index."""
        number = int(row.get("index", 0))
        if self._num_tasks is not None:
            return self._read[number % self._num_tasks]
        self._read += itertools.islice(self._tasks, max(0, number + 1 - len(self._read)))
        return self._read[number]


def _part(name: str = "") -> Any:
    """Import a verifiers v1 module, which only the server's Python has."""
    return importlib.import_module(f"verifiers.v1.{name}".rstrip("."))


def _env_config(setup: dict[str, Any]) -> Any:
    """Resolve the user's verifiers `[env]` block. By default, each role is played on this machine as a plain chat."""
    config = dict(setup["config"])
    usual = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": setup["max_turns"]}
    fields = _part("utils.loaders").env_config_type(config["taskset"]["id"], config.get("id") or "").model_fields
    agent = _part("configs.agent").AgentConfig
    for role in (name for name, field in fields.items() if isinstance(field.default, agent)):
        config[role] = {**usual, **config.get(role, {})}
    return _part("utils.loaders").resolve_env_config(config)


def _worth(episode: Any) -> dict[str, Any]:
    """Return the metrics and the mean reward over the episode's traces. There is one trace per role."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok and errors:
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
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
