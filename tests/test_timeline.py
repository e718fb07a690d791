"""What every process of a run does and did: calls, live state, timeline, trace, logs."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from runs import finish, letter_rows, make_run
from typer.testing import CliRunner

from rollcall.cli.main import app
from rollcall.observe.calls import CALLS, BusySpans, CallFile, RecordedCall, read_calls
from rollcall.observe.events import Events, Mark, MarkKind, StepPhase, read_marks, read_phases
from rollcall.observe.live import LIVE, REWARDS, Live, Look, ProcessState, WorkState, read_live, write_live
from rollcall.observe.logs import MOST_BYTES, keep_logs, read_log
from rollcall.observe.recorder import Recorder
from rollcall.observe.timeline import (
    CONTROLLER,
    CONTROLLER_ENDED,
    WORKER_LOST,
    chrome_trace,
    idle_shares,
    read_timeline,
)
from rollcall.process.groups.pulse import NUM_CALLS, LogTail, Pulse, Reader, Seen
from rollcall.process.groups.sightings import HostClock, Lookout

ACTOR, ROLLOUT = "actor 0 @ node 0", "rollout 0 @ node 1"


def phase(
    name: StepPhase, step: int, start_s: float, end_s: float | None, waited_for: str | None = None
) -> dict[str, Any]:
    row = {"phase": name.value, "step": step, "start_s": start_s}
    return row if end_s is None else row | {"end_s": end_s, "duration_s": end_s - start_s, "waited_for": waited_for}


def write_events(run_dir: Path, *rows: dict[str, Any]) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def two_steps(run_dir: Path) -> None:
    """From second 100 on: a rollout, an update and a sync of one second each, twice; actor and rollout take turns."""
    calls = CallFile(run_dir)
    for step, start in ((1, 100.0), (2, 103.0)):
        write_events(
            run_dir,
            phase(StepPhase.ROLLOUT, step, start, start + 1, "rollout-0 on node 1"),
            phase(StepPhase.UPDATE, step, start + 1, start + 2),
            phase(StepPhase.SYNC, step, start + 2, start + 3),
        )
        own = {
            ACTOR: [
                RecordedCall("update", start + 1, start + 1.98),
                RecordedCall("send_weights", start + 2, start + 2.98),
            ],
            ROLLOUT: [
                RecordedCall("exchange", start, start + 1, 20),
                RecordedCall("use_weights", start + 2, start + 3),
            ],
        }
        calls.append(own, time_s=start + 3.5)
    calls.close()


# What a worker writes and its node reads


def test_a_pulse_tells_each_call_once_and_short_ones_of_a_method_as_one() -> None:
    pulse, reader = Pulse(0), Reader(os.getpid())
    for _ in range(5):
        with pulse.doing("exchange"):
            pass
    with pulse.doing("update"):
        seen = reader.look()
        assert seen.doing == "update" and seen.since_s is not None
        assert [(call.name, call.count) for call in seen.calls] == [("exchange", 5)]
    with pulse.doing("score"):
        assert [call.name for call in reader.look().calls] == ["update"]
    assert seen.memory_bytes > 0
    with pulse.doing("other"):
        assert [call.name for call in reader.look().calls] == ["score"]


def test_a_call_that_may_still_grow_is_told_later_and_counts_from_its_first_start() -> None:
    pulse, reader = Pulse(0), Reader(os.getpid())
    with pulse.doing("exchange"):
        first = reader.look()
    with pulse.doing("exchange"):
        seen = reader.look()
    assert first.since_s is not None and seen.calls == () and seen.doing == "exchange"
    assert seen.since_s == pytest.approx(first.since_s, abs=1e-3)


def test_a_ring_that_was_not_read_in_time_keeps_the_newest_calls() -> None:
    pulse, reader = Pulse(0), Reader(os.getpid())
    for number in range(NUM_CALLS + 50):
        with pulse.doing(f"m{number}"):
            pass
    with pulse.doing("now"):
        calls = reader.look().calls
    assert [call.name for call in calls] == [f"m{number}" for number in range(50, NUM_CALLS + 50)]


def test_what_a_killed_worker_did_is_read_after_its_death() -> None:
    ready, told = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # the child only writes its pulse and dies
        pulse = Pulse(7)
        with pulse.doing("build"):
            pass
        os.write(told[1], b"x")
        os.read(ready[0], 1)
        with pulse.doing("update"):
            pass
        os.write(told[1], b"x")
        os.read(ready[0], 1)
        os._exit(0)
    try:
        os.read(told[0], 1)
        reader = Reader(pid)
        reader.look()
        os.write(ready[1], b"x")
        os.read(told[0], 1)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        for end in (*ready, *told):
            os.close(end)
    seen = reader.look()
    assert not seen.is_alive and "update" in [call.name for call in seen.calls]


def test_a_clock_of_another_host_is_read_by_the_shortest_round_trip() -> None:
    clock = HostClock()
    clock.note(50.0, asked_s=1000.0, answered_s=1004.0)  # a slow answer says little
    clock.note(60.0, asked_s=1011.99, answered_s=1012.01)
    clock.note(70.0, asked_s=1020.0, answered_s=1025.0)
    assert clock.here(61.0) == pytest.approx(1013.0)


def test_without_a_round_trip_the_youngest_answer_counts() -> None:
    clock = HostClock()
    for there_s, heard_s in ((10.0, 110.4), (11.0, 111.02), (12.0, 112.3)):
        clock.note(there_s, asked_s=heard_s, answered_s=heard_s)
    assert clock.here(20.0) == pytest.approx(120.02)


def test_a_lost_worker_ends_the_call_it_was_in_and_is_told_once() -> None:
    lookout = Lookout()
    seen = Seen(is_alive=True, doing="exchange", since_s=5.0, calls=(RecordedCall("use_weights", 3.0, 4.0),))
    now = time.time()
    lookout.note("a", {1: seen}, there_s=6.0, asked_s=now, answered_s=now)
    lookout.lose(1, "its process is gone")
    lookout.lose(1, "its process is gone")
    found = lookout.take([10, 11])
    assert [(turn.rank, turn.is_lost) for turn in found.turns] == [(1, True)]
    assert [call.name for call in found.calls[1]] == ["use_weights", "exchange"]
    assert [one.lost for one in found.workers] == ["", "its process is gone"]
    lookout.regain(1, "process 12 on node 0")
    again = lookout.take([10, 12])
    assert [(turn.is_lost, turn.why) for turn in again.turns] == [(False, "process 12 on node 0")]
    assert not again.calls and again.workers[1].lost == ""


# What the controller writes


def test_calls_are_found_by_their_time_in_a_long_file(tmp_path: Path) -> None:
    calls = CallFile(tmp_path)
    for second in range(6_000):
        calls.append({ACTOR: [RecordedCall("update", second + 0.1, second + 0.6)]}, time_s=second + 1.0)
    calls.append({ACTOR: [RecordedCall("slow", 3_000.0, 5_999.0)]}, time_s=6_001.0)
    calls.close()
    assert (tmp_path / CALLS).stat().st_size > 1 << 18
    (found,) = read_calls(tmp_path, first_s=2_000.0, last_s=2_002.5).values()
    assert [round(call.start_s, 1) for call in found] == [2_000.1, 2_001.1, 2_002.1]
    assert len(read_calls(tmp_path)[ACTOR]) == 6_001
    assert read_calls(tmp_path, first_s=5_998.0)[ACTOR][-1].name == "slow"


def test_a_line_of_calls_that_was_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / CALLS).write_text('{"time": 5, "calls": {"b": [["x", -1, 1, 1]]}}\n{"time": 5, "calls": {"b": [["cut')
    assert read_calls(tmp_path) == {"b": [RecordedCall("x", 4, 5, 1)]}


def test_rewards_that_are_busy_with_short_pauses_are_one_entry() -> None:
    busy = BusySpans(REWARDS)
    for _ in range(3):
        busy.note(True)
        busy.note(True)
        busy.note(False)
    busy.note(True)
    assert [call.count for call in busy.take()] == [3] and busy.since_s is not None and busy.take() == []


def test_the_live_file_is_read_back_and_rubbish_is_none(tmp_path: Path) -> None:
    one = ProcessState(
        lane=ACTOR, roles={"actor": 0}, node=1, address="10.0.0.2", slots=(0, 1), pid=7, state=WorkState.BUSY, doing="update",
        since_s=12.5, num_calls=3, memory_bytes=1 << 30, device_bytes=5, why="", log="/x/worker.out",
    )  # fmt: skip
    live = Live(time_s=time.time(), host="h", is_over=False, processes=(one,), missing_nodes=(2,))
    write_live(tmp_path, live)
    assert read_live(tmp_path) == live and not live.is_stale
    (tmp_path / LIVE).write_text("{")
    assert read_live(tmp_path) is None


def test_a_recorder_writes_what_the_roles_tell_and_finishes_what_a_killed_one_left(tmp_path: Path) -> None:
    left = ProcessState(lane=ROLLOUT, state=WorkState.BUSY, doing="exchange", since_s=100.0)
    before = ProcessState(lane=CONTROLLER, state=WorkState.BUSY, doing="rollout of step 3", since_s=99.0)
    write_live(tmp_path, Live(time_s=101.0, host="h", is_over=False, processes=(before, left)))
    looks = [
        Look(
            processes=[ProcessState(lane=ACTOR, state=WorkState.BUSY, doing="build", since_s=200.0)],
            calls={ACTOR: [RecordedCall("listen", 199.0, 199.5)]},
            marks=[Mark(199.7, WORKER_LOST, MarkKind.FAULT, ROLLOUT, "its process is gone")],
            logs={ACTOR: b"loading\nHF_TOKEN=hf_secretsecret\n"},
        )
    ]
    events, rewards = Events(tmp_path), BusySpans(REWARDS)
    recorder = Recorder(tmp_path, events=events, look=lambda last: looks.pop() if looks else Look(), rewards=rewards)
    live = read_live(tmp_path)
    assert (
        live is not None and [one.lane for one in live.processes] == [CONTROLLER, REWARDS, ACTOR] and not live.is_over
    )
    recorder.close()
    events.close()
    over = read_live(tmp_path)
    assert over is not None and over.is_over
    assert read_calls(tmp_path) == {
        ROLLOUT: [RecordedCall("exchange", 100.0, 101.0)],
        ACTOR: [RecordedCall("listen", 199.0, 199.5)],
    }
    assert [(mark.at_s, mark.name) for mark in read_marks(tmp_path)] == [
        (101.0, CONTROLLER_ENDED),
        (199.7, WORKER_LOST),
    ]
    assert read_log(tmp_path, ACTOR) == ["loading", "HF_TOKEN=<redacted>"]


@pytest.mark.parametrize("ended", [False, True])
def test_a_controller_that_was_killed_after_its_last_look_ended_where_its_events_end(
    tmp_path: Path, ended: bool
) -> None:
    write_events(
        tmp_path,
        phase(StepPhase.ROLLOUT, 3, 99.0, 101.3),
        phase(StepPhase.UPDATE, 3, 101.5, 102.0 if ended else None),
    )
    before = ProcessState(lane=CONTROLLER, state=WorkState.BUSY, doing="rollout of step 3", since_s=99.0)
    write_live(tmp_path, Live(time_s=101.0, host="h", is_over=False, processes=(before,)))
    events = Events(tmp_path)
    Recorder(tmp_path, events=events, look=lambda last: Look(), rewards=BusySpans(REWARDS)).close()
    events.close()
    write_events(tmp_path, phase(StepPhase.UPDATE, 3, 9000.0, 9001.0))  # the resumed run, hours later
    found = read_timeline(tmp_path)
    assert [(span.start_s, span.end_s) for span in found.spans if span.name == StepPhase.UPDATE] == [
        (101.5, 102.0 if ended else 101.5),
        (9000.0, 9001.0),
    ]
    assert [(mark.at_s, mark.name, mark.note) for mark in found.marks] == [
        (102.0, CONTROLLER_ENDED, "") if ended else (101.5, CONTROLLER_ENDED, "in update of step 3")
    ]


def test_a_controller_that_was_killed_as_it_began_ended_after_it_began(tmp_path: Path) -> None:
    write_live(tmp_path, Live(time_s=101.0, host="h", is_over=False, processes=()))
    write_events(tmp_path, {"mark": "attempt 1 begins", "at_s": 101.1, "kind": "note", "lane": None, "note": ""})
    events = Events(tmp_path)
    Recorder(tmp_path, events=events, look=lambda last: Look(), rewards=BusySpans(REWARDS)).close()
    events.close()
    assert [(mark.at_s, mark.name) for mark in read_marks(tmp_path)] == [
        (101.1, "attempt 1 begins"),
        (101.1, CONTROLLER_ENDED),
    ]


def test_a_log_is_kept_short_and_only_its_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "worker.out"
    path.write_bytes(b"old\n")
    with path.open("ab") as out:
        kept = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            tail = LogTail(os.getpid())
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        assert tail.path == str(path) and b"old\n" in tail.read()
        out.write(b"new SOME_TOKEN=abcdefgh\nhalf")
        out.flush()
        assert tail.read() == b"new SOME_TOKEN=<redacted>\n"
        out.write(b" a line\n")
        out.flush()
        assert tail.read() == b"half a line\n"
    for number in range(3):
        keep_logs(tmp_path, {"../x": b"%d\n" % number + b"a line\n" * (MOST_BYTES // 10)})
    (log,) = (tmp_path / "logs").iterdir()
    assert log.stat().st_size <= MOST_BYTES and read_log(tmp_path, "../x", lines=2) == ["a line", "a line"]
    assert read_log(tmp_path, "nobody") == []


# What a reader makes of it


def test_a_timeline_has_a_lane_for_every_worker_with_its_calls_and_waits(tmp_path: Path) -> None:
    two_steps(tmp_path)
    found = read_timeline(tmp_path)
    assert found.lanes == (CONTROLLER, ACTOR, ROLLOUT)
    lanes: dict[str, list[Any]] = defaultdict(list)
    for span in found.spans:
        assert span.end_s >= span.start_s
        lanes[span.lane].append((span.name, span.kind, span.step))
    assert lanes[CONTROLLER] == [
        (name, kind, step)
        for step in (1, 2)
        for name, kind in (("rollout", "rollout"), ("update", "update"), ("sync", "sync"))
    ]
    one = [("update", "update"), ("send_weights", "sync"), ("wait", "wait")]
    assert [(name, kind) for name, kind, _ in lanes[ACTOR]] == [*one, *one[:2]]
    assert lanes[ROLLOUT][:3] == [("exchange", "rollout", 1), ("wait", "wait", 1), ("use_weights", "sync", 1)]
    notes = {(span.lane, span.name, span.step): span.note for span in found.spans}
    assert notes[CONTROLLER, "rollout", 1] == f"waited for {ROLLOUT}"
    assert notes[CONTROLLER, "update", 1] == f"waited for {ACTOR}"
    assert notes[CONTROLLER, "sync", 1] == f"waited for {ROLLOUT}"
    assert notes[ROLLOUT, "wait", 1] == f"during update of step 1, which waited for {ACTOR}"
    assert notes[ROLLOUT, "exchange", 1] == "20 calls"
    idle = idle_shares(found)
    assert idle[ACTOR] == pytest.approx(1 - 3.92 / 6, abs=0.01) and idle[ROLLOUT] == pytest.approx(1 / 3, abs=0.01)


def test_calls_that_overlap_by_the_error_of_a_clock_follow_each_other(tmp_path: Path) -> None:
    write_events(tmp_path, phase(StepPhase.ROLLOUT, 1, 100.0, 103.0))
    calls = CallFile(tmp_path)
    calls.append({ROLLOUT: [RecordedCall("build", 100.0, 101.2)]}, time_s=101.3)
    calls.append({ROLLOUT: [RecordedCall("use_weights", 101.0, 101.1)]}, time_s=101.4)
    calls.close()
    own = [span for span in read_timeline(tmp_path).spans if span.lane == ROLLOUT]
    assert [(span.name, span.start_s, span.end_s) for span in own] == [
        ("build", 100.0, pytest.approx(101.0)),
        ("use_weights", pytest.approx(101.0), pytest.approx(101.1)),
    ]


def test_a_timeline_of_some_steps_has_only_their_time(tmp_path: Path) -> None:
    two_steps(tmp_path)
    found = read_timeline(tmp_path, first_step=2, last_step=2)
    assert {span.step for span in found.spans if span.lane == CONTROLLER} == {2}
    assert min(span.start_s for span in found.spans if span.name == "update") == 104.0
    assert len(read_phases(tmp_path, first_step=2)) == 3 and len(read_phases(tmp_path, last_step=1)) == 3
    assert read_timeline(tmp_path, first_step=7).spans == ()


def test_a_lost_worker_is_a_mark_and_an_empty_seat_until_it_is_back(tmp_path: Path) -> None:
    two_steps(tmp_path)
    mark = {"mark": WORKER_LOST, "at_s": 101.2, "kind": "fault", "lane": ROLLOUT, "note": "its process is gone"}
    write_events(tmp_path, mark)
    found = read_timeline(tmp_path)
    assert [(one.name, one.kind, one.lane) for one in found.marks] == [(WORKER_LOST, "fault", ROLLOUT)]
    empty = next(span for span in found.spans if span.name == "lost")
    assert (empty.lane, empty.start_s, empty.end_s) == (ROLLOUT, 101.0, 102.0)


def test_a_directory_without_calls_has_the_controllers_lane(tmp_path: Path) -> None:
    assert read_timeline(tmp_path).spans == ()
    write_events(
        tmp_path,
        phase(StepPhase.ROLLOUT, 1, 100.0, None),
        phase(StepPhase.ROLLOUT, 1, 110.0, 111.0),
    )
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"phase": "rollout", "step": 2, "sta')  # cut by a kill
    found = read_timeline(tmp_path)
    assert found.lanes == (CONTROLLER,)
    assert [(span.start_s, span.end_s, span.note) for span in found.spans] == [
        (100.0, 110.0, "not ended"),
        (110.0, 111.0, ""),
    ]


def test_what_runs_now_is_in_the_timeline_too(tmp_path: Path) -> None:
    two_steps(tmp_path)
    write_events(tmp_path, phase(StepPhase.ROLLOUT, 3, 106.0, None))
    now = ProcessState(lane=ROLLOUT, state=WorkState.BUSY, doing="exchange", since_s=106.1)
    write_live(tmp_path, Live(time_s=108.0, host="h", is_over=False, processes=(now,)))
    found = read_timeline(tmp_path, first_step=3)
    assert [(span.lane, span.start_s, span.end_s) for span in found.spans] == [
        (CONTROLLER, 106.0, 108.0),
        (ROLLOUT, 106.1, 108.0),
    ]


def test_a_run_in_one_process_leaves_a_timeline_and_a_live_file(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=2", name="one", val=letter_rows(2))
    finish(config)
    found = read_timeline(config.run.dir)
    assert found.lanes == (CONTROLLER, REWARDS)
    assert {"rollout", "update", "sync", "save", "evaluate"} <= {span.kind for span in found.spans}
    assert [mark.name for mark in found.marks] == ["attempt 1 begins"]
    live = read_live(config.run.dir)
    assert live is not None and live.is_over and live.processes[0].pid == os.getpid()
    assert not list(config.run.dir.glob(".tmp-*"))


# The trace


def test_a_trace_has_the_shape_that_viewers_read(tmp_path: Path) -> None:
    two_steps(tmp_path)
    write_events(tmp_path, {"mark": "node back", "at_s": 102.0, "kind": "recovery", "lane": None, "note": "node 1"})
    trace = chrome_trace(read_timeline(tmp_path), name="one")
    events = trace["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [event for event in events if event["ph"] == "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed) and timed[0]["ts"] == 0
    assert all(isinstance(event["ts"], int) and event["ts"] >= 0 for event in events)
    whole = [event for event in timed if event["ph"] == "X"]
    assert all(isinstance(event["dur"], int) and event["dur"] >= 0 for event in whole)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(processes.values()) == {"one", "node 0", "node 1"}
    assert set(names.values()) == {CONTROLLER, "actor 0", "rollout 0"}
    update = next(event for event in whole if names[event["pid"], event["tid"]] == "actor 0")
    assert (update["name"], update["cat"], update["ts"], update["dur"]) == ("update", "update", 1_000_000, 980_000)
    assert update["args"] == {"step": 1} and processes[update["pid"]] == "node 0"
    (mark,) = [event for event in timed if event["ph"] == "i"]
    assert mark["ts"] == 2_000_000 and mark["s"] in ("t", "g") and json.loads(json.dumps(trace)) == trace


def test_the_command_writes_a_trace_and_refuses_what_is_not_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps(tmp_path)
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(out), "--from", "1", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["lanes"] == [CONTROLLER, ACTOR, ROLLOUT] and set(told["idle"]) == {ACTOR, ROLLOUT}
    assert len([e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]) == told["spans"]
    assert "idle" in CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(out)]).stdout
    monkeypatch.setattr("rollcall.cli.runs.LONG", 0)
    long = CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(out), "--json"])
    assert "select some with --from and --to" in long.stderr and json.loads(long.stdout) == told
    for arguments in (["--from", "9"], ["--from", "3", "--to", "2"]):
        assert CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(out), *arguments]).exit_code == 1
    (tmp_path / "empty").mkdir()
    assert CliRunner().invoke(app, ["trace", str(tmp_path / "empty")]).exit_code == 1
