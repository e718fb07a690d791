"""Tasksets of verifiers: its own server plays their episodes. `scripts/setup_peers.sh .peers verifiers` makes its environment."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import numpy as np
import pytest
from endpoints import Writer, chat_tokenizer, plain_sampling
from test_packages import peer

from rollcall.config.environments import VerifiersEnvironment
from rollcall.environments.make import make_environments
from rollcall.environments.taskset import TasksetEnvironments
from rollcall.errors import ConfigError
from rollcall.types import Completion, EndReason, Prompt

HANGMAN = {"taskset": {"id": "textarena", "game": "Hangman-v0"}}
LETTERS = "ETAOINSHRLDU"
FROM_HERE = (
    "NLTK_DATA",
    "SSL_CERT_FILE",
    "HTTPS_PROXY",
    "UV_INDEX",
)  # where its data and programs come from on this machine


def section(python: str, *, config: dict[str, Any] | None = None, **fields: Any) -> VerifiersEnvironment:
    env = [name for name in FROM_HERE if name in os.environ]
    return VerifiersEnvironment(config=config or HANGMAN, python=python, env=env, **fields)


def guesses(prompt: str) -> str:
    """The next letter: one for each turn that the model has had."""
    return f"I guess [{LETTERS[prompt.count('[assistant]') - 1]}]"


def play(given: VerifiersEnvironment, *, count: int) -> list[Completion]:
    tokenizer = chat_tokenizer()
    writer = Writer(tokenizer=tokenizer, says=guesses)
    environments = make_environments(given, chat_template=tokenizer.chat_template)
    assert isinstance(environments, TasksetEnvironments)

    async def one(player: Any, number: int) -> Completion:
        prompt = Prompt(id="p", token_ids=np.array([5], dtype=np.int32), text="", answer="", metadata={"index": number})
        return await player.play(
            prompt, seed=number, sampling=plain_sampling(8000), session=f"episode-{number}", sample=writer.sample
        )

    async def work() -> list[Completion]:
        player = environments.player(tokenizer=tokenizer, max_prompt_tokens=4000, max_response_tokens=8000)
        try:
            return await asyncio.gather(*(one(player, number // 2) for number in range(count)))
        finally:
            await environments.aclose()

    return asyncio.run(work())


def test_a_taskset_must_be_named() -> None:
    with pytest.raises(ValueError, match="config names no taskset; write for example"):
        VerifiersEnvironment(config={"game": "Hangman-v0"}, python="python3")


def test_a_python_without_verifiers_is_refused() -> None:
    """Before the run begins, and nothing of the server is left."""
    python = getattr(sys, "_base_executable", sys.executable)
    with pytest.raises(
        ConfigError, match="verifiers refuses environment.config: ModuleNotFoundError: No module named 'verifiers'"
    ):
        make_environments(section(python), chat_template=None)


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_played_by_its_own_server() -> None:
    """Hangman of the taskset `textarena` that comes with verifiers, two episodes each of two words."""
    completions = play(section(peer("verifiers"), max_turns=12), count=4)
    episodes = [one.episode for one in completions if one.episode is not None]
    assert [episode.error for episode in episodes] == [""] * 4
    for completion, episode in zip(completions, episodes, strict=True):
        assert episode.ended is EndReason.DONE and episode.branches == () and len(episode.turns) > 3
        assert "[A]" in episode.turns[2].text and episode.turns[0].observation.startswith("C00 C01")  # the board
        assert episode.metrics["game_reward"] == episode.reward
        assert completion.mask.sum() == sum(turn.num_sampled for turn in episode.turns)
    assert episodes[0].reward == episodes[1].reward and max(episode.reward or 0.0 for episode in episodes) > 0.0
