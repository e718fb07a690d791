"""Rollout and update as commands of their own, and the events that tell what a run does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import (
    IN_JOURNAL,
    Kill,
    column,
    finish,
    groups,
    letter_rows,
    make_run,
    num_records,
    run_and_be_killed,
    weights,
)
from typer.testing import CliRunner

from rollcall.base.errors import ConfigError
from rollcall.base.journal import Journal
from rollcall.cli.main import app
from rollcall.config import Config
from rollcall.loop.attempts import RunError
from rollcall.loop.phases import Bounds, Phase, Split
from rollcall.observe.events import StepPhase, read_phases
from rollcall.run.training import train

ROLLOUT, UPDATE = Bounds(phase=Phase.ROLLOUT), Bounds(phase=Phase.UPDATE)
STEPS = 4


def short_run(folder: Path, *overrides: str, name: str) -> Config:
    return make_run(folder, f"trainer.steps={STEPS}", "trainer.eval_every=2", *overrides, name=name, val=letter_rows(4))


def trained(config: Config) -> dict[int, tuple[int, ...]]:
    with Journal(config.run.dir / "journal") as journal:
        return {step: entry.draws for step, entry in journal.trained().items()}


def test_rollout_and_update_in_turn_give_what_both_gives(tmp_path: Path) -> None:
    both, turns = short_run(tmp_path, name="both"), short_run(tmp_path, name="turns")
    finish(both)
    for step in range(1, STEPS + 1):
        assert finish(turns, bounds=ROLLOUT)["groups"] == {step: 8}
        assert (turns.run.dir / "model").exists() is False
        assert finish(turns, bounds=UPDATE)["steps"] == step
    assert trained(turns) == trained(both)
    for step in range(1, STEPS + 1):
        ours, theirs = groups(turns, step), groups(both, step)
        assert ours.keys() == theirs.keys()
        for draw, group in ours.items():
            assert [each.token_ids.tolist() for each in group.completions] == [
                each.token_ids.tolist() for each in theirs[draw].completions
            ]
    for name in ("train/loss", "train/reward_mean", "eval/accuracy"):
        assert column(turns, name) == column(both, name)
    assert {name: tensor.tobytes() for name, tensor in weights(turns).items()} == {
        name: tensor.tobytes() for name, tensor in weights(both).items()
    }
    assert num_records(turns) == num_records(both)


@pytest.mark.parametrize("order", [pytest.param("in_order", marks=pytest.mark.slow), "as_completed"])
@pytest.mark.slow
def test_with_staleness_a_rollout_fills_several_steps_and_an_update_trains_them_all(tmp_path: Path, order: str) -> None:
    config = short_run(tmp_path, "trainer.staleness=2", f"trainer.order={order}", name="stale")
    ahead = {"in_order": [3, 4], "as_completed": [2, 4]}[order]
    for last in ahead:
        finish(config, bounds=ROLLOUT)
        assert finish(config, bounds=UPDATE)["steps"] == last
    assert sorted(draw for draws in trained(config).values() for draw in draws) == list(range(STEPS * 8))
    assert num_records(config) == STEPS * 8
    assert weights(config)


def test_a_rollout_does_not_generate_again_what_the_journal_has(tmp_path: Path) -> None:
    config = short_run(tmp_path, name="again")
    finish(config, bounds=ROLLOUT)
    assert finish(config, bounds=ROLLOUT)["groups"] == {1: 8}
    assert num_records(config) == 8


def test_a_rollout_with_nothing_to_generate_says_so_and_sends_nobody_to_an_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path, "trainer.steps=1")
    finish(config)
    assert train(config, bounds=ROLLOUT)["groups"] == {}
    said = capsys.readouterr().out
    assert "the only step is trained, so there is nothing to generate" in said and "--phase update" not in said


def test_an_update_without_a_complete_step_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    config = short_run(tmp_path, name="early")
    with pytest.raises(RunError, match=r"no complete step after step 0.*--phase rollout"):
        finish(config, bounds=UPDATE)
    run_and_be_killed(config, Kill(call=IN_JOURNAL, number=7))
    with pytest.raises(RunError, match="no complete step after step 0"):
        finish(config, bounds=UPDATE)
    assert num_records(config) == 7 and trained(config) == {}
    assert finish(config)["steps"] == STEPS
    assert num_records(config) == STEPS * 8


def test_an_update_saves_where_the_journal_ends(tmp_path: Path) -> None:
    config = short_run(tmp_path, "trainer.save_every=0", name="saved")
    finish(config, bounds=ROLLOUT)
    finish(config, bounds=UPDATE)
    assert [path.name for path in (config.run.dir / "checkpoints").iterdir()] == ["step-000001"]


def test_the_eval_split_only_evaluates_the_newest_checkpoint(tmp_path: Path) -> None:
    config = short_run(tmp_path, name="eval")
    run_and_be_killed(config, Kill(call=IN_JOURNAL, number=9 * 3 + 4))
    before = num_records(config)
    result = finish(config, bounds=Bounds(phase=Phase.ROLLOUT, split=Split.EVAL))
    assert result["step"] == 2 and 0 <= result["eval"]["accuracy"] <= 1
    assert num_records(config) == before
    assert (config.run.dir / "samples" / "val-000002.jsonl").exists()


def test_splits_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--split eval works only with --phase rollout"):
        Bounds(phase=Phase.UPDATE, split=Split.EVAL)
    with pytest.raises(ConfigError, match="data.val is not set"):
        finish(make_run(tmp_path), bounds=Bounds(phase=Phase.ROLLOUT, split=Split.EVAL))


@pytest.mark.slow
def test_the_command_line_has_the_phases(tmp_path: Path) -> None:
    config = short_run(tmp_path, name="run")
    options = ["--json", str(tmp_path / "run.yaml"), "trainer.steps=1", "--eval-interval", "1"]
    rollout = CliRunner().invoke(app, ["train", "--phase", "rollout", *options])
    assert rollout.exit_code == 0 and json.loads(rollout.stdout)["groups"] == {"1": 8}
    update = CliRunner().invoke(app, ["train", "--phase", "update", *options])
    assert update.exit_code == 0 and json.loads(update.stdout)["steps"] == 1
    assert len(column(config, "eval/accuracy")) == 2


def test_every_phase_of_a_step_is_an_event(tmp_path: Path) -> None:
    config = short_run(tmp_path, name="events")
    finish(config)
    phases = read_phases(config.run.dir)
    assert {event.phase for event in phases} == {phase.value for phase in StepPhase}
    assert all(event.end_s is not None and event.end_s >= event.start_s for event in phases)
    assert all(event.duration_s is not None and event.duration_s >= 0 for event in phases)
    rollouts = [event for event in phases if event.phase == StepPhase.ROLLOUT]
    assert [event.step for event in rollouts] == list(range(1, STEPS + 1))
    assert {event.waited_for for event in rollouts} == {"local"}
    decisions = {event.step: event.result for event in phases if event.phase == StepPhase.EVALUATION_DECISION}
    assert decisions == {1: "not due", 2: "due", 3: "not due", 4: "due"}


def test_a_killed_run_leaves_the_phase_it_was_in_open_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    config = short_run(tmp_path, name="killed")
    run_and_be_killed(config, Kill(call=IN_JOURNAL, number=12))
    last = read_phases(config.run.dir)[-1]
    assert (last.phase, last.step, last.end_s) == (StepPhase.ROLLOUT, 2, None)
    with (config.run.dir / "events.jsonl").open("a") as file:
        file.write('{"phase": "upd')
    assert read_phases(config.run.dir)[-1] == last
    finish(config)
    lines = (config.run.dir / "events.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)
