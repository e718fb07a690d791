"""An OpenEnv server for the tests, run by the Python that has openenv: ``python openenv_counter.py PORT``.

Its environment counts down from ``seed``; each step is worth 0.5, and the last one ends the episode.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    message: str


class Left(Observation):
    text: str


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(step_count=0)
        self._left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Left:
        self._state = State(episode_id=episode_id, step_count=0)
        self._left = seed or 1
        return Left(text=f"{self._left} left", done=False, reward=0.0)

    def step(self, action: Move, **kwargs: Any) -> Left:
        if action.message == "bug":
            raise RuntimeError("division")
        if action.message == "die":
            sys.stdout.flush()
            import os

            os._exit(3)
        self._state.step_count += 1
        self._left -= 1
        return Left(text=f"{self._left} left", done=self._left == 0, reward=0.5)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Counter, Move, Left, env_name="counter", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
