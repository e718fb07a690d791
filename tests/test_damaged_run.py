"""Run directories that something has damaged or forged: status, recover, eval and a resume name the file, or go on without it."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import finish, make_run
from typer.testing import CliRunner

from rollcall.base.errors import ConfigError, JournalError
from rollcall.base.group_record import MAGIC
from rollcall.base.journal import Journal, inspect
from rollcall.base.lease import read_holder
from rollcall.cli.main import app
from rollcall.config import Config, load_config
from rollcall.loop.supply import Cursor
from rollcall.observe.events import read_phases
from rollcall.run.evaluation import plan_evaluation
from rollcall.view.audit import audit


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(make_run(folder, "trainer.steps=2", "trainer.save_every=1", "data.prompts_per_step=2"))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(whole / "run", tmp_path / "run")
    yield tmp_path / "run"


def again(whole: Path, run: Path) -> Config:
    """The same run, one step longer, in the copy."""
    return load_config(whole / "run.yaml", [f"run.dir={run}", "trainer.steps=3", "data.prompts_per_step=2"])


def add_line(path: Path, line: bytes) -> None:
    path.write_bytes(path.read_bytes() + line + b"\n")


def test_a_byte_that_is_no_text_in_the_metrics_is_named_and_the_run_goes_on(
    whole: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_line(run / "metrics.jsonl", b'{"step": 2, "x": "\xff"}')
    assert finish(again(whole, run))["steps"] == 3
    assert "metrics.jsonl, line" in caplog.text and "is not a row of metrics and is skipped" in caplog.text


@pytest.mark.parametrize("line", [b'{"phase": "sync", "step": 1, "sta', b"\0" * 40])
def test_a_torn_event_is_left_out(run: Path, line: bytes) -> None:
    before = read_phases(run)
    add_line(run / "events.jsonl", line)
    assert read_phases(run) == before and before
    result = CliRunner().invoke(app, ["status", str(run)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "line", [b"{}", b'{"step": 1, "draws": "ab", "version": 1}', b'{"step": 1, "draws": [-1], "version": 1}']
)
def test_a_forged_trained_step_is_named_and_can_be_set_aside(run: Path, line: bytes) -> None:
    path = run / "journal" / "trained.jsonl"
    before = path.read_bytes()
    add_line(path, line)
    with Journal(run / "journal") as journal, pytest.raises(JournalError, match=r"trained\.jsonl, line 3 is not a"):
        journal.trained()
    assert [torn.path for torn in audit(run).torn] == [path]
    assert CliRunner().invoke(app, ["recover", str(run), "--repair"]).exit_code == 0
    assert path.read_bytes() == before


def test_a_draw_far_beyond_all_others_is_damage_and_not_counted_up_to(run: Path) -> None:
    add_line(run / "journal" / "trained.jsonl", b'{"step": 9, "draws": [1000000000000], "version": 9}')
    with pytest.raises(
        ValueError, match=r"trained\.jsonl names draw 1000000000000, but the run has only 5 trained draws"
    ):
        audit(run)


def test_a_forged_record_whose_checksum_holds_is_skipped_and_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "journal" / "000001.groups"
    with Journal(run / "journal") as journal:
        before = [group.draw for group in journal.read(1)]
        for header in (b"[]", b'{"draw": 0}', b'{"draw": "x", "step": 1}', b"[" * 100_000):
            payload = struct.pack("<I", len(header)) + header
            record = struct.pack("<8sQI", MAGIC, len(payload), zlib.crc32(payload)) + payload
            path.write_bytes(path.read_bytes() + record)
        assert [group.draw for group in journal.read(1)] == before
    assert "000001.groups: a record is not a group" in caplog.text
    assert inspect(run / "journal")[0].num_bad_bytes


@pytest.mark.parametrize("text", ["{", "[]", "a: &a [*a]", "run: {seed: x}", "- " * 3000, "\0"])
def test_a_damaged_run_file_is_named_by_train_and_eval_and_recover_does_without(
    whole: Path, run: Path, text: str
) -> None:
    (run / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run/run\.yaml.*(.|\n)*records this run's settings; restore it"):
        finish(again(whole, run))
    with pytest.raises(ConfigError, match=r"run/run\.yaml"):
        plan_evaluation(run, overrides=[], data=None, samples=None, temperature=None, max_prompts=None)
    assert CliRunner().invoke(app, ["recover", str(run)]).exit_code == 0


def test_a_state_without_the_next_draw_is_named() -> None:
    with pytest.raises(ValueError, match="step-2: its state does not contain the next draw"):
        Cursor.of({"next_draw": "x"}, where="step-2")


def test_a_forged_lease_says_nothing_of_any_process(run: Path) -> None:
    fields = {
        "owner": "x",
        "host": "h",
        "pid": "../..",
        "place": "p",
        "process_start": 1,
        "since": "s",
        "counter": "3",
        "released": False,
    }
    (run.parent / ".run.lease-9").write_text(json.dumps(fields))
    holder = read_holder(run)
    assert holder is not None and (holder.host, holder.pid, holder.is_gone) == ("unknown", 0, False)
