"""Reward functions of TRL's convention: unchanged, they get what TRL 1.16 gives them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import column, finish, groups, make_run
from tiny import make_tokenizer

from rollcall.base.errors import ConfigError
from rollcall.base.group_record import decode, encode, records
from rollcall.base.types import Completion, EndReason, Episode, Group, Prompt, ToolCall, Turn
from rollcall.config import DataSection, DrGrpo, ExactReward, FunctionReward
from rollcall.loop.data.load import load_prompts
from rollcall.loop.samples import make_samples
from rollcall.reward.scorer import Scorer
from rollcall.reward.trl import lists_of
from rollcall.reward.user_function import load_function
from rollcall.run.reward_trial import try_rewards
from rollcall.view.audit import audit

PEERS = Path(os.environ.get("ROLLCALL_PEERS") or Path(__file__).parents[1] / ".peers")
ASKED = [{"role": "user", "content": "2+2?"}]


def a_prompt(**metadata: Any) -> Prompt:
    return Prompt(id="row", token_ids=np.zeros(1, dtype=np.int32), text="say 4", answer="4", metadata=metadata)


def said(text: str, num_tokens: int = 1) -> Completion:
    return Completion.given(np.arange(num_tokens, dtype=np.int32), text=text)


def played(*turns: Turn, error: str = "", **attributes: Any) -> Completion:
    episode = Episode(
        prompt_ids=None, turns=turns, branches=(), reward=None, metrics={}, ended=EndReason.ERROR if error else EndReason.DONE,
        error=error, opening=" Play.", attributes=attributes,
    )  # fmt: skip
    return replace(said(turns[-1].text if turns else ""), episode=episode)


def test_a_reward_of_the_environment_that_the_run_does_not_use_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    episode = played(a_turn("4"))
    assert episode.episode is not None
    scored = replace(episode, episode=replace(episode.episode, reward=1.0))
    with Scorer([ExactReward()], num_workers=1, model_rewards={}) as scorer:
        for _ in range(2):
            asyncio.run(scorer.score(a_prompt(), (scored,)))
    assert caplog.text.count("the environment returns a reward that the run does not use: add {type: environment}") == 1


def a_turn(text: str, observation: str = "", *calls: ToolCall) -> Turn:
    return Turn(num_sampled=1, num_observed=1, text=text, observation=observation, calls=calls, reward=None)


def called(name: str, prompt: Prompt, *completions: Completion) -> Any:
    """What the function returns, without a process."""
    return load_function(f"rewards_of_trl:{name}").call_with_lists(lists_of(prompt, completions))


def test_every_column_is_a_list_and_a_row_of_text_has_texts() -> None:
    prompt, completions = a_prompt(ground_truth=7, task="math"), (said("4", 2), said("5"))
    assert lists_of(prompt, completions) == {
        "prompts": ["say 4", "say 4"], "completions": ["4", "5"], "completion_ids": [[0, 1], [0]], "id": ["row", "row"],
        "answer": ["4", "4"], "ground_truth": [7, 7], "task": ["math", "math"],
    }  # fmt: skip
    assert called("of_prompts", prompt, *completions) == [1, 0]
    assert called("of_answers", prompt, *completions) == [1, 0]
    assert called("logs", prompt, *completions) == [7, 7]
    assert called("overlong", prompt, said("", 3), said("", 2)) == [-1, 0]
    assert called("everything", prompt, *completions) == [10, 10]


def test_a_row_of_messages_has_messages() -> None:
    prompt = a_prompt(prompt_messages=ASKED, solution="4")
    lists = lists_of(prompt, [said("<think> 4")])
    assert lists["prompts"] == [ASKED] and lists["completions"] == [[{"role": "assistant", "content": "<think> 4"}]]
    assert called("format_of_messages", prompt, said("<think> 4"), said("4")) == [1, 0]
    assert called("accuracy", prompt, said("so 4"), said("5")) == [1, 0]


def test_a_text_that_a_chat_template_rendered_is_still_text_and_columns_keep_names_and_types(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "ab", "answer": 5, "solution": "c"}\n{"prompt": [{"role": "user", "content": "a"}], "answer": "b", "solution": "d"}\n'
    )
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    text, chat = load_prompts(str(rows), data=DataSection(train=str(rows)), tokenizer=tokenizer).prompts
    lists = lists_of(text, [said("c")])
    assert lists["prompts"] == ["ab"] and lists["completions"] == ["c"] and lists["answer"] == [5]
    assert lists_of(chat, [said("c")])["prompts"] == [[{"role": "user", "content": "a"}]]
    named = DataSection(train=str(rows), answer_key="solution")
    (text,) = load_prompts(str(rows), data=named, tokenizer=tokenizer, limit=1).prompts
    assert lists_of(text, [said("c")])["solution"] == ["c"]


def test_an_episode_is_a_conversation_with_its_calls() -> None:
    call = ToolCall(name="find", arguments={"sql": "select"}, result='[["a", 1]]', failed=False)
    turns = (
        a_turn('let me see <tool_call>{"name": "find"}</tool_call>', "x", call), a_turn("so?", "go on"), a_turn("*yes*"),
    )  # fmt: skip
    lists = lists_of(a_prompt(prompt_messages=ASKED), [played(*turns, score=2.5)])
    assert lists["prompts"] == [[{"role": "user", "content": "2+2? Play."}]] and lists["environments"] == [
        {"score": 2.5}
    ]
    function = {"type": "function", "function": {"name": "find", "arguments": {"sql": "select"}}}
    assert lists["completions"] == [[
        {"role": "assistant", "content": "let me see", "tool_calls": [function]},
        {"role": "tool", "name": "find", "content": '[["a", 1]]'},
        {"role": "assistant", "content": "so?"}, {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "*yes*"},
    ]]  # fmt: skip
    assert called("tools_called", a_prompt(), played(*turns)) == [2]
    assert called("score_left", a_prompt(), played(score=2.5)) == [2.5]
    with pytest.raises(AttributeError, match="left no attribute 'get_reward' that JSON can represent; it left score"):
        called("asks_for_methods", a_prompt(), played(score=2.5))


def test_what_is_missing_or_ambiguous_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match="no column 'solution', which the function requires; its columns are id, answer, task"
    ):
        called("accuracy", a_prompt(task="x"), said("4"))
    for name, why in {
        "only_prompts": "prompts is an argument of TRL, and TRL passes further arguments by name; add \\*\\*kwargs",
        "two_meanings": "is ambiguous: a function with \\*\\*kwargs is called with lists, as in TRL, but TRL has no metadata",
        "by_place": "prompts is before a /, but TRL passes arguments by name; remove the /",
        "progress": "rewards are not told the run.s progress",
    }.items():
        with pytest.raises(ValueError, match=why):
            load_function(f"rewards_of_trl:{name}")


def test_the_functions_run_in_reward_processes_and_a_failed_environment_hurts_no_other() -> None:
    paths = ("score_left", "later", "accuracy", "everything")
    rewards = [FunctionReward(path=f"rewards_of_trl:{name}") for name in paths]
    with Scorer(rewards, num_workers=1, model_rewards={}) as scorer:
        assert scorer.environment_readers == ["score_left"]
        made = (played(a_turn("a"), score=1.5), played(error="it died"), played(a_turn("b"), score=0.5))
        scores = asyncio.run(scorer.score(a_prompt(solution="unknown"), made))
        assert [score.parts["score_left"] for score in scores] == [1.5, 0, 0.5]
        assert [score.parts["later"] for score in scores] == [1, 0, 1]
        assert [score.errors for score in scores] == [{}, {"environment": "raised: it died"}, {}]  # None is no error


def test_a_completion_that_every_function_declines_is_neither_compared_nor_trained_on() -> None:
    completions = (said("1"), said("?"), said("0"))
    rewards = [FunctionReward(path=f"rewards_of_trl:{name}") for name in ("declines", "declines_too")]
    with Scorer(rewards, num_workers=1, model_rewards={}) as scorer:
        scores = asyncio.run(scorer.score(a_prompt(), completions))
    assert [(score.value, score.is_given) for score in scores] == [(1, True), (0, False), (5, True)]
    group = Group(
        step=1, draw=0, prompt=a_prompt(), completions=completions, scores=scores, started_s=0, finished_s=1, worker="w"
    )
    ((_, record),) = records(encode(group))
    assert decode(record).scores == scores
    samples = make_samples(
        [group],
        algorithm=DrGrpo(),
        max_response_tokens=8,
        reference=None,
        values=None,
        environment=None,
        environment_weight=0.0,
    )
    assert [(sample.attempt, sample.advantages.tolist()) for sample in samples] == [(0, [-2]), (2, [2])]


def test_a_step_without_a_scored_completion_is_skipped(tmp_path: Path) -> None:
    reward = [{"type": "function", "path": "rewards_of_trl:declines_all"}]
    config = make_run(tmp_path, "trainer.steps=1", "data.prompts_per_step=2", reward=reward)
    finish(config)
    assert column(config, "train/skipped_fraction") == [1.0]


def test_a_run_scores_the_state_that_its_environments_were_left_in(tmp_path: Path) -> None:
    changes = (
        "trainer.steps=1",
        "data.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "environment.max_turn_tokens=3",
    )
    reward = [{"type": "function", "path": "rewards_of_trl:score_left"}]
    environment = ("environment.type=class", "environment.path=rewards_of_trl:Game", "environment.call_format=text")
    config = make_run(tmp_path, *changes, *environment, reward=reward)
    finish(config)
    for group in groups(config, 1).values():
        assert [score.value for score in group.scores] == [0.5, 0.5]
        for completion in group.completions:
            assert completion.episode is not None
            assert completion.episode.attributes == {"board": [[0, 2], [4, 8]], "score": 0.5, "best": 8}
    assert audit(config.run.dir).is_clean
    with pytest.raises(ConfigError, match="the reward score_left reads the environment"):
        finish(make_run(tmp_path, *changes[:3], name="without", reward=reward))
    trial = try_rewards(config, [a_prompt()])
    assert trial.left_out == ["score_left"] and not trial.broken


@pytest.mark.slow  # TRL is in an environment of its own: `scripts/setup_peers.sh .peers trl`
def test_the_functions_that_come_with_trl_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(PEERS.glob("trl/lib/python3*/site-packages/trl"), None)
    if found is None:
        pytest.skip("TRL is not there; scripts/setup_peers.sh .peers trl")
    (tmp_path / "trl").symlink_to(found)  # without the libraries beside it
    made = "from trl.rewards import *\npunish = get_soft_overlong_punishment(4, 2)\nrepeats = get_repetition_penalty_reward()\n"
    (tmp_path / "made_by_trl.py").write_text(made)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("think_format_reward", "accuracy_reward", "reasoning_accuracy_reward", "punish", "repeats")
    rewards = [FunctionReward(path=f"made_by_trl:{name}") for name in names]
    prompt = a_prompt(prompt_messages=ASKED, solution="$4$")
    with Scorer(rewards, num_workers=1, model_rewards={}) as scorer:
        right, wrong = asyncio.run(
            scorer.score(prompt, (said(r"<think>a</think> \boxed{4}", 3), said(r"\boxed{5}", 6)))
        )
    assert list(right.parts.values()) == [1, 1, 1, -0.5, 0] and not right.errors
    assert list(wrong.parts.values()) == [0, 0, 0, -1, 0] and not wrong.errors
