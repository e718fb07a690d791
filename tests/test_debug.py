"""The debugger: who stops where, who may come, and that nothing is lost meanwhile. Across hosts: test_debug_lab.py."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quick_rewards
from debugged import WAIT_S, at_a_terminal, beside, nobody, run_dir, talk, wait_for
from typer.testing import CliRunner

from rollcall.base.errors import ClusterError, ConfigError
from rollcall.base.redact import remember
from rollcall.base.stop import Stop, Stopped
from rollcall.base.wait import Wait
from rollcall.cli.main import app
from rollcall.config import load_config
from rollcall.config.run import in_one_process
from rollcall.nodes.framing import json_frame
from rollcall.process.debug import attach, here
from rollcall.process.debug.attach import End, converse, is_there, reach, wait
from rollcall.process.debug.board import BOARD, FILE, read_board
from rollcall.process.debug.here import DebugLine
from rollcall.process.debug.stopped import LinePdb
from rollcall.process.groups.host import DEBUG_HOST, Host, RemoteFailureError
from rollcall.process.groups.pulse import STOP, Pulse, Reader, Seen
from rollcall.process.groups.sightings import FACTOR, LEAST_S, Watch
from rollcall.reward.pool import RewardPool
from rollcall.reward.worker import Item, RewardResult

__all__ = ["run_dir"]  # a fixture


def add_up(count: int) -> int:
    total = sum(range(count))
    breakpoint()
    return total + 1


# In a process without a terminal


def test_a_thread_at_a_breakpoint_waits_for_terminals_until_one_says_continue(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread, results = beside(lambda: add_up(5))
    (waits,) = wait_for(lambda: read_board(run_dir))
    assert (waits.number, waits.role, waits.function, waits.why) == (1, "controller", "add_up", "breakpoint")
    assert Path(waits.file) == Path(__file__) and (run_dir / FILE).stat().st_mode & 0o077 == 0
    assert BOARD.is_held
    assert talk(waits, "p total * 111", "print('hello')", "quit") is End.LEFT
    with reach(waits):  # a connection that is lost
        pass
    assert thread.is_alive() and is_there(waits)
    assert talk(waits, "p total + 5", "list", "") is End.LEFT
    assert talk(waits, "!total = 41", "restart", "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == [42]
    wait_for(lambda: not read_board(run_dir) and not BOARD.is_held)
    shown = capsys.readouterr().out
    assert (
        "1110" in shown
        and "hello" in shown
        and "\n15" in shown
        and "->" in shown
        and "cannot be started again" in shown
    )


def test_a_stranger_gets_nothing_and_a_second_terminal_is_told_of_the_first(run_dir: Path) -> None:
    thread, _ = beside(lambda: add_up(5))
    (waits,) = wait_for(lambda: read_board(run_dir))
    with pytest.raises(ClusterError, match="is not the controller"):
        reach(replace(waits, secret="0" * 64))
    with socket.create_connection((waits.address, waits.port), timeout=WAIT_S) as stranger:
        stranger.sendall(b'{"line": "import os"}' * 4)
        said = b""
        while data := _received(stranger):
            said += data
        assert len(said) <= 32, "a challenge, and then the door is shut"
    with reach(waits) as first:
        with reach(waits) as second:
            assert converse(second, ask=nobody) is End.BUSY
        assert converse(first, typed=["continue"], ask=nobody) is End.GOES
    thread.join(WAIT_S)
    wait_for(lambda: not is_there(waits))
    with pytest.raises(ClusterError, match="continued or ended"):
        reach(waits)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1024)
    except ConnectionResetError:
        return b""


def test_what_a_prompt_evaluates_does_not_stop_and_the_prompt_keeps_its_frame(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread, results = beside(lambda: add_up(5))
    (waits,) = wait_for(lambda: read_board(run_dir))
    assert talk(waits, "p add_up(3)", "debug add_up(4)", "continue", "p total * 111", "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == [11]
    shown = capsys.readouterr().out
    assert shown.count("at the prompt is ignored") == 2 and "1110" in shown


def test_it_stops_in_the_caller_and_in_nothing_that_runs_before_its_next_line(run_dir: Path) -> None:
    """As the garbage collector's callbacks do, wherever it runs."""

    def callback() -> None:
        return None

    def calls() -> int:
        _ = breakpoint(), callback()
        return 11

    thread, results = beside(calls)
    (waits,) = wait_for(lambda: read_board(run_dir))
    assert waits.function == "calls"
    assert talk(waits, "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == [11]


def test_of_two_threads_that_stop_each_keeps_its_frame(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = [beside(lambda: add_up(5))]
    wait_for(lambda: read_board(run_dir))
    threads.append(beside(lambda: add_up(6)))
    time.sleep(0.2)  # for the second to come to its breakpoint, which it does not show
    for number in (1, 2):
        (waits,) = wait_for(lambda number=number: [one for one in read_board(run_dir) if one.number == number])
        assert talk(waits, "p total * 111", "continue") is End.GOES
    for thread, results in threads:
        thread.join(WAIT_S)
        assert results
    shown = capsys.readouterr().out
    assert "1110" in shown and "1665" in shown


def test_silent_strangers_delay_nobody(run_dir: Path) -> None:
    thread, _ = beside(lambda: add_up(5))
    (waits,) = wait_for(lambda: read_board(run_dir))
    strangers = [socket.create_connection((waits.address, waits.port)) for _ in range(100)]
    assert talk(waits, "continue") is End.GOES
    thread.join(WAIT_S)
    for stranger in strangers:
        stranger.close()


def test_a_process_with_many_open_files_can_be_debugged() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        ours, theirs = socket.socketpair()
        high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 2000))
        with ours, theirs, high:
            assert wait([high], 0) == []
            theirs.send(b"x")
            assert wait([high]) == [high]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nobody_comes_and_it_goes_on_by_itself_and_so_do_later_ones(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "UNATTENDED_S", 0.1)
    for _ in range(2):
        thread, results = beside(lambda: add_up(3))
        thread.join(WAIT_S)
        assert results == [4]


