"""textarena 0.7 games against a scripted opponent. The reward is textarena's own: 1 for a win, 0 for a draw, -1 for a loss."""

import random
import re
from contextlib import suppress
from typing import Any

from rollcall.base.importing import load_named
from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult


class Game:
    """``game``: a textarena ID. ``player``: the model's player number. ``opponent``: the ``module:function`` that plays the other
    players. It gets the text that a player sees and returns a move. By default, it picks one of the moves in the text at random.
    ``options``: the game's own options."""

    def __init__(self, game: str, *, player: int = 0, opponent: str = f"{__name__}:listed_move", options: Any = None):
        self._textarena, self._player = package("textarena"), player
        self._game = self._plain = self._textarena.make(game, **(options or {}))
        while isinstance(self._plain, self._textarena.Wrapper):  # wrappers repeat text that the model already read
            self._plain = self._plain.env
        self._move = load_named(opponent, key="opponent", what="function", example="my_opponents:careful")

    def reset(self, row: dict[str, Any]) -> Observation:
        for num_players in range(1, 16):  # use the minimum that the game allows
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
        """Return whether the game is over after the other players have moved."""
        while not self._plain.state.done and self._plain.state.current_player_id != self._player:
            self._game.step(action=self._move(self._seen()))
        return self._plain.state.done

    def _seen(self) -> str:
        """Return the text shown to the current player since its last move, without its own text."""
        player, shown = self._plain.get_observation()
        roles, own = self._plain.state.role_mapping, (player, self._textarena.ObservationType.PLAYER_ACTION)
        shown = [(by, text) for by, text, kind in shown if (by, kind) != own]
        # A negative ID is the game itself.
        return "\n".join(text if by < 0 else f"[{roles.get(by, by)}] {text}" for by, text in shown)


def listed_move(seen: str) -> str:
    """Pick a random move from the last line that lists moves in square brackets."""
    moves = [found for line in seen.splitlines() if (found := re.findall(r"\[[^\[\]\n]{1,40}\]", line))]
    if not moves:
        raise ValueError(f"the text lists no moves in brackets ({seen[-200:]!r}); set opponent to a module:function")
    return random.choice(moves[-1])
