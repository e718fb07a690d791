"""Environments of Gymnasium 1.x whose states and actions can be written: text, or numbers that stand for words.

    data:        {train: "builtin:environment"}
    environment:
      type: step
      path: "rollcall.environments.packages.gymnasium:Text"
      kwargs: {id: FrozenLake-v1, options: {is_slippery: false}}
      max_turns: 20

What the model reads is the environment's own text (``render_mode: ansi``), or its observation where it has none. An action is a word of
``actions``, or a number; the last one in the model's text counts. A text without one is answered with the choices, and costs a turn.
"""

from __future__ import annotations

import re
from typing import Any

from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult

# What the numbers of the package's own text environments mean, in the words of its documentation.
_ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "FrozenLake8x8": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "CliffWalkingSlippery": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
}
_OBSERVED = {"Blackjack": ("your sum", "dealer's card", "usable ace")}
_TASKS = {
    "FrozenLake": "Go from S to the goal G over frozen fields F, not into a hole H. You are at [].",
    "FrozenLake8x8": "Go from S to the goal G over frozen fields F, not into a hole H. You are at [].",
    "CliffWalking": "Go to T, not over the cliff C. You are at x.",
    "CliffWalkingSlippery": "Go to T, not over the cliff C. You are at x.",
    "Taxi": "Pick up the passenger at <> and drop them off at (). The taxi is at []. You cannot drive through |.",
    "Blackjack": "Come closer to 21 than the dealer, and not over it.",
}
# Terminals show a place by its colour, and text by signs around it. Code 0 ends a colour.
_COLOUR = re.compile(r"\x1b\[([\d;]+)m(.?)")
_SIGNS = {"34;1": "<{}>", "35": "({})"}


class Text:
    """``id``: as in ``gymnasium.make``. ``actions``: the words for actions 0, 1, 2... ``task``: what the model is told first.
    ``options``: more arguments of ``gymnasium.make``. ``module``: imported first, for packages that register environments."""

    def __init__(
        self,
        id: str,  # noqa: A002 - Gymnasium's own name for it
        *,
        actions: list[str] | None = None,
        task: str | None = None,
        options: dict[str, Any] | None = None,
        module: str | None = None,
    ) -> None:
        gymnasium = package("gymnasium")
        if module is not None:
            package(module)
        self._name = id.rpartition("/")[2].partition("-v")[0]
        self._is_drawn = "ansi" in _modes(gymnasium, id)
        self._env: Any = gymnasium.make(
            id, **{**({"render_mode": "ansi"} if self._is_drawn else {}), **(options or {})}
        )
        space = self._env.action_space
        self._takes_text = isinstance(space, gymnasium.spaces.Text)
        if not self._takes_text and not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id} has actions of {space}; only Discrete and Text can be written as words")
        self._first = 0 if self._takes_text else int(space.start)
        count = 0 if self._takes_text else int(space.n)
        self._actions = actions or _ACTIONS.get(self._name) or [str(self._first + number) for number in range(count)]
        if not self._takes_text and len(self._actions) != count:
            raise ValueError(f"{id} has {count} actions, and actions names {len(self._actions)}; name each")
        self._task = _TASKS.get(self._name) if task is None else task

    def reset(self, row: dict[str, Any]) -> Observation:
        seed = row.get("seed", row.get("index"))
        observed, _ = self._env.reset(seed=None if seed is None else int(seed))
        return Observation("\n".join(filter(None, [self._task, self._written(observed), self._choices()])))

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        action = text.strip() if self._takes_text else self._action(text)
        if action is None:
            return StepResult(f"That is no action. {self._choices()}", metrics={"no_action": 1.0})
        observed, reward, is_over, is_cut, _ = self._env.step(action)
        return StepResult(self._written(observed), reward=float(reward), done=bool(is_over or is_cut))

    def _written(self, observed: Any) -> str:
        if self._is_drawn:
            return _COLOUR.sub(_marked, str(self._env.render())).strip("\n")
        if isinstance(observed, str):
            return observed
        if names := _OBSERVED.get(self._name):
            return ", ".join(f"{name}: {value}" for name, value in zip(names, observed, strict=True))
        return str(observed)

    def _choices(self) -> str:
        return "" if self._takes_text else f"Choose one: {', '.join(self._actions)}."

    def _action(self, text: str) -> int | None:
        words = re.findall(r"\w+", text.lower())
        for word in reversed(words):
            for number, action in enumerate(self._actions):
                if word == action.lower():
                    return self._first + number
        return None


def _modes(gymnasium: Any, name: str) -> list[str]:
    """How an environment can be drawn, which its class says."""
    entry = gymnasium.spec(name).entry_point
    maker = entry if callable(entry) else gymnasium.envs.registration.load_env_creator(entry)
    return getattr(maker, "metadata", {}).get("render_modes", [])


def _marked(found: re.Match[str]) -> str:
    return found[2] if found[1] == "0" or not found[2] else _SIGNS.get(found[1], "[{}]").format(found[2])
