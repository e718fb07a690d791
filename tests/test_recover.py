"""`rollcall recover`, `rollcall status RUN_DIR` and the auditor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import IN_JOURNAL, IN_SAVE_WRITE, Kill, finish, make_run, num_records, run_and_be_killed
from scored import make_group
from typer.testing import CliRunner

from rollcall.base.errors import ConfigError
from rollcall.base.journal import Journal
from rollcall.base.lease import hold
from rollcall.cli.main import app
from rollcall.config import Config
from rollcall.observe.events import PhaseEvent
from rollcall.view.audit import audit
from rollcall.view.recover import look, repair


def command(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Torn in its fourth step, after 7 of 8 groups; the checkpoint is of step 2."""
    config = make_run(tmp_path_factory.mktemp("recover"), name="killed")
    run_and_be_killed(config, Kill(call=IN_JOURNAL, number=3 * 9 + 8, when="torn"))
    return config


def a_copy(killed: Config, name: str) -> Config:
    folder = killed.run.dir.with_name(name)
    shutil.copytree(killed.run.dir, folder)
    return make_run(killed.run.dir.parent, name=name)


def test_a_killed_run_is_explained_without_touching_it(killed: Config) -> None:
    before = {path: path.stat().st_mtime_ns for path in killed.run.dir.rglob("*")}
    report = command("recover", killed.run.dir)
    assert report["last_checkpoint"] == 2
    assert report["finished_groups"] == {"3": 8, "4": 7} and report["replayed"] == [3]
    assert [Path(one["path"]).name for one in report["torn"]] == ["000004.groups"]
    assert report["lease"]["state"] == "gone"
    text = " ".join(report["next"])
    assert "checkpoint of step 2" in text and "train step 3 again" in text
    assert "take 7 finished groups of step 4 from the journal, generate the other 1" in text
    assert before == {path: path.stat().st_mtime_ns for path in killed.run.dir.rglob("*")}


def test_a_step_interrupted_at_ninety_percent_is_resumed_at_ninety_percent(killed: Config) -> None:
    config = a_copy(killed, "resumed")
    finish(config)
    assert num_records(config) == 48
    rows = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"]: row.get("rollout/groups_from_journal") for row in rows if "train/loss" in row}[4] == 7
    counted = audit(config.run.dir)
    assert counted.is_clean and counted.steps == 6


def test_repair_sets_torn_things_aside_and_deletes_nothing(killed: Config) -> None:
    config = a_copy(killed, "repaired")
    run_dir = config.run.dir
    (run_dir / "checkpoints" / ".tmp-step-000004-ab12cd34").mkdir()
    (run_dir / "checkpoints" / "step-000002" / "actor" / "optimizer.pt").write_bytes(b"short")
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"half": ')
    torn_bytes = (run_dir / "journal" / "000004.groups").read_bytes()
    with Journal(run_dir / "journal") as journal:
        journal.append_attempts(
            [(0, make_group(99, step=4, num_completions=1)), (1, make_group(99, step=4, num_completions=1))]
        )
    attempts = run_dir / "journal" / "000004.attempts"
    attempts.write_bytes(attempts.read_bytes()[:-1])
    report = command("recover", run_dir, "--repair")
    assert report["torn"] == [] and report["last_checkpoint"] is None
    aside = {Path(path).name: Path(path) for path in report["set_aside"]}
    assert sorted(aside) == [
        ".tmp-step-000004-ab12cd34",
        "000004.attempts",
        "000004.groups",
        "events.jsonl",
        "step-000002",
    ]
    assert all(run_dir / "set-aside" in path.parents for path in aside.values())
    assert aside["000004.groups"].read_bytes() == torn_bytes
    with Journal(run_dir / "journal") as journal:
        assert len(journal.read(4)) == 7 and list(journal.read_attempts(4)[99]) == [0]
    assert command("recover", run_dir, "--repair")["set_aside"] == []
    finish(config)
    assert num_records(config) == 48 and audit(run_dir).is_clean


