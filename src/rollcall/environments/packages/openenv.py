"""An environment on an OpenEnv server (openenv 0.10). Each episode has its own session, a WebSocket with JSON messages."""

import json
from typing import Any

from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult

# Common names for an observation's text field in OpenEnv's published environments.
TEXTS = ("text", "message", "content", "output", "echoed_message", "prompt", "stdout")


class Server:
    """``action``: the action's field that takes the model's text. If empty, the model writes the action as JSON.
    ``observation``: the field that the model reads; defaults to a common text field, or to all fields as JSON."""

    def __init__(self, url: str, *, action: str = "", observation: str = "") -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url={url!r} is not an address; use, for example, http://127.0.0.1:8000")
        self._url, self._action, self._observation = f"{url.rstrip('/')}/ws", action, observation
        self._client: Any = None
        self._socket: Any = None

    async def reset(self, row: dict[str, Any]) -> Observation:
        if self._socket is None or self._socket.closed:
            aiohttp = package("aiohttp")  # installed with Ray, but environment.python may lack it
            self._client = self._client or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=20))
            try:
                self._socket = await self._client.ws_connect(self._url, max_msg_size=32 << 20)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise RuntimeError(
                    f"no OpenEnv server answers at {self._url} ({error}); start one, or correct url"
                ) from None
        columns = {name: row[name] for name in row if name not in ("prompt", "answer", "environment", "index")}
        answer = await self._ask("reset", data={"seed": row.get("index"), **columns})
        return Observation(self._text(answer["observation"]))

    async def step(self, text: str, token_ids: list[int]) -> StepResult:
        try:
            action = {self._action: text} if self._action else dict(json.loads(text))
        except (TypeError, ValueError):
            return StepResult("Write the action as a JSON object.", metrics={"bad_action": 1.0})
        answer = await self._ask("step", data=action)
        if "code" in answer:  # the action is invalid, so let the model correct it
            return StepResult(json.dumps(answer)[:2000], metrics={"bad_action": 1.0})
        state = await self._ask("state") if answer["done"] else {}
        metrics = {name: float(value) for name, value in state.items() if isinstance(value, int | float)}
        return StepResult(self._text(answer["observation"]), answer["reward"], answer["done"], metrics)

    def _text(self, observed: dict[str, Any]) -> str:
        name = self._observation or next((name for name in TEXTS if isinstance(observed.get(name), str)), "")
        return str(observed[name]) if name else json.dumps(observed, ensure_ascii=False)

    async def _ask(self, kind: str, **message: Any) -> dict[str, Any]:
        await self._socket.send_str(json.dumps({"type": kind, **message}, default=str))
        answer = await self._socket.receive()
        if not isinstance(answer.data, str):
            raise RuntimeError(
                f"the OpenEnv server at {self._url} closed the connection during {kind} ({self._socket.close_code})"
            )
        said = json.loads(answer.data)
        if said["type"] == "error" and (kind != "step" or said["data"].get("code") != "VALIDATION_ERROR"):
            raise RuntimeError(f"the OpenEnv server at {self._url} refused {kind}: {said['data'].get('message')}")
        return said["data"]
