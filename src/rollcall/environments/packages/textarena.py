"""Games of textarena 0.7, played against a scripted opponent.

    data:        {train: "builtin:environment"}
    environment:
      type: step
      path: "rollcall.environments.packages.textarena:Game"
      kwargs: {game: TicTacToe-v0}
      python: .textarena/bin/python

A row's ``seed``, or its number, decides the game, so that all attempts of a group play the same one. The reward is textarena's: 1 for a
win, 0 for a draw, -1 for a loss, and in games for one player a share of the way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from rollcall.environments.packages import package
from rollcall.environments.stepwise import Observation, StepResult
from rollcall.importing import load_named

Opponent = Callable[[str], str]
"""What a player has been shown since its last move -> its move"""

_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_MAX_MOVES = 10_000  # of opponents, between two of ours


class Game:
    """``game``: an id of textarena's. ``player``: who the model is. ``opponent``: ``module:function``, which is given the text that a
    player sees and returns its move; without one, a random move among those that the game's text lists. ``options``: the game's own."""

    def __init__(
        self,
        game: str,
        *,
        player: int = 0,
        num_players: int | None = None,
        opponent: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        textarena = package("textarena")
        if game not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(
                f"textarena has no game {game!r}; its games are in textarena.envs.registration.ENV_REGISTRY"
            )
        self._textarena = textarena
        self._name, self._options, self._player = game, dict(options or {}), player
        self._num_players = num_players
        self._opponent: Opponent = (
            random_listed_move
            if opponent is None
            else load_named(opponent, key="opponent", what="function", example="my_opponents:careful")
        )
        self._game: Any = None

    def reset(self, row: dict[str, Any]) -> Observation:
        self._game = self._make()
        seed = row.get("seed", row.get("index"))
        for num_players in [self._num_players] if self._num_players else [1, 2]:
            try:
                self._game.reset(num_players=num_players, seed=None if seed is None else int(seed))
                break
            except AssertionError:  # how a game refuses a number of players
                if num_players != 1:
                    raise
        if self._player >= self._game.state.num_players:
            raise ValueError(
                f"{self._name} has {self._game.state.num_players} players; player={self._player} is none of them"
            )
        if self._let_others_move():
            raise ValueError(f"{self._name} was over before the model's first move; choose another player or opponent")
        return Observation(self._seen())

    def step(self, text: str, token_ids: list[int]) -> StepResult:
        is_done, _ = self._game.step(action=text)
        if not is_done:
            is_done = self._let_others_move()
        if not is_done:
            return StepResult(self._seen() or "Your move.")
        rewards, info = self._game.close()
        ours = info[self._player]
        return StepResult(
            reward=float((rewards or {}).get(self._player, 0.0)),
            done=True,
            metrics={"moves": float(ours.get("turn_count", 0)), "invalid_move": float(ours.get("invalid_move", False))},
        )

    def _make(self) -> Any:
        """Without the wrappers that repeat the whole game in each observation: the model has read it already."""
        registration = self._textarena.envs.registration
        spec = registration.ENV_REGISTRY[self._name]
        raw = self._name if self._name.endswith("-raw") else f"{self._name.removesuffix('-train')}-raw"
        game = self._textarena.make(raw if raw in registration.ENV_REGISTRY else self._name, **self._options)
        for wrapper in spec.default_wrappers or [] if raw in registration.ENV_REGISTRY else []:
            if issubclass(wrapper, self._textarena.ActionWrapper):
                game = wrapper(game)
        return game

    def _let_others_move(self) -> bool:
        """Until it is the model's turn; True: the game is over."""
        for _ in range(_MAX_MOVES):
            if self._game.state.done:
                return True
            if self._game.state.current_player_id == self._player:
                return False
            if self._game.step(action=self._opponent(self._seen()))[0]:
                return True
        raise RuntimeError(f"the model was not asked to move within {_MAX_MOVES} moves of the others")

    def _seen(self) -> str:
        """What the player to move has been shown since its last move, without what it said itself."""
        player, observation = self._game.get_observation()
        if isinstance(observation, str):  # a game that comes only with a wrapper
            return observation
        names = self._game.state.role_mapping
        lines = []
        for sender, message, kind in observation:
            if sender == player and kind is self._textarena.ObservationType.PLAYER_ACTION:
                continue
            lines.append(message if sender == self._textarena.GAME_ID else f"[{names.get(sender, sender)}] {message}")
        return "\n".join(lines).strip()


def random_listed_move(seen: str) -> str:
    """One of the moves in square brackets that the last line with any lists."""
    for line in reversed(seen.splitlines()):
        if moves := _MOVE.findall(line):
            return random.choice(moves)
    raise ValueError(
        f"the game lists no moves in square brackets for its other player ({seen[-200:]!r}); give an opponent: module:function, "
        "which is given the text and returns the move"
    )