def test_a_run_that_someone_has_is_explained_but_not_repaired(killed: Config) -> None:
    config = a_copy(killed, "held")
    with hold(config.run.dir):
        assert look(config.run.dir).next()[0].startswith("refuse")
        with pytest.raises(ConfigError, match="another process is training"):
            repair(config.run.dir)
    assert audit(config.run.dir).counts()["files_torn"] == 1


@pytest.mark.slow
def test_a_save_that_was_killed_leaves_a_folder_that_is_named(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    run_and_be_killed(config, Kill(call=IN_SAVE_WRITE, number=1, when="torn"))
    (torn,) = audit(config.run.dir).torn
    assert torn.path.name.startswith(".tmp-step-000002-")
    finish(config)
    assert audit(config.run.dir).is_clean


def test_status_shows_the_phases_of_a_run_and_who_has_it(killed: Config) -> None:
    shown = command("status", killed.run.dir)
    assert (shown["current"]["phase"], shown["current"]["step"]) == ("rollout", 4)
    assert shown["current"]["end_s"] is None and shown["lease"]["state"] == "gone"
    assert {event["step"] for event in shown["phases"]} == {2, 3, 4}
    plain = CliRunner().invoke(app, ["status", str(killed.run.dir)]).stdout
    assert (
        "last     killed; its controller ended during rollout of step 4 (begun at" in plain
        and "has ended" in plain
        and "waited for local" in plain
    )
    text = CliRunner().invoke(app, ["recover", str(killed.run.dir)]).stdout
    assert "the next `rollcall train` would" in text and "000004.groups" in text


def test_status_leaves_out_phases_that_took_no_time_and_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(phase: str, duration_s: float, result: str | None = None) -> PhaseEvent:
        return PhaseEvent(
            step=1,
            phase=phase,
            start_s=1.0,
            end_s=1.0 + duration_s,
            duration_s=duration_s,
            waited_for=None,
            result=result,
        )

    (tmp_path / "run.yaml").touch()
    phases = [event("sync", 0.001), event("rollout", 0.001, "8 groups, 8 from the journal"), event("update", 0.5)]
    monkeypatch.setattr("rollcall.observe.events.read_phases", lambda run_dir: phases)
    shown = CliRunner().invoke(app, ["status", str(tmp_path)]).stdout
    assert "sync" not in shown and "8 from the journal" in shown and "0.50 s" in shown


@pytest.mark.parametrize("folder", ["/proc/self", "."])
def test_status_of_a_folder_without_a_runs_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["status", folder])
    assert (
        done.exit_code == 1 and f"{folder} is not a run directory; pass the directory of a run (run.dir)" in done.stderr
    )


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["recover", str(tmp_path)])
    assert done.exit_code == 1 and "not a run directory" in done.stderr


def test_the_auditor_counts_what_went_wrong(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        for draw in (0, 1, 1, 3):
            journal.append(make_group(draw))
        journal.mark_trained(1, draws=[0, 1], version=1)
    with (tmp_path / "journal" / "trained.jsonl").open("a") as file:
        file.write('{"step": 2, "draws": [1, 3], "version": 2}\n{"step": 1, "draws": [0, 1], "version": 1}\n{"st')
    counted = audit(tmp_path)
    assert (counted.skipped, counted.trained_twice, counted.regenerated) == ((2,), (1,), (1,))
    assert counted.counts() == {
        "steps": 2,
        "prompts_skipped": 1,
        "trained_twice": 1,
        "groups_regenerated": 1,
        "episodes_regenerated": 0,
        "files_torn": 1,
    }


@pytest.mark.slow
def test_groups_left_out_for_want_of_signal_are_not_counted_as_skipped(tmp_path: Path) -> None:
    config = make_run(tmp_path, "algorithm.name=dapo", "rollout.samples_per_prompt=2", "trainer.steps=3")
    finish(config)
    with Journal(config.run.dir / "journal") as journal:
        trained = {draw for entry in journal.trained().values() for draw in entry.draws}
    assert trained != set(range(max(trained) + 1)), "nothing was left out, so this says nothing"
    assert audit(config.run.dir).is_clean


def test_a_folder_that_does_not_exist_is_not_called_a_run_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        audit(tmp_path / "nowhere")