def test_an_exception_opens_the_debugger_where_it_was_raised_if_that_was_asked_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        row = {"a": 1}
        try:
            raise ExceptionGroup("several", [_caught(lambda: row["b"])])
        except ExceptionGroup as error:
            here.post_mortem(error)

    fail()  # nobody asked
    monkeypatch.setenv(here.POST_MORTEM, "1")
    here.post_mortem(_caught(lambda: (_ for _ in ()).throw(ConfigError("a refusal"))))
    assert not read_board(run_dir)
    thread, _ = beside(fail)
    (waits,) = wait_for(lambda: read_board(run_dir))
    assert waits.why == "KeyError: 'b'"
    assert talk(waits, "p row", "continue") is End.GOES
    thread.join(WAIT_S)
    assert "{'a': 1}" in capsys.readouterr().out
    fail()  # the same line again


def _caught(work: Callable[[], Any]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


@pytest.mark.parametrize("variable", [("RAY_DEBUG", "legacy"), ("PYTHONBREAKPOINT", "web_pdb.set_trace")])
def test_a_debugger_that_the_user_has_chosen_stays(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setenv(*variable)
    here.serve()
    assert sys.breakpointhook is sys.__breakpointhook__
    monkeypatch.delenv(variable[0])
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")  # Ray's own doing
    here.serve()
    assert sys.breakpointhook is here._hook
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert add_up(3) == 4


def test_the_command_lists_who_waits_and_lets_all_go_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(run_dir / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    runner = CliRunner()
    assert "no process is waiting" in runner.invoke(app, ["debug", str(run_dir)]).output
    thread, _ = beside(lambda: add_up(5))
    (waits,) = wait_for(lambda: read_board(run_dir))
    found = json.loads(runner.invoke(app, ["debug", str(run_dir), "--json"]).stdout)["waiting"]
    assert [(one["number"], one["role"], one["rank"], one["node"]) for one in found] == [(1, "controller", 0, 0)]
    assert "secret" not in found[0] and "port" not in found[0]
    listed = runner.invoke(app, ["debug", str(run_dir)]).output
    assert f"{__file__}:{waits.line}" in listed and f"rollcall debug {run_dir} 1" in listed
    nowhere = runner.invoke(app, ["debug", "1"])
    assert nowhere.exit_code == 1 and "rollcall debug RUN_DIR" in nowhere.output
    missed = runner.invoke(app, ["debug", str(run_dir), "7"])
    assert missed.exit_code == 1 and "no process with number 7 is waiting; the waiting ones are: 1" in missed.output
    left = runner.invoke(app, ["debug", str(run_dir), "1"], input="p total\n")
    assert left.exit_code == 0 and "is still waiting" in left.output
    assert runner.invoke(app, ["debug", str(run_dir), "--continue"]).exit_code == 0
    thread.join(WAIT_S)


def test_a_list_that_a_killed_run_left_behind_showsnobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    place = dict(
        file="f.py",
        line=1,
        function="f",
        why="breakpoint",
        until=time.time(),
        address="127.0.0.1",
        port=port,
        secret="s",
    )
    with BOARD.of_run(tmp_path):
        BOARD.post("gone", place, role="actor", rank=1, node=2, who="actor rank 1 on node 2")
        text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text)
    assert "no process is waiting" in CliRunner().invoke(app, ["debug", str(tmp_path)]).output


def test_the_text_of_an_exception_is_listed_without_secrets(run_dir: Path) -> None:
    remember(["a-token-of-a-judge"])
    place = dict(
        file="f.py",
        line=1,
        function="f",
        why="KeyError: 'a-token-of-a-judge'",
        until=0.0,
        address="",
        port=1,
        secret="s",
    )
    seat: Any = dict(role="reward", rank=0, node=0, who="reward rank 0 on node 0")
    BOARD.post("one", place, **seat)
    (waits,) = read_board(run_dir)
    assert "KeyError" in waits.why and "token-of-a-judge" not in waits.why
    BOARD.post("one", None, **seat)


def test_what_stops_before_a_run_has_a_directory_can_be_found(run_dir: Path) -> None:
    early = run_dir / "early"
    with BOARD.of_run(early):
        thread, _ = beside(lambda: add_up(5))
        wait_for(lambda: BOARD.is_held)
        wait_for(lambda: read_board(early))
        assert CliRunner().invoke(app, ["debug", str(early), "--continue"]).exit_code == 0
        thread.join(WAIT_S)
        wait_for(lambda: not BOARD.is_held)
    assert not early.exists()


def test_a_signal_ends_a_prompt_inside_a_checkpoint_which_is_finished_before_the_run_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, done = Stop(), []
    stop.asked = "SIGTERM"
    monkeypatch.setattr("rollcall.base.stop._heeded", stop)

    ours, theirs = socket.socketpair()
    read_any = os.read

    def read(fd: int, count: int) -> bytes:
        if fd != ours.fileno():
            return read_any(fd, count)
        stop._end_grace(0, None)  # the handler, while the prompt waits
        raise AssertionError("the signal ends the prompt")

    monkeypatch.setattr(os, "read", read)
    debugger = LinePdb(ours.fileno())
    with ours, theirs, pytest.raises(Stopped), stop.shielded():
        debugger.stop(sys._getframe())
        done.append("saved")
    assert done == ["saved"]


# Rewards, in their confined processes

REWARDS = """
def stops(completion, answer):
    length = len(completion)
    if completion == "stop":
        breakpoint()
    if completion == "run":
        exec("breakpoint()")
    return length

def raises(completion, answer):
    table = {}
    return table[completion]

async def waits(completion, answer):
    breakpoint()
    return 1.0
"""


@pytest.fixture
def rewards(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (run_dir / "stopping_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(run_dir)
    monkeypatch.setattr("rollcall.process.here.subprocess", quick_rewards.SUBPROCESS)
    return run_dir


def score(name: str, completions: Sequence[str | list[str]], *, timeout_s: float, **spec: Any) -> list[RewardResult]:
    fields = {"type": "function", "path": f"stopping_rewards:{name}", **spec}

    async def all_of(pool: RewardPool) -> list[RewardResult]:
        items = [Item(0, "", text, "", {}) for text in completions]
        found = await pool.score(items, timeout_s=timeout_s)
        return [result for results in found for result in results]

    with RewardPool({0: fields}, num_workers=1) as pool:
        return asyncio.run(all_of(pool))


def test_a_reward_that_stops_is_not_late_and_may_have_no_network(
    rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread, results = beside(lambda: score("stops", ["stop", "abc", "run"], timeout_s=5.0, network=False))
    (waits,) = wait_for(lambda: read_board(rewards))
    assert (waits.role, waits.rank, waits.function) == ("reward", 0, "stops")
    time.sleep(5.5)
    assert talk(waits, "p length + 96", "length = 7", "interact", "length * 111", "exit()", "continue") is End.GOES
    thread.join(WAIT_S)
    assert [(result.value, result.kind) for result in results[0]] == [(7.0, ""), (3.0, ""), (3.0, "")]
    shown = capsys.readouterr().out
    assert "100" in shown and "777" in shown
    assert not BOARD.is_held


def test_an_async_reward_that_stops_is_not_late(rewards: Path) -> None:
    thread, results = beside(lambda: score("waits", [["a"]], timeout_s=4.0))
    (waits,) = wait_for(lambda: read_board(rewards))
    time.sleep(4.5)
    assert talk(waits, "continue") is End.GOES
    thread.join(WAIT_S)
    assert [(result.value, result.kind) for result in results[0]] == [(1.0, "")]


def test_a_reward_that_raises_opens_the_debugger_once_for_a_line(
    rewards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(here.POST_MORTEM, "1")
    thread, results = beside(lambda: score("raises", ["a", "b"], timeout_s=5.0))
    (waits,) = wait_for(lambda: read_board(rewards))
    assert waits.why == "KeyError: 'a'" and waits.function == "raises"
    assert talk(waits, "p completion * 3", "continue") is End.GOES
    thread.join(WAIT_S)
    assert [result.kind for result in results[0]] == ["raised", "raised"]
    assert "'aaa'" in capsys.readouterr().out


def test_a_breakpoint_that_nobody_could_find_is_ignored(
    rewards: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BOARD, "_run_dir", None)
    results = score("stops", ["stop", "abc", "stop"], timeout_s=30.0)
    assert [(result.value, result.kind) for result in results] == [(4.0, ""), (3.0, ""), (4.0, "")]
    assert caplog.text.count("is ignored") == 1


def test_a_pool_that_closes_ends_a_reward_that_stopped(rewards: Path) -> None:
    fields = {"type": "function", "path": "stopping_rewards:stops"}

    async def until_it_stops(pool: RewardPool) -> None:
        pool.score([Item(0, "", "stop", "", {})], timeout_s=5.0)
        await asyncio.to_thread(wait_for, lambda: read_board(rewards))

    with RewardPool({0: fields}, num_workers=1) as pool:
        asyncio.run(until_it_stops(pool))
    wait_for(lambda: not read_board(rewards))


# Code of a model, in the process of a reward that runs it

FORGED = """
import json, os, struct, sys, time

def _say(line, message):
    os.write(line, struct.pack("<Q", len(message)) + message)

def forges(completion, answer):
    line = max(fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_socket(fd))  # behind that of its calls
    if completion:
        _say(line, json.dumps({"stopped": {"file": [[]], "line": "one"}}).encode())
        time.sleep(0.3)
    if completion == "rubbish":
        os.write(line, b"\\xff" * 64)
    if completion == "deep":
        _say(line, b"[" * 100_000)
    if completion == "dies":
        os._exit(1)
    time.sleep(600 if completion else 0)
    return 1.0

def _is_socket(fd):
    try:
        return fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the forger looks for its line in /proc")
@pytest.mark.parametrize(("lie", "kind"), [("rubbish", "hung"), ("deep", "hung"), ("dies", "died"), ("waits", "hung")])
def test_a_reward_that_lies_to_the_debugger_costs_its_own_score_only(
    rewards: Path, monkeypatch: pytest.MonkeyPatch, lie: str, kind: str
) -> None:
    monkeypatch.setattr(attach, "UNATTENDED_S", 1.0 if lie == "waits" else 600.0)
    (rewards / "stopping_rewards.py").write_text(FORGED)
    thread, results = beside(lambda: score("forges", [lie, ""], timeout_s=1.0))
    thread.join(WAIT_S)
    assert [(result.value, result.kind) for result in results[0]] == [(0.0, kind), (1.0, "")]
    wait_for(lambda: not BOARD.is_held and not read_board(rewards))


@pytest.mark.parametrize(
    "said",
    [b"x", b"[" * 9, json_frame({"text": "no prompt"}), json_frame({"goes": True}), json_frame({"prompt": 1})[:-1]],
)
def test_a_terminal_does_not_wait_for_a_reward_that_opens_no_prompt(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("rollcall.process.debug.here.has_terminal", lambda: True)
    monkeypatch.setattr("rollcall.process.debug.here.PROMPT_S", 0.1)
    line = DebugLine(role="reward", number=0)
    line.theirs.send(said)
    assert not line.answer()
    assert line.theirs.recv(1) == b""  # what is stopped there goes on
    line.theirs.close()


def test_a_signal_that_stops_the_run_ends_a_rewards_prompt() -> None:
    def told_to_stop(prompt: str) -> str:
        raise Stopped("SIGTERM")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(json_frame({"prompt": "(Pdb) "}))
        with pytest.raises(Stopped):
            converse(ours, ask=told_to_stop, again=True)


# At a terminal

AT_A_TERMINAL = """
import sys
from pathlib import Path
from rollcall.process.debug import here
from rollcall.process.debug.stopped import lend_terminal
from rollcall.reward.pool import RewardPool
from rollcall.reward.worker import Item
from contextlib import contextmanager
import asyncio

@contextmanager
def panel():
    print("panel off")
    yield
    print("panel on")

here.serve()
lend_terminal(panel)
fields = {"type": "function", "path": "stopping_rewards:stops"}
async def score():
    return (await pool.score([Item(0, "", "stop", "", {})], timeout_s=5.0))[0]
with RewardPool({0: fields}, num_workers=1) as pool:
    print("scored", asyncio.run(score())[0].value)

def work():
    here_too = 6 * 7
    breakpoint()
    print("worked", here_too)

work()
try:
    1 / 0
except ZeroDivisionError as error:
    here.post_mortem(error)
try:
    work()
except KeyboardInterrupt:
    print("stopped", here.debugger().prompt)
"""


@pytest.mark.parametrize("ctrl_c", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_with_a_terminal_opens_plain_pdb_there_also_for_its_rewards(tmp_path: Path, ctrl_c: bool) -> None:
    """Ctrl-C is pressed the moment a prompt is shown. On a busy machine that may be too early for it to be a prompt's."""
    (tmp_path / "stopping_rewards.py").write_text(REWARDS)
    shown = at_a_terminal(
        [sys.executable, "-c", AT_A_TERMINAL],
        cwd=tmp_path,
        env={here.POST_MORTEM: "1", "PYTHONPATH": str(Path(here.__file__).parents[3])},
        typed=[
            "p length + 96",
            *(["\x03"] if ctrl_c else []),
            "length = 7",
            "c",
            "p here_too",
            "c",
            "p 'zero'",
            "c",
            "q",
        ],
    )
    for text in (
        "100",
        *(["--KeyboardInterrupt--"] if ctrl_c else []),
        "scored 7.0",
        "42",
        "worked 42",
        "ZeroDivisionError",
        "'zero'",
        "stopped",
    ):
        assert text in shown, shown
    assert shown.count("panel off") == shown.count("panel on") == 4


# In a worker


class Stopping:
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def update(self, rows: int) -> int:
        weight = rows * 2
        if self.fails:
            raise KeyError("no such row")
        breakpoint()
        return weight


@pytest.mark.parametrize("fails", [False, True])
def test_the_host_of_a_worker_says_in_its_pulse_where_it_stopped(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setattr(here, "_served", replace(here._served))
    monkeypatch.setenv(here.POST_MORTEM, "1")
    env = {"RANK": "1", DEBUG_HOST: "127.0.0.1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)  # as the host does, and taken back at the end
    host = Host("actor rank 1")
    host.start(env, Stopping, fails=fails)
    thread, results = beside(lambda: _outcome(lambda: host.call("update", (), 21)))
    stop = dict(wait_for(lambda: look_at(host).stop))
    assert stop.pop("until") > time.time()
    place = {**stop, "until": time.time()}
    BOARD.post("1", place, role="actor", rank=1, node=0, who="actor rank 1 on node 0")
    (waits,) = read_board(run_dir)
    assert waits.function == "update" and waits.why == ("KeyError: 'no such row'" if fails else "breakpoint")
    assert talk(waits, "p weight * 100", "continue") is End.GOES
    thread.join(WAIT_S)
    assert "4200" in capsys.readouterr().out
    assert isinstance(results[0], RemoteFailureError) if fails else results == [42]
    wait_for(lambda: look_at(host).stop is None)


def look_at(host: Host) -> Seen:
    """Of several pulses in this process, that of the host."""
    assert host._pulse is not None
    data = host._pulse._memory[:]
    text = data[STOP:].rstrip(b"\0")
    return Seen(is_alive=True, stop=json.loads(text or b"null"))


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return error


# The run waits


def test_a_pulse_says_where_a_debugger_holds_its_process() -> None:
    pulse, reader = Pulse(3), Reader(os.getpid())
    reader._file = os.fdopen(os.dup(pulse._file.fileno()), "rb", buffering=0)  # this process may have others
    assert reader.look().stop is None
    with pulse.doing("update"):
        pulse.note_stop({"file": "a.py", "line": 7})
        seen = reader.look()
        assert seen.stop == {"file": "a.py", "line": 7} and seen.doing == "update"
        pulse.note_stop({"file": "x" * 9000, "line": 7})
        assert (reader.look().stop or {})["line"] == 7
        pulse.note_stop(None)
        assert reader.look().stop is None
    reader.close()


def test_no_call_is_late_while_a_debugger_holds_a_process_and_each_has_its_whole_time_afterwards() -> None:
    watch, seats = Watch(), {"a": [0, 1]}
    allowed_s = max(LEAST_S, FACTOR * 1.0)

    def losses(busy_s: float, *, is_held: bool, num_done: int = 5) -> list[int]:
        seen = Seen(
            is_alive=True, state="S", doing="update", busy_s=busy_s, num_done=num_done, longest_s={"update": 1.0}
        )
        found = watch.judge({"a": {0: seen, 1: seen}}, seats=seats, gone=set(), kinds={}, is_held=is_held)
        return [loss.rank for loss in found]

    assert losses(10 * allowed_s, is_held=True) == []
    assert losses(11 * allowed_s - 1, is_held=False) == []
    assert losses(allowed_s - 1, is_held=False, num_done=6) == []
    assert losses(allowed_s + 1, is_held=False, num_done=6) == [0, 1]


def test_a_wait_that_is_excused_has_more_time() -> None:
    wait = Wait(10.0)
    wait.excuse(5.0)
    assert wait.left_s > 10.0 and not wait.is_over


def test_the_run_file_of_a_cluster_runs_in_one_process_for_a_debugger() -> None:
    config = load_config({
        "cluster": {"num_nodes": 2, "num_gpus_per_node": 4, "component_placement": {"rollout": "0-3", "actor": "4-7"}},
        "actor": {"sharding": "fsdp", "tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2, "compile": True, "lr": 3e-6},
        "rollout": {"engine": "vllm", "samples_per_prompt": 4, "compile": True},
        "trainer": {"elastic": {"min_nodes": 1}, "steps": 7},
    })  # fmt: skip
    alone = in_one_process(config)
    assert alone.cluster is None and alone.rollout.engine == "native" and not alone.rollout.compile
    assert (alone.actor.sharding, alone.actor.tensor_parallel_size, alone.actor.compile) == ("replicate", 1, False)
    assert alone.actor.context_parallel_size == 1
    assert (alone.actor.lr, alone.trainer.steps, alone.rollout.samples_per_prompt) == (3e-6, 7, 4)
