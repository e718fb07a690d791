"""Whole runs in one process: what they leave in the run directory, and that bad rewards do not stop them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from rewards_bad import HANGS, NAN, RAISES
from runs import (
    IN_UPDATE,
    Kill,
    column,
    finish,
    groups,
    journal_bytes,
    letter_rows,
    make_run,
    metric_rows,
    run_and_be_killed,
    weights,
)
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollcall.base.errors import ConfigError
from rollcall.base.journal import Journal
from rollcall.base.lease import hold
from rollcall.config import Config, load_config
from rollcall.loop.attempts import RunError
from rollcall.observe.metrics import check_names
from rollcall.run.training import train
from rollcall.view.audit import audit

SUMMARY_KEYS = {
    "steps", "seconds", "eval", "tokens_generated", "tokens_trained", "rollout_tokens_per_s", "train_tokens_per_s", "step_s",
    "logprob_mismatch", "peak_memory_gib",
}  # fmt: skip


def test_a_run_leaves_everything_that_the_run_directory_promises(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.loggers=[tensorboard]", "trainer.eval_every=3", val=letter_rows(6))
    summary = finish(config, is_lean=False)
    run_dir = config.run.dir
    assert load_config(run_dir / "run.yaml") == config
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert summary.keys() >= SUMMARY_KEYS and summary["steps"] == 6
    assert all(summary[key] is not None for key in SUMMARY_KEYS)
    assert [row["step"] for row in metric_rows(config) if "eval/accuracy" in row] == [0, 3, 6]
    assert sorted(path.name for path in (run_dir / "journal").glob("*.groups"))[-1] == "000006.groups"
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert list((run_dir / "tensorboard").iterdir())
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    samples = (run_dir / "samples" / "val-000006.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt_id"] for line in samples] == [f"row-{index}" for index in range(6)]
    for row in metric_rows(config):
        check_names(row.keys() - {"step", "time"})


def test_the_trained_model_opens_with_transformers_and_is_the_last_checkpoint(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    finish(config)
    model = AutoModelForCausalLM.from_pretrained(config.run.dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(config.run.dir / "model")
    ids = tokenizer("3a=", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    saved = load_file(config.run.dir / "checkpoints" / "step-000006" / "model" / "model.safetensors")
    start = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in weights(config).items():
        np.testing.assert_array_equal(tensor, saved[name])
    assert any(not np.array_equal(tensor, start[name]) for name, tensor in weights(config).items())


def test_the_seed_decides_the_run(tmp_path: Path) -> None:
    one, same, other = (
        make_run(tmp_path, "trainer.steps=2", f"run.seed={seed}", name=name)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    for config in (one, same, other):
        finish(config)
    for name, tensor in weights(one).items():
        assert tensor.tobytes() == weights(same)[name].tobytes()
    assert any(not np.array_equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())
    assert [group.prompt.id for group in groups(one, 1).values()] != [
        group.prompt.id for group in groups(other, 1).values()
    ]


def test_an_epoch_visits_every_prompt_once(tmp_path: Path) -> None:
    config = make_run(tmp_path, rows=letter_rows(24))
    finish(config)
    for first in (1, 4):
        ids = [group.prompt.id for step in range(first, first + 3) for group in groups(config, step).values()]
        assert sorted(ids) == sorted(row["id"] for row in letter_rows(24))


@pytest.mark.slow
def test_evaluation_is_greedy_and_counts_what_the_reward_says(tmp_path: Path) -> None:
    config = make_run(
        tmp_path, "trainer.steps=12", "actor.lr=1e-2", "rollout.samples_per_prompt=8", "data.prompts_per_step=16",
        val=letter_rows(8),
    )  # fmt: skip
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"threshold": 0.5})})
    summary = finish(config)
    accuracy = summary["eval"]["accuracy"]
    assert accuracy["first"] <= 0.25
    assert accuracy["last"] >= accuracy["first"] + 0.25
    lines = (config.run.dir / "samples" / "val-000012.jsonl").read_text().splitlines()
    assert accuracy["last"] == pytest.approx(np.mean([json.loads(line)["reward"] >= 0.5 for line in lines]))


def test_pass_at_k_is_logged_when_evaluation_samples(tmp_path: Path) -> None:
    config = make_run(
        tmp_path, "eval.temperature=1.0", "eval.samples_per_prompt=4", "eval.threshold=0.25", val=letter_rows(8)
    )
    finish(config)
    accuracy, within = column(config, "eval/accuracy"), column(config, "eval/pass_at_k")
    assert all(k >= one for one, k in zip(accuracy, within, strict=True)) and max(within) > 0


# Rewards that fail


def bad_rows() -> list[dict[str, object]]:
    rows = letter_rows(32, bad="")
    rows[3]["bad"], rows[5]["bad"], rows[7]["bad"] = HANGS, RAISES, NAN
    return rows


BAD_REWARDS = [
    {"type": "function", "path": f"rewards_bad:{name}", "timeout_s": 0.3, "weight": 1 / 3}
    for name in ("hangs", "raises", "returns_nan")
]


def run_with_bad_rewards(folder: Path, *, name: str = "run", steps: int = 12) -> Config:
    sizes = (
        "data.prompts_per_step=16",
        "rollout.samples_per_prompt=8",
        f"trainer.steps={steps}",
        "trainer.save_every=4",
        "actor.lr=1e-2",
    )
    return make_run(folder, *sizes, name=name, rows=bad_rows(), reward=BAD_REWARDS)


def failing_items(config: Config) -> Counter[tuple[str, str]]:
    """(reward, row) -> how many of its completions could not be scored, by the journal."""
    return Counter(
        (reward, group.prompt.id)
        for step in range(1, config.trainer.steps + 1)
        for group in groups(config, step).values()
        for score in group.scores
        for reward in score.errors
    )


@pytest.mark.slow
def test_a_run_whose_rewards_hang_raise_and_return_nan_completes_and_learns(tmp_path: Path) -> None:
    config = run_with_bad_rewards(tmp_path)
    summary = finish(config)
    assert summary["steps"] == 12
    failing = failing_items(config)
    assert failing.keys() >= {("raises", "row-5"), ("returns_nan", "row-7"), ("hangs", "row-3")}
    for name, row in (("raises", "row-5"), ("returns_nan", "row-7")):
        assert failing[name, row] == 6 * 8, "each row comes once in two steps, with 8 completions"
    assert 0 < failing["hangs", "row-3"] < 6 * 8
    for name in ("hangs", "raises", "returns_nan"):
        counted = sum(number for (reward, _), number in failing.items() if reward == name)
        assert sum(column(config, f"reward_errors/{name}")) == counted
    assert summary["reward_errors"] == failing.total()
    # A superset: on a machine that stalls, an honest call may pass the time limit too.
    named = {(failure["reward"], failure["kind"], failure["prompt"]) for failure in summary["reward_failures"]}
    assert named >= {("hangs", "hung", "row-3"), ("raises", "raised", "row-5"), ("returns_nan", "nan", "row-7")}
    raised = next(failure for failure in summary["reward_failures"] if failure["kind"] == "raised")
    assert "cannot score '5b='" in raised["why"] and "rewards_bad.py" in raised["why"]
    rewards = column(config, "train/reward_mean")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2


def test_failures_of_a_killed_process_are_still_in_the_summary_of_the_run(tmp_path: Path) -> None:
    config = run_with_bad_rewards(tmp_path, steps=3)
    run_and_be_killed(config, Kill(call=IN_UPDATE, number=3))
    before = journal_bytes(config)
    summary = finish(config)
    assert journal_bytes(config) == before, "all steps were journaled: the second process scores nothing itself"
    named = {(failure["reward"], failure["kind"], failure["prompt"]) for failure in summary["reward_failures"]}
    assert named >= {("raises", "raised", "row-5"), ("returns_nan", "nan", "row-7")}
    assert summary["reward_errors"] == failing_items(config).total()


def test_a_reward_that_cannot_be_imported_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    config = make_run(tmp_path, reward=[{"type": "function", "path": "rewards_bad:no_such_function"}])
    with pytest.raises(ValueError, match="no_such_function"):
        finish(config)
    assert not list((config.run.dir).glob("journal/*.groups"))


def test_a_second_process_on_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another process is training")
    with hold(tmp_path / "run"), refused, hold(tmp_path / "run"):
        pass
    with hold(tmp_path / "run"):
        assert list(tmp_path.glob(".run.lease-*"))


# A reward that scores nothing


def a_run_whose_reward_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Config:
    """Its function raises while the file ``broken`` is there, on every row or on those that ``broken`` names."""
    (folder / "my_scores.py").write_text(
        "import pathlib\n"
        "def score(prompt, completion, answer, metadata):\n"
        "    broken = pathlib.Path(__file__).with_name('broken')\n"
        "    if broken.exists() and answer in broken.read_text():\n"
        "        raise KeyError('judge')\n"
        "    return completion.count(answer) / 4\n"
    )
    (folder / "broken").write_text("abcd")
    monkeypatch.chdir(folder)
    reward = [{"type": "function", "path": "my_scores:score"}, {"type": "regex", "pattern": "."}]
    return make_run(folder, "trainer.steps=2", "data.prompts_per_step=4", *overrides, reward=reward)


@pytest.mark.parametrize("overrides", [(), ("trainer.staleness=1", "trainer.order=as_completed")])
def test_a_run_stops_when_a_reward_fails_on_every_completion_and_goes_on_when_it_is_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = a_run_whose_reward_fails(tmp_path, monkeypatch, *overrides)
    with pytest.raises(RunError) as caught:
        finish(config)
    told = str(caught.value)
    assert "step 1: the reward score failed on all 16 completions (16 raised)" in told
    assert "my_scores.py" in told and "KeyError: 'judge'" in told and "run the same command again" in told
    assert not Journal(config.run.dir / "journal").trained()
    sampled = groups(config, 1)
    with pytest.raises(RunError, match="failed on all 16"):
        finish(config)
    (tmp_path / "broken").unlink()
    finish(config)
    scored = groups(config, 1)
    assert all(not score.errors for group in scored.values() for score in group.scores)
    assert {draw: [c.text for c in group.completions] for draw, group in sampled.items()} == {
        draw: [c.text for c in scored[draw].completions] for draw in sampled
    }
    assert audit(config.run.dir).is_clean
    assert column(config, "train/reward_errors") == [0, 0]


@pytest.mark.slow
def test_a_reward_that_fails_on_some_is_counted_and_shown_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = a_run_whose_reward_fails(tmp_path, monkeypatch)
    (tmp_path / "broken").write_text("ab")
    train(config)
    errors = column(config, "train/reward_errors")
    assert all(0 < number < 16 for number in errors) and column(config, "train/completions") == [16, 16]
    assert f"reward errors {errors[-1]:.0f}/16" in capsys.readouterr().out
