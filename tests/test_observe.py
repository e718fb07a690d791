"""Metrics, sinks, console, learning curve, samples and summary: what a run shows and leaves behind."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from scored import make_group

from rollcall.base.screen import Screen
from rollcall.base.types import Score
from rollcall.config import Config, parse_config
from rollcall.loop.evaluate import summarize
from rollcall.loop.step_metrics import peak_memory_gib
from rollcall.observe.console import Console, LineConsole, LiveConsole, make_console
from rollcall.observe.headline import ACCURACY, GRADED, headline_of, is_graded
from rollcall.observe.metrics import METRICS, check_names
from rollcall.observe.progress import Progress, format_duration
from rollcall.observe.samples import sample_rows, write_samples
from rollcall.observe.sinks import JsonlSink, WandbSink, make_sinks, read_rows
from rollcall.view.curves import learning_curve
from rollcall.view.growing import MetricsTable
from rollcall.view.summary import ADVANTAGE, build_summary, finished, say_result, write_summary


def make_config(*loggers: str) -> Config:
    return parse_config({"run": {"name": "demo"}, "trainer": {"loggers": list(loggers)}})


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"time": 0.0, **row}) + "\n" for row in rows))
    return path


# Names


def test_documented_names_pass_and_others_are_refused() -> None:
    check_names([name for name in METRICS if "<" not in name])
    check_names(["reward/exact", "reward_errors/my_module:score"])
    for name in ("train/reward_men", "loss", "train/", "reward/"):
        with pytest.raises(ValueError, match="not documented; add it to rollcall.observe.metrics.METRICS"):
            check_names([name])


# Sinks


def test_each_log_is_one_flushed_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=None)
    sink.log(1, {"train/loss": 0.1 + 0.2, "rollout/tokens": 7, "train/kl": float("nan")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
    row = json.loads(line)
    assert row.pop("time") > 1e9
    assert row == {"step": 1, "train/loss": 0.1 + 0.2, "rollout/tokens": 7, "train/kl": None}
    sink.close()


def test_a_full_disk_is_said_with_the_file_and_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcall.base.patience.DEADLINE_S", 0)
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=None)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("rollcall.observe.sinks.AppendFile.append", Mock(side_effect=full))
    with pytest.raises(ValueError, match=r"metrics.jsonl: cannot write the metrics of step 3: No space left"):
        sink.log(3, {"train/loss": 1.0})
    sink.close()


def test_resuming_drops_later_rows_and_a_torn_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path / "metrics.jsonl", [{"step": step, "train/loss": step} for step in range(6)])
    with path.open("a") as file:
        file.write('{"step": 6, "trai')
    with caplog.at_level(logging.WARNING):
        sink = JsonlSink(path, resume_step=3)
    sink.log(4, {"train/loss": 40.0})
    sink.close()
    assert [(row["step"], row["train/loss"]) for row in read_rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40.0)]
    assert "line 7 is not a row" in caplog.text


def test_a_run_without_a_checkpoint_starts_its_rows_anew(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 1.0}])
    JsonlSink(path, resume_step=None).close()
    assert read_rows(path) == []


def test_rows_of_the_same_step_are_merged(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.jsonl", [{"step": 2, "train/loss": 1.0}, {"step": 2, "eval/accuracy": 0.5}])
    (row,) = read_rows(path)
    assert row["train/loss"] == 1.0 and row["eval/accuracy"] == 0.5


def test_the_run_files_sinks_all_get_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3, 4))):  # the second run replays 2 and 3
        sinks = make_sinks(make_config("tensorboard"), tmp_path, resume_step)
        for step in steps:
            for sink in sinks:
                sink.log(step, {"train/loss": float(step if resume_step is None else step * 10)})
        for sink in sinks:
            sink.close()
    assert [row["train/loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1.0, 20.0, 30.0, 40.0]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1), (2, 20), (3, 30), (4, 40)]


def test_the_sinks_refuse_an_undocumented_name(tmp_path: Path) -> None:
    (sink,) = make_sinks(make_config("console"), tmp_path, None)
    with pytest.raises(ValueError, match="train/los"):
        sink.log(1, {"train/los": 1.0})
    sink.close()
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_missing_tensorboard_is_said_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING):
        assert len(make_sinks(make_config("tensorboard"), tmp_path, None)) == 1
    assert "pip install tensorboard" in caplog.text


class FakeWandb(types.ModuleType):
    """Records calls; fails to start when told so."""

    def __init__(self, *, fail: Exception | None = None) -> None:
        super().__init__("wandb")
        self.fail = fail
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.step_metrics: list[tuple[str, str | None]] = []
        self.finished = 0

    def init(self, **kwargs: Any) -> FakeWandb:
        if self.fail:
            raise self.fail
        self.inits.append(kwargs)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.step_metrics.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_keeps_its_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (5, 3):  # a replay goes backwards
        sink = make_sinks(make_config("wandb"), tmp_path, None)[-1]
        sink.log(step, {"train/loss": 1.0})
        sink.close()
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"] and wandb.inits[0]["resume"] == "allow"
    assert wandb.inits[0]["name"] == "demo" and wandb.inits[0]["config"]["algorithm"]["name"] == "grpo"
    assert wandb.rows == [{"step": 5, "train/loss": 1.0}, {"step": 3, "train/loss": 1.0}]
    assert ("*", "step") in wandb.step_metrics and wandb.finished == 2


def test_a_missing_wandb_is_said_with_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        make_sinks(make_config("wandb"), tmp_path, None)


def test_a_failed_wandb_login_never_shows_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail=RuntimeError("bad key 0123456789abcdef")))
    with pytest.raises(ValueError, match=r"wandb could not start \(RuntimeError\); run `wandb login`") as caught:
        WandbSink(make_config("wandb"), tmp_path)
    assert "0123456789" not in str(caught.value) and caught.value.__suppress_context__


# Console


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of a progress's own."""
    clock = Clock()
    monkeypatch.setattr("rollcall.observe.progress.time", clock)
    return clock


