"""Rewards that are functions: plain, of a whole group, async; named in a run file or given as objects."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewards_of_groups
from commands import fork_context
from runs import lean, letter_rows, make_run
from scored import completions_of

import rollcall
from rollcall.base.types import Prompt, Score
from rollcall.config import FunctionReward, RegexReward
from rollcall.reward.functions import check_score
from rollcall.reward.given import name_functions
from rollcall.reward.scorer import Scorer
from rollcall.run.api import read_config


def scored(*texts: str, path: str, **fields: Any) -> tuple[Scorer, tuple[Score, ...]]:
    prompt = Prompt(id="p", token_ids=np.zeros(1, dtype=np.int32), text="say ab", answer="ab", metadata={"extra": 1})
    reward = FunctionReward(path=path, **fields)
    with lean(), Scorer([reward, RegexReward(pattern="a")], num_workers=1, model_rewards={}) as scorer:
        return scorer, asyncio.run(scorer.score(prompt, completions_of(*texts)))


def parts(scores: tuple[Score, ...]) -> list[float]:
    return [next(iter(score.parts.values())) for score in scores]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("plain", [1, 0, 0]),
        ("ranked", [1.5, 1.25, 2]),
        ("waits_together", [3, 3, 3]),
        ("async_batched", [2, 1, 4]),
    ],
)
def test_a_function_is_called_as_its_arguments_say(name: str, wanted: list[float]) -> None:
    _, scores = scored("ab", "a", "bbbb", path=f"rewards_of_groups:{name}")
    assert parts(scores) == wanted
    assert [score.parts["regex"] for score in scores] == [1, 1, 0]


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("too_few", "nan", "returned 1 scores for 2 completions"),
        ("group_raises", "raised", "KeyError: 'x'"),
        ("group_hangs", "hung", "no score within 0.5 s"),
        ("blocks", "hung", "no score within 1.5 s"),
    ],
)
def test_a_call_for_a_group_that_fails_fails_for_each_completion(name: str, kind: str, why: str) -> None:
    _, scores = scored("x", "y", path=f"rewards_of_groups:{name}", timeout_s=0.5)
    assert [score.errors[name] for score in scores] == [f"{kind}: {why}"] * 2


def test_one_completion_of_a_group_may_fail_alone() -> None:
    _, scores = scored("good", "bad", path="rewards_of_groups:some_bad")
    assert parts(scores) == [1, 0] and "nan" in scores[1].errors["some_bad"]
    scorer, scores = scored("raise", "hang", "good", path="rewards_of_groups:one_fails_one_hangs", timeout_s=0.5)
    assert parts(scores) == [0, 0, 1]
    assert [score.errors.get("one_fails_one_hangs") for score in scores] == [
        "raised: TimeoutError: the server said so", "hung: no score within timeout_s=0.5", None,
    ]  # fmt: skip
    (raised,) = (failure for failure in scorer.failures if failure.kind == "raised")
    assert "in one_fails_one_hangs" in raised.why and "worker.py" not in raised.why


def test_an_async_function_works_without_the_network() -> None:
    _, scores = scored("ab", path="rewards_of_groups:async_batched", network=False)
    assert parts(scores) == [2]


def test_a_function_given_as_an_object_goes_by_its_path_or_by_value() -> None:
    bonus = 2.0

    def mine(completion: str) -> float:
        return bonus if "a" in completion else 0.0

    given = name_functions([rewards_of_groups.plain, mine, {"path": lambda completion: 7, "weight": 0.5}])
    assert given == [
        {"type": "function", "path": "rewards_of_groups:plain"},
        {"type": "function", "path": "<python>:mine"},
        {"type": "function", "path": "<python>:lambda", "weight": 0.5},
    ]
    assert parts(scored("a", "b", path="<python>:mine")[1]) == [2, 0]
    assert parts(scored("a", path="<python>:lambda")[1]) == [7]
    both = name_functions([lambda completion: 1, lambda completion: 2, partial(mine)])
    assert [one["path"] for one in both] == ["<python>:lambda", "<python>:lambda_2", "<python>:mine"]
    lock = threading.Lock()
    with pytest.raises(rollcall.ConfigError, match="the reward lambda cannot be sent .* put it in a module"):
        name_functions(lambda completion: float(lock.locked()))


def continue_run(directory: Path, said: Path) -> None:
    try:
        rollcall.train(directory, quiet=True, trainer={"steps": 2})
    except rollcall.ConfigError as error:
        said.write_text(str(error))


@pytest.mark.slow
def test_a_run_takes_functions_and_whoever_continues_it_gives_them_again(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=1", "trainer.eval_every=0", rows=letter_rows(8), val=letter_rows(2))

    def letters(completions: list[str], answer: str) -> list[float]:
        return [float(answer in completion) for completion in completions]

    with lean():
        run = rollcall.train(config, quiet=True, reward=[letters, {"type": "regex", "pattern": "a", "weight": 0.1}])
    assert run.config.reward[0].model_dump()["path"] == "<python>:letters"
    for group in run.groups():
        assert [score.parts["letters"] for score in group.scores] == [
            float(group.prompt.answer in one.text) for one in group.completions
        ]
    assert rollcall.evaluate(run, quiet=True, reward=letters).evaluation.num_unscored == 0
    said = tmp_path / "said"
    other = fork_context().Process(target=continue_run, args=(run.dir, said))
    other.start()
    other.join()
    assert "reward.0.path=<python>:letters is a function that was passed as an object" in said.read_text()


def test_rewards_in_a_map_of_sections_may_be_functions() -> None:
    config = read_config({"reward": [rewards_of_groups.ranked]})
    assert config.reward[0].model_dump()["path"] == "rewards_of_groups:ranked"
    with pytest.raises(rollcall.ConfigError, match="reward"):
        read_config({"reward": "exact"})


@pytest.mark.parametrize("value", [1e39, -1e308])
def test_a_score_that_training_cannot_compute_with_is_no_score(value: float) -> None:
    with pytest.raises(ValueError, match="a reward must be between"):
        check_score(value)
