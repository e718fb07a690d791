"""Runs whose process is killed with SIGKILL at an exact moment, then started again by the same run file."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    IN_EVALUATION,
    IN_EXPORT,
    IN_EXPORT_FLUSH,
    IN_JOURNAL,
    IN_MARK_TRAINED,
    IN_METRICS,
    IN_PRUNE,
    IN_SAVE_FLUSH,
    IN_SAVE_WRITE,
    IN_SUMMARY,
    IN_UPDATE,
    Kill,
    column,
    finish,
    groups,
    journal_bytes,
    letter_rows,
    make_run,
    metric_rows,
    num_records,
    run_and_be_killed,
    run_in_child,
    weights,
)
from safetensors.torch import load_file, save_file

from rollcall.base.errors import CheckpointError, ModelFilesError
from rollcall.base.group_record import MAGIC
from rollcall.base.journal import Journal
from rollcall.base.types import Completion, Group
from rollcall.config import Config, load_config
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.protocol import Request
from rollcall.observe.sinks import read_rows
from rollcall.run.origin import code_of, refuse_changed_base, sampled_weights

STEPS, PROMPTS = 6, 8
# Two updates a step, so that one can be killed between them; an evaluation every other step; save_every is 2.
OVERRIDES = ("actor.minibatches=2", "actor.weight_decay=0.01", "actor.warmup_steps=3", "trainer.eval_every=2")


def resumable(folder: Path, *overrides: str, name: str = "killed") -> Config:
    return make_run(folder, *OVERRIDES, *overrides, name=name, rows=letter_rows(20), val=letter_rows(4))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """What every killed run is compared with; its folder holds the model and data that they share."""
    config = resumable(tmp_path_factory.mktemp("resume"), name="whole")
    finish(config)
    return config


def beside(whole: Config, name: str, *overrides: str) -> Config:
    return resumable(whole.run.dir.parent, *overrides, name=name)


def assert_same_weights(config: Config, whole: Config) -> None:
    ours, theirs = weights(config), weights(whole)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    assert not different, f"weights differ in {different}"


def assert_complete(config: Config, *, steps: int = STEPS) -> None:
    """Every step once in the metrics, every draw trained once, no group recorded twice, a summary of the whole run."""
    rows = metric_rows(config)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, steps + 1))
    assert [row["step"] for row in rows if "eval/accuracy" in row] == list(range(0, steps + 1, 2))
    with Journal(config.run.dir / "journal") as journal:
        trained = journal.trained()
        assert sorted(trained) == list(range(1, steps + 1))
        assert sorted(draw for step in trained.values() for draw in step.draws) == list(range(steps * PROMPTS))
        assert [entry.version for _, entry in sorted(trained.items())] == list(range(1, steps + 1))
        recorded = [group.draw for step in journal.steps() for group in journal.read(step)]
    assert recorded == list(range(steps * PROMPTS))
    assert num_records(config) == steps * PROMPTS, "a finished group was generated again"
    summary = json.loads((config.run.dir / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["tokens_generated"] == sum(
        group.num_tokens for step in range(1, steps + 1) for group in groups(config, step).values()
    )
    assert summary["tokens_trained"] == sum(column(config, "train/tokens"))
    assert summary["eval"]["accuracy"]["first"] is not None


def sampled(completion: Completion) -> tuple[int, list[int], str]:
    return completion.seed, completion.token_ids.tolist(), completion.finish


def assert_same_samples(ours: dict[int, Group], theirs: dict[int, Group]) -> None:
    assert ours.keys() == theirs.keys()
    for draw, group in ours.items():
        assert group.prompt.id == theirs[draw].prompt.id
        assert [sampled(each) for each in group.completions] == [sampled(each) for each in theirs[draw].completions]
        for mine, other in zip(group.completions, theirs[draw].completions, strict=True):
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "update",
    [
        pytest.param(1, id="the-first-of-all", marks=pytest.mark.slow),
        pytest.param(7, id="between-two-of-a-step"),
        pytest.param(12, id="the-last", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_inside_an_update_ends_with_the_same_bits(uninterrupted: Config, update: int) -> None:
    config = beside(uninterrupted, f"update-{update}")
    run_and_be_killed(config, Kill(call=IN_UPDATE, number=update))
    journaled = journal_bytes(config)
    assert run_in_child(config) == 0
    assert_complete(config)
    assert_same_weights(config, uninterrupted)
    after = journal_bytes(config)
    assert all(after[name] == data for name, data in journaled.items()), "journaled steps are replayed, not redone"


SAVE_KILLS = {
    "before-the-first-file": Kill(call=IN_SAVE_WRITE, number=2, when="before"),
    "with-half-written-files": Kill(call=IN_SAVE_WRITE, number=2, when="torn"),
    "before-the-rename": Kill(call=IN_SAVE_FLUSH, number=2, when="after"),
    "before-pruning": Kill(call=IN_PRUNE, number=2, when="before"),
    "in-the-first-save": Kill(call=IN_SAVE_WRITE, number=1, when="torn"),
    "in-the-last-save": Kill(call=IN_SAVE_WRITE, number=3, when="torn"),
}


def moments(kills: dict[str, Kill], *, quick: tuple[str, ...]) -> list[Any]:
    return [moment if moment in quick else pytest.param(moment, marks=pytest.mark.slow) for moment in kills]


@pytest.mark.parametrize("moment", moments(SAVE_KILLS, quick=("with-half-written-files",)))
def test_a_run_killed_inside_saving_ends_with_the_same_bits(uninterrupted: Config, moment: str) -> None:
    config = beside(uninterrupted, f"save-{moment}")
    run_and_be_killed(config, SAVE_KILLS[moment])
    finish(config)
    assert_complete(config)
    assert_same_weights(config, uninterrupted)
    left = sorted(path.name for path in (config.run.dir / "checkpoints").iterdir())
    assert left == sorted(path.name for path in (uninterrupted.run.dir / "checkpoints").iterdir())


@pytest.mark.parametrize("when", [pytest.param("after", marks=pytest.mark.slow), "torn"])
def test_a_run_killed_inside_a_rollout_keeps_finished_groups_and_generates_only_the_others(
    uninterrupted: Config, when: str
) -> None:
    config = beside(uninterrupted, f"rollout-{when}")
    # Before it come two steps of groups, each with a mark that it was trained: the kill is at the fourth of step 3.
    run_and_be_killed(config, Kill(call=IN_JOURNAL, number=2 * (PROMPTS + 1) + 4, when=when))
    kept, kept_groups = journal_bytes(config), groups(config, 3)
    assert len(kept_groups) == (4 if when == "after" else 3)
    finish(config)
    assert_complete(config)
    after, after_groups = journal_bytes(config), groups(config, 3)
    for name, data in kept.items():
        torn = when == "torn" and name == "000003.groups"
        assert after[name].startswith(data[: data.rindex(MAGIC)] if torn else data)
    for draw, group in kept_groups.items():
        assert after_groups[draw].finished_s == group.finished_s, "a kept group has the time of its first making"
    from_journal = {
        row["step"]: row["rollout/groups_from_journal"] for row in metric_rows(config) if "train/loss" in row
    }
    assert from_journal[3] == len(kept_groups)
    assert_same_samples(after_groups, groups(uninterrupted, 3))


OTHER_KILLS = {
    "between-update-and-mark": Kill(call=IN_MARK_TRAINED, number=3, when="before"),
    "in-the-mark": Kill(call=IN_JOURNAL, number=3 * (PROMPTS + 1), when="torn"),
    "before-the-metrics": Kill(call=IN_METRICS, number=5, when="before"),
    "in-the-first-evaluation": Kill(call=IN_EVALUATION, number=1, when="before"),
    "in-a-later-evaluation": Kill(call=IN_EVALUATION, number=3, when="before"),
    "in-the-export": Kill(call=IN_EXPORT_FLUSH, number=1, when="before"),
    "after-the-export": Kill(call=IN_EXPORT, number=1, when="after"),
    "before-the-summary": Kill(call=IN_SUMMARY, number=1, when="before"),
}


@pytest.mark.parametrize("moment", moments(OTHER_KILLS, quick=("between-update-and-mark", "in-the-export")))
def test_a_run_killed_at_any_other_moment_ends_with_the_same_bits(uninterrupted: Config, moment: str) -> None:
    config = beside(uninterrupted, f"other-{moment}")
    run_and_be_killed(config, OTHER_KILLS[moment])
    finish(config)
    assert_complete(config)
    assert_same_weights(config, uninterrupted)


THREE_KILLS = (
    Kill(call=IN_JOURNAL, number=(PROMPTS + 1) + 3),  # in the rollout of step 2
    Kill(call=IN_UPDATE, number=7),  # in an update, of step 4 when nothing was saved yet
    Kill(call=IN_SAVE_WRITE, number=2, when="torn"),
)


@pytest.mark.parametrize("staleness", [0, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 2))])
def test_a_run_resumed_three_times_trains_each_draw_once(uninterrupted: Config, staleness: int) -> None:
    config = beside(uninterrupted, f"thrice-{staleness}", f"trainer.staleness={staleness}")
    seen: dict[tuple[int, int], float] = {}
    for kill in THREE_KILLS:
        run_and_be_killed(config, kill)
        seen |= made_when(config)
    finish(config)
    assert_complete(config)
    final = made_when(config)
    assert all(final[key] == finished_s for key, finished_s in seen.items()), "a finished group was made again"
    if staleness == 0:
        for step in range(1, 3):  # later steps stand on a policy that float rounding may have moved
            assert_same_samples(groups(config, step), groups(uninterrupted, step))


def made_when(config: Config) -> dict[tuple[int, int], float]:
    return {
        (step, draw): group.finished_s for step in range(1, STEPS + 2) for draw, group in groups(config, step).items()
    }


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_stale_groups_say_which_version_sampled_them(uninterrupted: Config, staleness: int) -> None:
    config = beside(uninterrupted, f"stale-{staleness}", f"trainer.staleness={staleness}")
    finish(config)
    assert_complete(config)
    lags: set[int] = set()
    for step in range(1, STEPS + 1):
        for group in groups(config, step).values():
            versions = [segment.version for completion in group.completions for segment in completion.segments]
            assert all(step - 1 - staleness <= version <= step - 1 for version in versions)
            lags |= {step - 1 - version for version in versions}
    assert max(lags) >= 1, "rollout never ran ahead"


@pytest.mark.parametrize(
    "damage", ["flipped", *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("truncated", "missing"))]
)
def test_a_torn_checkpoint_is_skipped_with_a_warning_and_the_run_still_ends_with_the_same_bits(
    uninterrupted: Config, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = beside(uninterrupted, f"torn-{damage}")
    run_and_be_killed(config, Kill(call=IN_PRUNE, number=2))  # the checkpoint of step 4 is complete
    newest = config.run.dir / "checkpoints" / "step-000004"
    tear(newest / "actor" / "optimizer.pt", damage)
    with caplog.at_level(logging.WARNING):
        finish(config)
    assert any("step-000004 is torn" in message and "actor/optimizer.pt" in message for message in caplog.messages)
    assert_complete(config)
    assert_same_weights(config, uninterrupted)
    assert column(config, "rollout/groups_from_journal")[:4] == [0, 0, 8, 8], "it went on from step 2"


def tear(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
        return
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])


@pytest.mark.slow
def test_a_run_with_every_checkpoint_torn_starts_over_from_the_journal(uninterrupted: Config) -> None:
    config = beside(uninterrupted, "all-torn")
    run_and_be_killed(config, Kill(call=IN_PRUNE, number=2))
    for checkpoint in (config.run.dir / "checkpoints").iterdir():
        tear(checkpoint / "actor" / "optimizer.pt", "truncated")
    finish(config)
    assert_complete(config)
    assert_same_weights(config, uninterrupted)
    assert column(config, "rollout/groups_from_journal")[:4] == [8] * 4


@pytest.mark.slow
def test_ppo_resumes_its_critic_bit_for_bit(tmp_path: Path) -> None:
    overrides = ("algorithm.name=ppo", "algorithm.kl_coef=0.05", "algorithm.kl_in=reward", "critic.lr=1e-3")
    whole, killed = (resumable(tmp_path, *overrides, name=name) for name in ("whole", "killed"))
    finish(whole)
    run_and_be_killed(killed, Kill(call=IN_UPDATE, number=13))
    finish(killed)
    assert_same_weights(killed, whole)
    assert column(killed, "train/value_loss") == column(whole, "train/value_loss")


def rewrite(name: str, **fields: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **fields}))

    return change


def scale(model: Path) -> None:
    path = model / "model.safetensors"
    save_file({name: 1.01 * tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


OTHER_MODELS: dict[str, Callable[[Path], None]] = {
    "other weights": scale,
    r"eos_token_id: \[0\] -> \[0, 5\]": rewrite(
        "generation_config.json", eos_token_id=[0, 5], _from_model_config=False
    ),
    r"eos_token_id: \[0\] -> \[0, 2\]": rewrite("config.json", eos_token_id=[0, 2]),
    "rms_norm_eps: 1e-06 -> 0.1": rewrite("config.json", rms_norm_eps=0.1),
    r"another tokenizer; eos_token_id: \[0\] -> \[3, 0\]": rewrite("tokenizer_config.json", eos_token="<bos>"),
    "another chat template": rewrite("tokenizer_config.json", chat_template="{{ messages[0].content }}"),
}


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.kl_coef=0.1", "trainer.save_every=1"),
        pytest.param(("model.lora.rank=2",), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_only_with_the_model_that_it_began_with(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    sizes = ("data.chat=false", "trainer.steps=2", "trainer.save_every=100")  # the adapter has no checkpoint yet
    config = resumable(tmp_path, *sizes, *overrides)
    run_and_be_killed(config, Kill(call=IN_UPDATE, number=3))
    model, whole = Path(config.model.path), tmp_path / "whole"
    shutil.copytree(model, whole)
    for why, change in OTHER_MODELS.items():
        change(model)
        with pytest.raises(
            ModelFilesError, match=rf"model.path=.* is not the model .* began with \({why}\): restore the original"
        ):
            finish(config)
        shutil.copytree(whole, model, dirs_exist_ok=True)
    noted = (config.run.dir / "base.json").read_text()
    (config.run.dir / "base.json").write_text("{")
    with pytest.raises(
        CheckpointError, match="base.json is missing, damaged .* restore the file, .*, or choose another run.dir"
    ):
        finish(config)
    (config.run.dir / "base.json").write_text(noted)
    finish(config)
    assert list(json.loads(noted)["base"]) == ["float32", "bfloat16", "float16"], "it may go on in another precision"


def test_a_run_goes_on_only_with_the_reward_model_and_the_adapter_that_it_began_with(tmp_path: Path) -> None:
    judge, adapter = tmp_path / "judge", tmp_path / "adapter"
    for folder in (judge, adapter):
        folder.mkdir()
        save_file({"w": torch.arange(9.0)}, folder / "model.safetensors")
    base = {"base_model_name_or_path": str(tmp_path)}
    (adapter / "adapter_config.json").write_text(json.dumps(base))
    config = make_run(tmp_path, reward=[{"type": "model", "path": str(judge)}, {"type": "exact"}])
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(adapter)})})
    before = sampled_weights(config)
    assert set(before) == {str(judge), str(adapter)} and sampled_weights(config) == before
    (config.run.dir / "checkpoints" / "step-1").mkdir(parents=True)
    facts = {"base": {}, "config": {}, "tokenizer": "", "chat template": ""}
    (config.run.dir / "base.json").write_text(json.dumps({"format": 3, **facts, "samples": before}))
    refuse_changed_base(config.run.dir, {**facts, "samples": before}, path="m")
    for folder in (judge, adapter):
        save_file({"w": torch.arange(9.0).flip(0)}, folder / "model.safetensors")
        with pytest.raises(ModelFilesError, match=rf"began with \(other weights in {folder}\): restore the original"):
            refuse_changed_base(config.run.dir, {**facts, "samples": sampled_weights(config)}, path="m")
        save_file({"w": torch.arange(9.0)}, folder / "model.safetensors")


def test_changed_code_of_a_reward_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(
        "from my_grades import grade\ndef score(completion): return grade(completion)\n"
    )
    (tmp_path / "my_grades.py").write_text("def grade(text): return float(len(text))\n")
    reward = [{"type": "function", "path": "my_reward:score"}]

    def told(steps: int) -> list[str]:
        caplog.clear()
        finish(make_run(tmp_path, f"trainer.steps={steps}", "trainer.eval_every=0", reward=reward))
        return [record.getMessage() for record in caplog.records if "code" in record.getMessage()]

    assert told(1) == []
    (tmp_path / "my_grades.py").write_text("def grade(text): return -float(len(text))\n")
    [line] = told(2)
    assert "the reward code has changed since the run" in line
    assert "last ran (my_grades): groups in the journal keep their scores from the old code" in line
    assert line in (tmp_path / "run/events.jsonl").read_text()
    assert told(3) == [], "it ran with this code before"


def test_an_environments_code_is_its_classes_its_tools_and_the_scripts_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "games/__init__.py": "",
        "games/chess.py": "import json, numpy\nfrom . import board\nfrom .rules import move\n",
        "games/board.py": "from games.rules import move\n",
        "games/rules.py": "this is not Python",
        "games/unused.py": "",
        "shop.py": "",
        "solve.sh": "exec python agent.py",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    played = {"type": "class", "path": {"a": "games.chess:Game"}, "tools": ["shop:buy"]}
    agent = {"type": "agent", "run": f"{sys.executable} nowhere.py; sh 'solve.sh' --fast"}
    for environment, names in (
        (played, {"games", "games.chess", "games.board", "games.rules", "shop"}),
        (agent, {"solve.sh"}),
    ):
        config = load_config({"environment": environment, "reward": [{"type": "environment"}]})
        assert code_of(config)["environment"].keys() == names and not code_of(config)["reward"]


@pytest.mark.slow
def test_dynamic_sampling_resumes_with_the_refills_it_had(tmp_path: Path) -> None:
    overrides = ("algorithm.name=dapo", "rollout.samples_per_prompt=2")
    whole, killed = (resumable(tmp_path, *overrides, name=name) for name in ("whole", "killed"))
    finish(whole)
    assert sum(column(whole, "train/refills")) > 0
    run_and_be_killed(killed, Kill(call=IN_UPDATE, number=7))
    finish(killed)
    assert_same_weights(killed, whole)
    assert column(killed, "train/refills") == column(whole, "train/refills")
    assert num_records(killed) == num_records(whole)


def test_a_step_trained_again_keeps_its_groups_under_another_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resumable(tmp_path, "algorithm.name=dapo", "rollout.samples_per_prompt=2", name="killed")
    run_and_be_killed(config, Kill(call=IN_UPDATE, number=7))
    with Journal(config.run.dir / "journal") as journal:
        before = journal.trained()
    monkeypatch.setattr("rollcall.loop.group_maker.has_signal", lambda group: True)
    finish(config)
    with Journal(config.run.dir / "journal") as journal:
        after = journal.trained()
    assert len(after) > len(before) > 0 and all(after[step] == before[step] for step in before)


@pytest.mark.slow
def test_a_finished_run_started_again_changes_nothing(uninterrupted: Config) -> None:
    config = beside(uninterrupted, "again")
    first = finish(config)
    before, rows_before = contents(config), read_rows(config.run.dir / "metrics.jsonl")
    second = finish(config)
    after = contents(config)
    assert after.keys() == before.keys()
    rewritten = {"summary.json", "metrics.jsonl", "learning_curve.png", "events.jsonl"}
    assert {path.name for path in before if before[path] != after[path]} <= rewritten
    assert read_rows(config.run.dir / "metrics.jsonl") == rows_before
    assert_complete(config)
    unlike = {name for name in first if first[name] != second[name]}
    assert unlike <= {"seconds", "peak_memory_gib"}


def contents(config: Config) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(config.run.dir.rglob("*")) if path.is_file()}


@pytest.mark.slow  # test_run_dir.py has a finished run that goes on
def test_a_run_can_be_made_longer_when_it_is_resumed(uninterrupted: Config) -> None:
    config = beside(uninterrupted, "longer")
    finish(config)
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": STEPS + 2})})
    finish(longer)
    assert_complete(longer, steps=STEPS + 2)


def test_completions_of_a_group_that_was_not_finished_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("rollout.max_response_tokens=60", "trainer.steps=1", "trainer.save_every=0")
    whole, config = make_run(tmp_path, *sizes, name="whole"), make_run(tmp_path, *sizes)
    finish(whole)
    asked: list[int] = []
    submit = NativeEngine.submit

    def count(engine: NativeEngine, request: Request) -> None:
        asked.append(request.seed)
        submit(engine, request)

    def refuse(journal: Journal, group: Group, *, again: bool = False) -> None:
        raise RuntimeError("the power is cut")

    with monkeypatch.context() as cut:
        cut.setattr("rollcall.loop.group_maker.KEEP_EVERY_S", 0.0)
        cut.setattr(Journal, "append", refuse)
        with pytest.raises(RuntimeError, match="power"):
            finish(config)
    with Journal(config.run.dir / "journal") as journal:
        kept = {one.completions[0].seed for group in journal.read_attempts(1).values() for one in group.values()}
    assert kept, "no completion ended before its group: the test needs longer ones"
    monkeypatch.setattr(NativeEngine, "submit", count)
    finish(config)
    assert not kept & set(asked), "a finished completion was made again"
    for ours, theirs in zip(groups(config, 1).values(), groups(whole, 1).values(), strict=True):
        assert ours.scores == theirs.scores
        for one, other in zip(ours.completions, theirs.completions, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
