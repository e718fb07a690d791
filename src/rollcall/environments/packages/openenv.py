"""An environment behind an OpenEnv server (openenv 0.10), by its address.

    environment:
      type: step
      path: "rollcall.environments.packages.openenv:Server"
      kwargs: {url: "http://127.0.0.1:8000", action: message}

Each episode has a session of its own on the server: one WebSocket, with ``reset``, ``step`` and ``state`` as JSON messages. The columns of
the row go to the server's ``reset``, which takes those that it knows. What the server says is wrong with an action is for the model to
read. A server that goes away, or does not answer in time, fails the episode.
"""

from __future__ import annotations

import json
from typing import Any

from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult

# The usual names of an observation's text, in the environments that OpenEnv publishes.
_TEXTS = ("text", "message", "content", "output", "echoed_message", "prompt", "stdout")
_OF_THE_ACTION = "VALIDATION_ERROR"  # the only error that the model can do something about
_MAX_MESSAGE_BYTES = 32 << 20
_MAX_WHY = 1000


class ServerError(RuntimeError):
    """The server answered with an error, or not at all."""


class Server:
    """``action``: the field of the action that takes the model's text; without it, the model writes the action as JSON.
    ``observation``: the field of the observation that the model reads; without it, a usual one, or all fields as JSON."""

    def __init__(
        self,
        url: str,
        *,
        action: str | None = None,
        observation: str | None = None,
        reset: dict[str, Any] | None = None,
        connect_timeout_s: float = 20.0,
    ) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(f"url={url!r} is not an address; write for example http://127.0.0.1:8000")
        self._url = f"{scheme.replace('http', 'ws')}://{rest.rstrip('/')}/ws"
        self._action, self._observation, self._reset = action, observation, dict(reset or {})
        self._connect_timeout_s = connect_timeout_s
        self._client: Any = None
        self._socket: Any = None

    async def reset(self, row: dict[str, Any]) -> Observation:
        if self._socket is None or self._socket.closed:
            await self._connect()
        seed = {"seed": row["index"]} if "index" in row and "seed" not in row else {}
        given = {name: value for name, value in row.items() if name not in ("prompt", "answer", "environment", "index")}
        answer = await self._ask({"type": "reset", "data": {**seed, **given, **self._reset}})
        return Observation(self._text(answer))

    async def step(self, text: str, token_ids: list[int]) -> StepResult:
        action = self._as_action(text)
        if action is None:
            return StepResult("Write the action as a JSON object.", metrics={"bad_action": 1.0})
        try:
            answer = await self._ask({"type": "step", "data": action})
        except _Refused as refused:
            return StepResult(str(refused), metrics={"bad_action": 1.0})
        reward, is_done = answer.get("reward"), bool(answer.get("done"))
        return StepResult(
            None if is_done else self._text(answer),
            reward=None if reward is None else float(reward),
            done=is_done,
            metrics=await self._state() if is_done else {},
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _as_action(self, text: str) -> dict[str, Any] | None:
        if self._action is not None:
            return {self._action: text}
        try:
            action = json.loads(text)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None

    def _text(self, answer: dict[str, Any]) -> str:
        observed = answer.get("observation")
        if not isinstance(observed, dict):
            raise ServerError(f"the server's answer has no observation ({json.dumps(answer)[:200]})")
        if self._observation is not None:
            if self._observation not in observed:
                raise ServerError(
                    f"the observation has no field {self._observation!r}; it has {', '.join(observed)}; name one in kwargs"
                )
            return str(observed[self._observation])
        for name in _TEXTS:
            if isinstance(observed.get(name), str):
                return observed[name]
        return json.dumps(observed, ensure_ascii=False)

    async def _state(self) -> dict[str, float]:
        """The numbers of the environment's state at the end, such as its ``step_count``."""
        state = await self._ask({"type": "state"})
        return {name: float(value) for name, value in state.items() if isinstance(value, int | float)}

    async def _connect(self) -> None:
        aiohttp = package("aiohttp")  # it comes with Ray; a Python of the server's may lack it

        if self._client is None:
            self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=self._connect_timeout_s))
        try:
            self._socket = await self._client.ws_connect(self._url, max_msg_size=_MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(
                f"no OpenEnv server answers at {self._url} ({error}); start it, or correct the url"
            ) from None

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            await self._socket.send_str(json.dumps(message, default=str))
            answer = await self._socket.receive_json()
        except (TypeError, ValueError, ConnectionError) as error:
            why = f"it closed the connection with code {self._socket.close_code}" if self._socket.closed else str(error)
            raise ServerError(f"the OpenEnv server at {self._url} went away during {message['type']}: {why}") from None
        data = answer.get("data") or {}
        if answer.get("type") == "error":
            told = str(data.get("message", "the server gave no reason"))
            if message["type"] == "step" and data.get("code") == _OF_THE_ACTION:
                raise _Refused(f"{told}: {json.dumps(data['errors'])[:_MAX_WHY]}" if data.get("errors") else told)
            raise ServerError(f"the OpenEnv server at {self._url} refused {message['type']}: {told}")
        return data


class _Refused(Exception):  # noqa: N818 - for the model to read
    """The server cannot use the action."""
