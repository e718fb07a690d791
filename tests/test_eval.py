"""`rollcall eval`: which model it takes, and what it says about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import rollcall
from tiny import save_model

from rollcall.base.errors import ConfigError
from rollcall.run.evaluation import EvalReport, ModelPlan, plan_evaluation, run_evaluation
from rollcall.run.training import train

ROOT = Path(__file__).parents[1]
PROMPTS = [f"{a}+{b}=" for a in range(3) for b in range(2)]


def write_rows(path: Path, answers: list[str] | None = None) -> Path:
    answers = answers or ["7"] * len(PROMPTS)
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(folder: Path, *, val: bool = True) -> Path:
    data = str(write_rows(folder / "rows.jsonl"))
    run = {
        "run": {"name": "tiny", "dir": str(folder / "run")},
        "model": {"path": str(save_model(folder / "model")), "device": "cpu"},
        "data": {"train": data, "val": data if val else None, "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4, "temperature": 0.7},
        "trainer": {"steps": 2, "save_every": 1, "num_threads": 1, "loggers": []},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(run))
    return path


def plan(target: Path, *overrides: str, **flags: Any) -> ModelPlan:
    every = {"data": None, "samples": None, "temperature": None, "max_prompts": None, **flags}
    return plan_evaluation(target, overrides=["trainer.num_threads=1", *overrides], **every)


def report(target: Path, *overrides: str, **flags: Any) -> EvalReport:
    return run_evaluation(plan(target, *overrides, **flags), on_progress=lambda done, total: None)


def greedy_answers(model_dir: Path, *, max_new_tokens: int) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_a_model_directory_is_scored_by_the_exact_answer(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    answers = greedy_answers(model, max_new_tokens=3)
    answers[0] += "wrong"
    data = write_rows(tmp_path / "rows.jsonl", answers)
    result = report(model, "rollout.max_response_tokens=3", data=str(data))
    assert result.evaluation.accuracy == pytest.approx(1 - 1 / len(PROMPTS))
    assert [row[1] for row in result.samples[1:]] == answers[1:]
    assert result.plan.origin == "model directory"


def test_without_a_length_a_model_directory_answers_up_to_its_last_position(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", max_position_embeddings=24, eos_token_id=39)
    result = report(model, data=str(write_rows(tmp_path / "rows.jsonl")))
    longest = max(len(completion.token_ids) for group in result.evaluation.groups for completion in group.completions)
    assert longest <= 24 - len(PROMPTS[0])


def test_a_run_file_evaluates_the_newest_model_of_its_run(tmp_path: Path) -> None:
    from rollcall.config import load_config

    run_file = write_run(tmp_path)
    before = plan(run_file)
    assert before.model_path == str(tmp_path / "model") and before.origin.startswith("not trained yet")

    train(load_config(run_file), quiet=True)
    for target in (run_file, tmp_path / "run"):
        after = plan(target)
        assert (after.model_path, after.origin) == (str(tmp_path / "run/model"), "trained model")
    assert plan(run_file, f"model.path={tmp_path / 'model'}").origin == "given by model.path"

    (tmp_path / "run/model").rename(tmp_path / "elsewhere")
    checkpoint = plan(run_file)
    assert checkpoint.origin == "checkpoint of step 2"
    assert report(run_file).evaluation.groups[0].prompt.text == PROMPTS[0]


@pytest.mark.slow
def test_a_checkpoint_newer_than_the_exported_model_is_taken(tmp_path: Path) -> None:
    from rollcall.config import load_config

    run_file = write_run(tmp_path)
    train(load_config(run_file), quiet=True)
    os.utime(tmp_path / "run/model", (1, 1))
    assert plan(run_file).origin == "checkpoint of step 2"


@pytest.mark.slow
def test_a_run_directory_that_was_moved_is_still_found(tmp_path: Path) -> None:
    from rollcall.config import load_config

    train(load_config(write_run(tmp_path)), quiet=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert plan(tmp_path / "moved").model_path == str(tmp_path / "moved/model")


def test_several_samples_give_pass_at_k_and_are_not_greedy(tmp_path: Path) -> None:
    run_file = write_run(tmp_path)
    result = report(run_file, samples=4, max_prompts=3)
    assert result.plan.config.eval.temperature == 0.7  # the run's own sampling
    assert sorted(result.evaluation.pass_at) == [1, 2, 4] and len(result.evaluation.groups) == 3
    completions = result.evaluation.groups[0].completions
    assert len({completion.text for completion in completions}) > 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"samples": 4, "temperature": 0.0}, "all eval.samples_per_prompt=4 completions of a prompt are the same"),
        ({"data": None}, "data.val is null, so there is nothing to evaluate on; add --data FILE"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_loaded(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(write_run(tmp_path, val="data" not in flags), **flags)


def test_a_model_directory_without_data_and_a_folder_that_is_neither_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not name any data; add --data FILE"):
        plan(save_model(tmp_path / "model"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError,
        match="empty is a directory without run.yaml; give a run file, or the directory of a run or of a model",
    ):
        plan(tmp_path / "empty")


def test_a_path_that_looks_like_a_number_is_a_path(tmp_path: Path) -> None:
    made = plan(save_model(tmp_path / "1000"), data="2024.jsonl")
    assert made.config.run.name == "1000" and made.model_path == str(tmp_path / "1000")
    assert made.config.data.val == "2024.jsonl"


def test_an_option_stands_above_the_same_key_on_the_command_line(tmp_path: Path) -> None:
    made = plan(write_run(tmp_path), "eval.temperature=0.5", "eval.samples_per_prompt=3", samples=2)
    assert (made.config.eval.samples_per_prompt, made.config.eval.temperature) == (2, 0.5)


def test_rewards_that_judge_no_answer_are_replaced_by_the_exact_one(tmp_path: Path) -> None:
    result = report(write_run(tmp_path), "reward=[{type: self_certainty}]")
    assert list(result.evaluation.groups[0].scores[0].parts) == ["exact"]


def test_a_reward_that_fails_is_counted_and_named(tmp_path: Path) -> None:
    result = report(write_run(tmp_path), "reward=[{type: function, path: 'rewards_bad:raises'}]")
    assert result.evaluation.num_unscored == len(PROMPTS)
    assert "KeyError: 'bad'" in result.failures[0].why and result.as_json()["reward_errors"] == len(PROMPTS)


def test_the_command_prints_its_numbers_and_samples(tmp_path: Path) -> None:
    run_file = write_run(tmp_path)
    command = ["eval", str(run_file), "--samples", "2", "trainer.num_threads=1"]
    for extra in ([], ["--json"]):
        result = rollcall(*command, *extra, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        if extra:
            numbers = json.loads(result.stdout)
            assert {"accuracy", "response_length_mean", "reward_mean"} < numbers.keys()
            assert numbers["prompts"] == len(PROMPTS) and numbers["pass_at"].keys() == {"1", "2"}
            assert numbers["samples"][0]["prompt"] == PROMPTS[0]
        else:
            for words in ("accuracy", "pass@2", "mean length", PROMPTS[0], "the model the run starts from"):
                assert words in result.stdout


def test_a_target_that_is_not_there_is_said_to_be_none_of_the_three(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="nosuch does not exist; give a run file, or the directory of a run or of a model"
    ):
        plan(tmp_path / "nosuch")
