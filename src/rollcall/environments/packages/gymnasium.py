"""Gymnasium 1.x environments whose states and actions can be written as text, or as numbers that stand for words."""

import re
from typing import Any

from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult

# Gymnasium's built-in text environments, by name prefix: the words for actions 0, 1, 2..., and the task for the model.
KNOWN = {
    "FrozenLake": ("left down right up", "Go from S to the goal G over frozen F, not into a hole H. You are at []."),
    "CliffWalking": ("up right down left", "Go to T, not over the cliff C. You are at x."),
    "Taxi": ("south north east west pickup dropoff", "You drive the taxi []. Bring the passenger at <> to ()."),
    "Blackjack": ("stick hit", "Get closer to 21 than the dealer. You see (your sum, the dealer's card, usable aces)."),
}
# Terminal output highlights a position with colour. In plain text, we put signs around the character instead.
COLOUR = re.compile(r"\x1b\[([\d;]+)m(.+?)\x1b\[0m")
SIGNS = {"34;1": "<{}>", "35": "({})"}


class Text:
    """``make``: arguments for ``gymnasium.make``, such as ``id``. ``actions``: the words for actions 0, 1, 2...; the last such word in a
    turn counts. ``task``: the first text that the model reads. ``module``: imported first, because some packages register
    environments."""

    def __init__(self, *, actions: Any = None, task: str = "", module: str = "gymnasium", **make: Any) -> None:
        gymnasium = package("gymnasium")
        package(module)
        make |= make.pop("options", None) or {}
        self._env: Any = gymnasium.make(**make)
        if "ansi" in self._env.metadata.get("render_modes", []):
            self._env = gymnasium.make(**{"render_mode": "ansi"} | make)
        words, known = next((KNOWN[name] for name in KNOWN if make["id"].startswith(name)), ("", ""))
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
            raise ValueError(
                f"{make['id']} has the action space {space}; only Discrete and Text actions can be written as text"
            )
        start, count = (int(space.start), int(space.n)) if isinstance(space, gymnasium.spaces.Discrete) else (0, 0)
        named = (actions or words.split() or list(map(str, range(start, start + count)))) if count else []
        if len(named) != count:
            raise ValueError(
                f"{make['id']} has {count} actions, but `actions` lists {len(named)}; list one word for each action"
            )
        self._numbers = {word.lower(): start + place for place, word in enumerate(named)}  # empty if actions are text
        self._task, self._choices = task or known, f"Choose one: {', '.join(named)}." if named else ""

    def reset(self, row: dict[str, Any]) -> Observation:
        observed, _ = self._env.reset(seed=row.get("seed", row.get("index")))
        return Observation("\n".join(filter(None, [self._task, self._written(observed), self._choices])))

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        said = [self._numbers[word] for word in re.findall(r"\w+", text.lower()) if word in self._numbers]
        if self._numbers and not said:
            return StepResult(f"That is not an action. {self._choices}", metrics={"no_action": 1.0})
        observed, reward, is_over, is_cut, _ = self._env.step(said[-1] if said else text.strip())
        return StepResult(self._written(observed), float(reward), bool(is_over or is_cut))

    def _written(self, observed: Any) -> str:
        if self._env.render_mode != "ansi":
            return str(observed)
        return COLOUR.sub(lambda found: SIGNS.get(found[1], "[{}]").format(found[2]), self._env.render()).strip("\n")