def test_progress_shows_first_and_last_accuracy_and_the_time_left(clock: Clock) -> None:
    progress = Progress(name="demo", num_steps=100, start_step=20)
    assert progress.left_s is None
    progress.update(20, {"eval/accuracy": 0.25})
    for step in range(21, 31):
        clock.now += 3.0
        progress.update(step, {"train/reward_mean": 0.5, "rollout/tokens_per_s": 12345.6, "time/step_s": 2.9})
    progress.update(30, {"eval/accuracy": 0.75})
    assert dict(progress.fields()) == {
        "step": "30/100", "accuracy": "0.250 → 0.750", "reward": "0.500", "tok/s": "12,346", "s/step": "2.90",
        "left": "3m 30s",
    }  # fmt: skip


def test_a_restart_goes_back_to_its_step_and_measures_the_pace_again(clock: Clock) -> None:
    progress = Progress(name="demo", num_steps=100)
    progress.update(0, {"eval/accuracy": 0.1})
    for step in range(1, 80):
        clock.now += 1.0
        progress.update(step, {"time/step_s": 1.0, "train/reward_mean": 0.5})
    progress.update(79, {"eval/accuracy": 0.9})
    progress.restart(6)
    clock.now += 600.0  # new processes
    assert dict(progress.fields()) == {"step": "6/100", "accuracy": "0.100 → 0.100", "elapsed": "11m 19s"}
    clock.now += 900.0  # the first step compiles
    progress.update(7, {"time/step_s": 900.0})
    assert progress.left_s is None and dict(progress.fields())["step"] == "7/100"
    clock.now += 2.0
    progress.update(8, {"time/step_s": 2.0})
    assert progress.left_s == 2.0 * 92


def test_graded_rewards_show_the_held_out_reward_from_the_first_evaluation_that_has_one() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.0, "eval/reward_mean": 0.0, GRADED: 0.0}]
    progress = Progress(name="demo", num_steps=40, rows=rows)
    assert dict(progress.fields())["accuracy"] == "0.000 → 0.000"
    progress.update(20, {"eval/accuracy": 0.0, "eval/reward_mean": 0.3, GRADED: 0.8})
    progress.update(40, {"eval/accuracy": 0.0, "eval/reward_mean": 1.0, GRADED: 0.0})
    assert dict(progress.fields())["held-out reward"] == "0.000 → 1.000"
    assert headline_of(rows) is ACCURACY


@pytest.mark.parametrize(
    ("value", "parts", "graded"),
    [(1.0, {"a": 1.0}, False), (0.5, {"a": 1.0}, False), (0.5, {"a": 0.5}, True), (1.1, {"a": 1.0, "b": 0.1}, True),
     (1.0, {"a": 0.0, "b": 1.0}, False)],
)  # fmt: skip
def test_a_reward_is_graded_if_it_is_neither_0_nor_1(value: float, parts: dict[str, float], graded: bool) -> None:
    assert is_graded(Score(value=value, parts=parts, errors={})) is graded


