"""Games of textarena 0.7, played against a scripted opponent. The reward is textarena's: 1 for a win, 0 for a draw, -1 for a loss."""

import random
import re
from contextlib import suppress
from typing import Any

from rollcall.base.importing import load_named
from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult


class Game:
    """``game``: an id of textarena's. ``player``: who the model is. ``opponent``: ``module:function``, which is given the text that a
    player sees and returns its move; without one, a random move among those that the text lists. ``options``: the game's own."""

    def __init__(self, game: str, *, player: int = 0, opponent: str = f"{__name__}:listed_move", options: Any = None):
        self._textarena, self._player = package("textarena"), player
        self._game = self._plain = self._textarena.make(game, **(options or {}))
        while isinstance(self._plain, self._textarena.Wrapper):  # it repeats the whole game, which the model has read
            self._plain = self._plain.env
        self._move = load_named(opponent, key="opponent", what="function", example="my_opponents:careful")

    def reset(self, row: dict[str, Any]) -> Observation:
        for num_players in range(1, 16):  # the fewest that the game takes
            with suppress(AssertionError):
                self._game.reset(num_players=num_players, seed=row.get("seed", row.get("index")))
                break
        if self._is_over():
            raise ValueError("the game was over before the model's first move; choose another player or opponent")
        return Observation(self._seen())

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        self._game.step(action=text)
        if not self._is_over():
            return StepResult(self._seen() or "Your move.")
        rewards, info = self._game.close()
        metrics = {name: info[self._player].get(name, 0) for name in ("turn_count", "invalid_move")}
        return StepResult(None, (rewards or {}).get(self._player, 0.0), True, metrics)

    def _is_over(self) -> bool:
        """Whether the game is over once the others have moved."""
        while not self._plain.state.done and self._plain.state.current_player_id != self._player:
            self._game.step(action=self._move(self._seen()))
        return self._plain.state.done

    def _seen(self) -> str:
        """The text that the player to move has been shown since its last move, without its own."""
        player, shown = self._plain.get_observation()
        roles, own = self._plain.state.role_mapping, (player, self._textarena.ObservationType.PLAYER_ACTION)
        shown = [(by, text) for by, text, kind in shown if (by, kind) != own]
        return "\n".join(text if by < 0 else f"[{roles.get(by, by)}] {text}" for by, text in shown)  # below 0: the game


def listed_move(seen: str) -> str:
    """One of the moves in square brackets that the last line with any lists."""
    moves = [found for line in seen.splitlines() if (found := re.findall(r"\[[^\[\]\n]{1,40}\]", line))]
    if not moves:
        raise ValueError(f"the text lists no moves in brackets ({seen[-200:]!r}); give an opponent: module:function")
    return random.choice(moves[-1])
