"""`rollcall reward test`: what it scores, what it finds wrong, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rewards_bad import RAISES
from runs import letter_rows, make_run
from typer.testing import CliRunner

from rollcall.base.importing import load_named
from rollcall.cli.config import _show_trial
from rollcall.cli.main import app
from rollcall.config import Config, dump_config
from rollcall.config.rewards import (
    CountdownReward,
    EnvironmentReward,
    FunctionReward,
    JudgeReward,
    NumberReward,
    RegexReward,
)
from rollcall.reward.scorer import columns_needed
from rollcall.run.reward_trial import ANSWER, EMPTY, SAMPLE, try_run


def a_run_file(config: Config, folder: Path) -> str:
    path = folder / "tried.yaml"
    path.write_text(dump_config(config))
    return str(path)


def test_each_row_is_scored_with_its_answer_with_nothing_and_with_a_text(tmp_path: Path) -> None:
    reward = [{"type": "exact"}, {"type": "function", "path": "rewards_bad:raises"}]
    rows = letter_rows(4, bad="") + letter_rows(1, bad=RAISES)
    trial = try_run(make_run(tmp_path, rows=rows, reward=reward), num_rows=5)
    assert [scored.completion for scored in trial.scored] == [ANSWER, EMPTY, SAMPLE] * 5
    assert [scored.parts["exact"] for scored in trial.scored] == [1, 0, 0] * 5
    assert [bool(scored.errors) for scored in trial.scored] == [False] * 12 + [True] * 3
    assert not trial.broken and not trial.gives_answers_nothing
    assert "cannot score" in trial.failures[0].why
    assert set(trial.in_force) == {"exact", "raises"} and trial.in_force["raises"]["network"] == "on"


def test_a_reward_that_cannot_tell_completions_apart_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path, rows=letter_rows(2), reward=[{"type": "function", "path": "rewards_bad:always_equal"}])
    trial = try_run(config, num_rows=2)
    _show_trial(trial)
    assert trial.is_constant and "the model cannot learn anything" in capsys.readouterr().out


def test_a_reward_of_groups_gets_the_completions_of_a_row_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_list.py").write_text("def one(completions, answer): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = make_run(tmp_path, rows=letter_rows(2), reward=[{"type": "function", "path": "short_list:one"}])
    trial = try_run(config, num_rows=2)
    assert trial.broken == ["one"] and "returned 1 scores for 3 completions" in trial.failures[0].why


def test_a_path_with_the_ending_of_a_file_is_told_apart() -> None:
    with pytest.raises(ValueError, match=r"my_rewards\.py is a file; write my_rewards:right"):
        load_named("my_rewards.py:right", key="path", what="function", example="m:f")


def test_what_an_environment_gives_is_not_tried_and_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = [{"type": "environment"}, {"type": "exact"}]
    (tmp_path / "my_steps.py").write_text(
        "class Steps:\n    def reset(self, row): ...\n    def step(self, text, token_ids): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = ("environment.type=step", "environment.path=my_steps:Steps")
    trial = try_run(make_run(tmp_path, *changes, rows=letter_rows(1), reward=reward), num_rows=1)
    assert trial.left_out == ["environment"] and not trial.broken and not trial.failures


def test_a_reward_that_fails_on_everything_ends_the_command_with_status_1_and_its_traceback(tmp_path: Path) -> None:
    config = make_run(
        tmp_path, rows=letter_rows(2, bad=RAISES), reward=[{"type": "function", "path": "rewards_bad:raises"}]
    )
    run_file = a_run_file(config, tmp_path)
    shown = CliRunner().invoke(app, ["reward", "test", run_file, "--rows", "1"])
    assert shown.exit_code == 1
    assert "rewards_bad.py" in shown.output and "raises failed on every completion" in shown.output
    as_json = CliRunner().invoke(app, ["reward", "test", run_file, "--json"])
    told = json.loads(as_json.stdout)
    assert as_json.exit_code == 1 and told["broken"] == ["raises"] and len(told["scored"]) == 6


def test_a_row_without_the_answer_that_the_reward_takes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a=", "target": "a"}\n')
    run_file = a_run_file(make_run(tmp_path, f"data.train={tmp_path}/rows.jsonl"), tmp_path)
    shown = CliRunner().invoke(app, ["reward", "test", run_file])
    assert shown.exit_code and "set data.answer_key=target" in shown.output


@pytest.mark.parametrize(
    ("reward", "needed"),
    [
        ("def score(completion, answer): return 1", {"answer": "score"}),
        ("def score(completion, answer=''): return 1", {}),
        ("def score(completion): return 1", {}),
        ("def score(p, c, a, m): return 1", {"answer": "score"}),
        ("def score(p, c, a=None, m=None): return 1", {}),
        ("def score(*four): return 1", {}),
        (NumberReward(), {"answer": "number"}),
        (CountdownReward(), {"numbers": "countdown", "target": "countdown"}),
        (RegexReward(pattern="a"), {}),
        (JudgeReward(url="http://x/v1", model="m", rubric="{completion} {answer}"), {"answer": "judge"}),
        (JudgeReward(url="http://x/v1", model="m", rubric="{completion}"), {}),
    ],
    ids=str,
)
def test_columns_that_a_reward_needs(
    reward: Any, needed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(reward, str):
        name = f"needs_{abs(hash(reward))}"
        (tmp_path / f"{name}.py").write_text(f"{reward}\n")
        monkeypatch.syspath_prepend(tmp_path)
        reward = FunctionReward(path=f"{name}:score")
    assert columns_needed([reward, EnvironmentReward()]) == needed


def test_answers_that_score_nothing_are_pointed_out(tmp_path: Path) -> None:
    config = make_run(tmp_path, reward=[{"type": "regex", "pattern": "<answer>"}])
    shown = CliRunner().invoke(app, ["reward", "test", a_run_file(config, tmp_path), "--rows", "1"])
    assert shown.exit_code == 0 and "own answers score 0" in shown.output


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def score(prompt, text, answer): return 1", "cannot be called with four arguments either"),
        ("def score(prompt, completion, answer, metadata, judge): return 1", "missing a required argument: 'judge'"),
        ("def score(*, text, answer): return 1", "too many positional arguments"),
        ("def score(completion, completions): return 1", "either completion or completions"),
        ("def score(prompt, answer): return 1", "either completion or completions"),
        ("def score(prompt, completion, answer, metadata): yield 1", "generator"),
        ("class score: pass", "is a class"),
        ("score = 'text'", "is str, not a function"),
    ],
)
def test_a_function_that_could_never_score_is_refused_with_the_signature_it_should_have(
    definition: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollcall.reward.user_function import load_function

    name = f"wrong_{abs(hash(definition))}"
    (tmp_path / f"{name}.py").write_text(definition + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message) as caught:
        load_function(f"{name}:score")
    assert "use f(completion, answer) -> float, or f(completions, answer) -> list[float] for a group" in str(
        caught.value
    )


def test_functions_of_other_shapes_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollcall.reward.user_function import load_function

    (tmp_path / "other_shapes.py").write_text(
        "from functools import partial\n"
        "def loose(*args, **kwargs): return 1\n"
        "def more(prompt, completion, answer, metadata, weight=2): return weight\n"
        "some = partial(more, weight=3)\n"
        "class Judge:\n"
        "    def __call__(self, prompt, completion, answer, metadata): return 4\n"
        "    def score(self, prompt, completion, answer, metadata): return 5\n"
        "judge = Judge()\n"
        "def short(completion, answer): return len(completion + answer) + 6\n"
        "def by_name(*, answer, completion): return 7\n"
        "def others(p, c, a, m): return 8\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    values = [
        load_function(f"other_shapes:{name}")("", "", "", {})
        for name in ("loose", "more", "some", "judge", "judge.score", "short", "by_name", "others")
    ]
    assert values == [1, 2, 3, 4, 5, 6, 7, 8]