def test_lines_come_every_few_seconds_and_for_evaluations_and_the_last_step(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    console = LineConsole(Progress(name="demo", num_steps=40))
    for step in range(41):
        console.log(step, {"train/reward_mean": 0.5} | ({"eval/accuracy": 0.1} if step == 8 else {}))
        clock.now += 1.0
    console.close()
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [0, 5, 8, 13, 18, 23, 28, 33, 38, 40]


def test_a_log_says_what_takes_long_and_not_what_is_soon_over(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with LineConsole(Progress(name="demo", num_steps=2)) as console:
        console.phase("loading")
        clock.now += 3.0
        printed = ""
        while not printed:
            time.sleep(0.05)
            printed = capsys.readouterr().out
        console.phase("rollout of step 1")
        clock.now += 1.0
        time.sleep(1.1)  # the watcher looks twice
    assert printed + capsys.readouterr().out == "loading: 3s so far\n"


def test_a_file_gets_plain_lines_and_samples_without_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with make_console(Progress(name="demo", num_steps=10)) as console:
        console.log(1, {"train/reward_mean": 0.5})
        console.note("resumed from step 0 [see docs]")
        console.show_samples("before training", [("2+3=", "[bold]5\x1b[31m", "5", 1.0), ("1+1=", "9\ud800", "2", 0.0)])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "step 1/10" in text and "resumed from step 0 [see docs]" in text
    assert "before training" in text and "[bold]5" in text and "1.00" in text and "0.00" in text


def test_a_log_without_utf8_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    console = LineConsole(Progress(name="demo", num_steps=2))
    console.log(1, {"eval/accuracy": 0.5})
    console.show_samples("samples", [("é", "ü", "→", 1.0)])
    assert b"0.500 ? 0.500" in raw.getvalue()


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with make_console(Progress(name="demo", num_steps=10), quiet=True) as console:
        assert type(console) is Console
        console.log(1, {"train/reward_mean": 0.5})
        console.note("hello")
        console.show_samples("samples", [("a", "b", "c", 1.0)])
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


LIVE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from rollcall.observe.console import LiveConsole, make_console
from rollcall.observe.logs import ChildPrints
from rollcall.observe.progress import Progress
try:
    with make_console(Progress(name="demo", num_steps=50)) as console:
        assert isinstance(console, LiveConsole)
        console.log(7, {"train/reward_mean": 0.5, "eval/accuracy": 0.25})
        console.show_samples("some answers", [("2+3=", "5", "5", 1.0)])
        print("a print of a library")
        fd = ChildPrints().fd
        subprocess.run([sys.executable, "-S", "-c", "print('a print of a reward')"], stdout=fd, stderr=fd)
        time.sleep(0.6)
        print("READY", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
    sys.exit(7)
"""


def test_the_live_panel_passes_ctrl_c_on_and_gives_the_terminal_back() -> None:
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE], stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    )  # fmt: skip
    os.close(other)
    seen = b""
    while b"READY" not in seen:
        seen += os.read(main, 4096)
    while seen.count("╰".encode(), seen.index(b"READY")) < 2:  # the panel below it, and once more: the child sleeps
        seen += os.read(main, 4096)
    os.write(main, b"\x03")  # as the keyboard does it
    while b"INTERRUPTED" not in seen:
        seen += os.read(main, 4096)
    assert process.wait() == 7
    os.close(main)
    assert b"7/50" in seen and b"some answers" in seen
    screen = _screen(seen.decode(), height=30)
    assert screen[-4:] == [
        "a print of a library", "a print of a reward", "READY", "INTERRUPTED",
    ]  # fmt: skip
    assert not any(set(line) & set("╭╮╰╯│^") for line in screen), "a piece of the panel is left"
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize("width", [24, 40, 80, 120])
def test_the_live_panel_keeps_a_label_with_its_value(width: int) -> None:
    progress = Progress(name="demo", num_steps=300)
    progress.update(77, {"train/reward_mean": 0.88, "rollout/tokens_per_s": 1316.0, "time/step_s": 2.34})
    out = io.StringIO()
    rich = Screen(file=out, width=width, force_terminal=True, color_system=None)
    with LiveConsole(progress, rich=rich):
        pass
    lines = out.getvalue().splitlines()
    for field in ("step 77/300", "reward 0.880", "tok/s 1,316", "s/step 2.34"):
        assert any(field in line for line in lines), lines


def _screen(text: str, *, height: int) -> list[str]:
    """What a terminal shows after this: enough of one for what rich writes."""
    lines, row, column = [""] * height * 10, 0, 0
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x1b]", text):
        if part == "\n":
            row += 1
        elif part == "\r":
            column = 0
        elif part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[row] = ""
        elif len(part) == 1:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (185, "3m 05s"), (7800, "2h 10m"), (273600, "3d 04h")]
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# Learning curve


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [1, 40])
def test_the_curve_is_a_png_of_the_expected_size(tmp_path: Path, scale: float, num_steps: int) -> None:
    rows = [{"step": step, "train/reward_mean": scale * step / num_steps} for step in range(1, num_steps + 1)]
    first = {"step": 0, "eval/accuracy": 0.0, "eval/reward_mean": 0.2, GRADED: 0.5 if scale > 1 else 0.0}
    path = write_rows(tmp_path / "metrics.jsonl", [first, *rows])
    out = learning_curve(MetricsTable(path.parent), tmp_path / "plots" / "curve.png", name="demo")
    assert out is not None
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1350, 750)


def test_the_curve_shows_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, buffer, format: figures.append(figure))
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 20, "eval/accuracy": 0.75, "train/reward_mean": 0.3}]
    path = write_rows(tmp_path / "metrics.jsonl", rows)
    learning_curve(MetricsTable(path.parent), tmp_path / "curve.png", name="demo")
    held_out, reward = figures[0].axes
    assert held_out.get_title(loc="left") == "held-out accuracy: 0.250 to 0.750"  # type: ignore[call-arg]
    assert held_out.lines[0].get_xydata().tolist() == [[0, 0.25], [20, 0.75]]  # type: ignore[union-attr]
    assert reward.lines[0].get_xydata().tolist() == [[20, 0.3]]  # type: ignore[union-attr]
    assert figures[0].get_suptitle() == "demo"


def test_without_matplotlib_or_without_data_there_is_a_warning_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "metrics.jsonl", [])
    with caplog.at_level(logging.WARNING):
        assert learning_curve(MetricsTable(tmp_path), tmp_path / "curve.png", name="demo") is None
        write_rows(path, [{"step": 1, "train/reward_mean": 0.5}])
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert learning_curve(MetricsTable(tmp_path), tmp_path / "curve.png", name="demo") is None
    assert "no evaluation and no reward yet" in caplog.text and "pip install matplotlib" in caplog.text
    assert not (tmp_path / "curve.png").exists()


# Summary and samples


def test_the_summary_covers_the_whole_run_also_before_a_resume(tmp_path: Path) -> None:
    step = {"rollout/tokens": 100, "train/tokens": 150, "perf/train_tokens_per_s": 50.0, "reward_errors/math": 1}
    path = write_rows(
        tmp_path / "metrics.jsonl",
        [
            {"step": 0, "eval/accuracy": 0.2, "time/eval_s": 1.0},
            {"step": 1, **step, "time/step_s": 4.0, "rollout/tokens_per_s": 10.0, "rollout/logprob_mismatch": 0.1},
            {
                "step": 2,
                **step,
                "time/step_s": 2.0,
                "rollout/tokens_per_s": 30.0,
                "eval/accuracy": 0.9,
                "time/save_s": 0.5,
            },
            {"step": 3, **step, "time/step_s": 0.1, "rollout/tokens_per_s": 0.0, "rollout/groups_from_journal": 48},
            {"step": 4, **step, "time/step_s": 3.0, "rollout/tokens_per_s": 20.0, "rollout/logprob_mismatch": 0.3},
            {"step": 4, "eval/accuracy": 0.8, "perf/peak_memory_gib": 99.5, "reward_errors/exact": 2, "train/kl": None},
        ],
    )
    summary = build_summary(MetricsTable(path.parent), seconds=10.0, resume_step=2, run="demo")
    assert summary["steps"] == 4
    assert summary["seconds"] == 1.0 + 4.0 + 2.0 + 0.5 + 10.0
    assert summary["eval"]["accuracy"] == {"first": 0.2, "last": 0.8, "best": 0.9}
    assert summary["headline"] == "eval/accuracy"
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (400, 600)
    assert summary["rollout_tokens_per_s"] == 20.0 and summary["step_s"] == 3.0
    assert summary["train_tokens_per_s"] == 50.0
    assert summary["logprob_mismatch"] == pytest.approx(0.2)
    assert summary["peak_memory_gib"] == 99.5
    assert summary["reward_errors"] == 6 and summary["run"] == "demo"
    assert build_summary(MetricsTable(path.parent), seconds=10.0, resume_step=None)["seconds"] == 10.0


def test_the_end_of_a_run_says_how_many_steps_taught_nothing_and_what_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told(advantages: list[float]) -> str:
        rows = [{"step": step, ADVANTAGE: value} for step, value in enumerate(advantages, start=1)]
        write_rows(tmp_path / "metrics.jsonl", rows)
        summary = build_summary(MetricsTable(tmp_path), seconds=1.0, resume_step=10)
        summary |= {"reward_failures": []}
        caplog.clear()
        say_result(tmp_path, summary, None)
        assert all(record.message in finished(tmp_path, summary) for record in caplog.records)
        return caplog.text

    assert "11 of 12 steps had no signal" in told([0.0] * 11 + [0.5])
    assert "rollout.samples_per_prompt" in caplog.text and "rollcall reward test" in caplog.text
    assert "no step had a signal, so nothing was learned in 12 steps" in told([0.0] * 12)
    assert told([0.0] + [0.5] * 11) == "", "one step in twelve is nothing to worry about"


def test_a_summary_without_rows_says_none_and_writes_valid_json(tmp_path: Path) -> None:
    summary = build_summary(MetricsTable(tmp_path), seconds=1.0, resume_step=None, model=tmp_path)
    assert summary["eval"]["accuracy"] == {"first": None, "last": None, "best": None}
    assert summary["step_s"] is None and summary["steps"] == 0
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text())["model"] == str(tmp_path)


def test_peak_memory_is_that_of_this_process() -> None:
    before = peak_memory_gib()
    assert 0.01 < before < 64
    ballast = bytearray(os.urandom(1)) * (300 * 2**20)
    assert peak_memory_gib() >= before and len(ballast) > 0


def test_samples_are_readable_text(tmp_path: Path) -> None:
    groups = [make_group(0, num_completions=2), make_group(1, num_completions=1)]
    path = write_samples(tmp_path / "samples", step=20, split="val", groups=groups)
    assert path == tmp_path / "samples" / "val-000020.jsonl"
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 3 and "é" in text
    assert rows[1]["prompt"] == "2+3=" and rows[1]["answer"] == "5" and rows[1]["reward"] == 1.1
    assert rows[1]["completion"].startswith("answer 1 é") and rows[1]["errors"] == {"regex": "timed out"}
    assert rows[1]["finish"] == "length" and rows[1]["num_tokens"] == 5
    assert sample_rows(groups, limit=1) == [("2+3=", groups[0].completions[0].text, "5", 0.1)]


def test_a_sample_shows_what_the_user_says_and_not_the_chat_template() -> None:
    said = [
        {"role": "system", "content": "You add."}, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+3?"},
    ]  # fmt: skip
    group = make_group(0, num_completions=1)
    prompt = replace(group.prompt, text="<|im_start|>system\nYou add.<|im_end|>...", metadata={"prompt_messages": said})
    ((shown, *_),) = sample_rows([replace(group, prompt=prompt)], limit=1)
    assert shown == "And 2+3?"


def test_an_evaluation_that_could_not_be_scored_says_so_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = LineConsole(Progress(name="demo", num_steps=2))
    console.log(0, {"eval/accuracy": 0.0, "eval/reward_mean": 0.0, "eval/completions": 8.0, "eval/reward_errors": 8.0})
    assert "eval reward errors 8/8" in capsys.readouterr().out
    console.log(1, {"eval/accuracy": 0.5, "eval/reward_mean": 0.5, "eval/completions": 8.0, "eval/reward_errors": 0.0})
    assert "errors" not in capsys.readouterr().out


def test_the_completions_of_an_evaluation_that_no_reward_scored_are_counted() -> None:
    group = make_group(0)
    failed = replace(group.scores[0], errors={"exact": "raised: no"})
    scores = [failed, *(replace(score, errors={}) for score in group.scores[1:])]
    metrics = summarize([replace(group, scores=scores)], first_reward=next(iter(failed.parts)), threshold=1.0).metrics()
    assert (metrics["eval/reward_errors"], metrics["eval/completions"]) == (1.0, len(scores))
