"""The contract of a worker: a call returns, or raises the process's own error, or says who is lost, where and why."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_targets import Own

import rollcall
from rollcall.nodes.framing import DONE, HEAD, JSON, PART, PICKLE, Frames, frame
from rollcall.process.child import serve
from rollcall.process.here import LinkHere, spawn
from rollcall.process.worker import Ending, Link, Lost, Raised, Worker

WAIT_S = 600.0
HERE = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(rollcall.__file__).parents[1]), str(HERE)])}
Call = Callable[..., Any]
ANSWERS: Any = defaultdict(lambda: json.loads)


@pytest.fixture(params=["in a loop", "in a thread"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def one(target: str = "Own", answers: Any = ANSWERS, **options: Any) -> Worker:
        started.append(spawn(f"process_targets:{target}", name="worker 3", answers=answers, env=ENV, **options))
        return started[-1]

    yield one
    for worker in started:
        worker.close()


def call(way: str, worker: Worker, method: str, *args: Any, deadline_s: float = WAIT_S, **options: Any) -> Any:
    if way == "in a thread":
        return worker.ask(method, *args, deadline_s=deadline_s, **options)
    return asyncio.run(worker.call(method, *args, deadline_s=deadline_s, **options))


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_ended(pid: int) -> bool:
    until = time.monotonic() + WAIT_S
    while is_there(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_there(pid)


def test_a_call_returns_and_calls_of_both_kinds_may_follow_each_other(start: Call) -> None:
    worker = start()
    assert asyncio.run(worker.call("add", 1, 2, deadline_s=WAIT_S)) == 3
    assert worker.ask("add", "a", "b", deadline_s=WAIT_S) == "ab"
    assert asyncio.run(worker.call("pid", deadline_s=WAIT_S)) == worker.pid != os.getpid()


def test_what_is_larger_than_a_socket_takes_goes_both_ways(start: Call, way: str) -> None:
    large = "z" * 5_000_000
    assert call(way, start(), "add", large, "!") == large + "!"


def test_an_error_is_raised_with_its_traceback(start: Call, way: str) -> None:
    worker = start()
    with pytest.raises(Raised, match="worker 3 raised KeyError: 'no such'") as caught:
        call(way, worker, "raises", "no such")
    assert "process_targets.py" in caught.value.trace and caught.value.kind == "KeyError"
    for method, text in (("leaves", "SystemExit: 4"), ("loses_its_service", "the service is away")):
        with pytest.raises(Raised, match=text):
            call(way, worker, method)
    with pytest.raises(Raised, match="not JSON compliant"):
        call(way, worker, "returns_no_json")
    assert call(way, worker, "add", 1, 2) == 3


@pytest.mark.parametrize(("method", "args", "why"), [("dies", (3,), "exit status 3"), ("crashes", (), "SIGABRT")])
def test_a_process_that_dies_is_lost_for_every_call(
    start: Call, way: str, method: str, args: tuple[Any, ...], why: str
) -> None:
    worker = start()
    with pytest.raises(Lost, match=rf"worker 3 \(process {worker.pid}\) died \({why}") as caught:
        call(way, worker, method, *args)
    assert not caught.value.is_late
    assert ("process_targets.py" in caught.value.stack) == (method == "crashes")
    with pytest.raises(Lost, match=why):
        call(way, worker, "add", 1, 2)


def test_a_process_that_cannot_be_made_is_lost_with_its_log(start: Call, way: str) -> None:
    worker = start("NotMade")
    with pytest.raises(Lost, match="exit status 1"):
        call(way, worker, "add", 1, 2)
    assert isinstance(worker.link, LinkHere)
    assert "cannot be made" in worker.link.log_tail(20) and "no such device" in worker.link.log_tail(1)


def test_a_call_that_hangs_past_its_deadline_is_lost_with_its_stack_and_killed(start: Call, way: str) -> None:
    worker = start()
    pid = call(way, worker, "pid")
    with pytest.raises(Lost, match="has not answered hangs within 0.2 s") as caught:
        call(way, worker, "hangs", deadline_s=0.2)
    assert caught.value.is_late and "in hangs" in caught.value.stack and has_ended(pid)


def test_each_part_of_an_answer_begins_the_deadline_again(start: Call, way: str) -> None:
    worker, parts = start(), []
    call(way, worker, "pid")
    assert call(way, worker, "counts", 6, 0.5, deadline_s=2.0, each=parts.append) == "counted"
    assert parts == list(range(6))
    with pytest.raises(Lost, match="counts within 0.2 s"):
        call(way, worker, "counts", 2, 1.0, deadline_s=0.2, each=parts.append)


def test_a_stopped_process_is_late_also_in_the_middle_of_a_large_call(start: Call, way: str) -> None:
    worker = start()
    os.kill(call(way, worker, "pid"), signal.SIGSTOP)
    with pytest.raises(Lost, match="add within 0.3 s"):
        call(way, worker, "add", b"z" * 5_000_000, b"", deadline_s=0.3)
    assert has_ended(worker.pid)


def test_a_log_that_is_flooded_holds_nothing_up_and_shows_its_end(start: Call, way: str) -> None:
    worker = start()
    assert call(way, worker, "floods", 20_000) == "done"
    assert isinstance(worker.link, LinkHere)
    assert [line.split()[1] for line in worker.link.log_tail(3).splitlines()] == ["19997", "19998", "19999"]


def test_calls_at_once_are_all_answered_and_all_told_of_the_end(start: Call) -> None:
    async def all_at_once(worker: Worker) -> list[Any]:
        await asyncio.gather(*(worker.call("add", number, 1, deadline_s=WAIT_S) for number in range(50)))
        calls = [worker.call("add", number, 1, deadline_s=WAIT_S) for number in range(20)]
        calls.insert(10, worker.call("dies", 5, deadline_s=WAIT_S))
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(all_at_once(start()))
    assert results[:10] == list(range(1, 11))
    assert all(isinstance(result, Lost) and "exit status 5" in str(result) for result in results[10:])


def test_a_call_that_is_given_up_leaves_the_others_their_answers(start: Call) -> None:
    async def give_up(worker: Worker) -> Any:
        task = asyncio.create_task(worker.call("hangs", 0.3, deadline_s=WAIT_S))
        await asyncio.sleep(0.1)
        task.cancel()
        return await worker.call("add", 1, 2, deadline_s=WAIT_S)

    assert asyncio.run(give_up(start())) == 3


def test_a_call_that_has_begun_runs_while_this_thread_does_something_else(start: Call) -> None:
    worker = start()
    waited: list[float] = []
    begun = worker.begin("hangs", 0.5, deadline_s=WAIT_S)
    assert worker.wait(begun, meanwhile=waited.append, every_s=0.05) == "awake"
    assert waited == sorted(waited) and len(waited) >= 2


@pytest.mark.parametrize("method", ["starts", "starts_another_session"])
def test_what_a_process_started_ends_with_it(start: Call, way: str, method: str) -> None:
    worker = start()
    grandchild = call(way, worker, method)
    worker.close() if way == "in a thread" else asyncio.run(worker.end())
    assert has_ended(grandchild) and has_ended(worker.pid)
    with pytest.raises(Lost, match="was ended by this process"):
        call(way, worker, "add", 1, 2)


def test_a_call_that_waits_hears_that_its_process_is_ended(start: Call) -> None:
    async def end(worker: Worker) -> Any:
        waiting = asyncio.create_task(worker.call("hangs", deadline_s=WAIT_S))
        await asyncio.sleep(0.1)
        await worker.end()
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    error = asyncio.run(end(start()))
    assert isinstance(error, Lost) and "was ended by this process" in str(error)


def test_a_process_that_may_end_by_itself_does(start: Call) -> None:
    worker = start()
    worker.ask("pid", deadline_s=WAIT_S)
    assert worker.close(grace_s=WAIT_S).status == 0


def test_a_copy_of_the_process_that_user_code_forks_says_nothing(start: Call, way: str) -> None:
    worker = start()
    assert call(way, worker, "forks") > 0
    assert [call(way, worker, "add", number, 1) for number in range(20)] == list(range(1, 21))


PARENT = """
import json, sys
from rollcall.process.here import spawn
worker = spawn("process_targets:Own", name="worker 3", answers={"starts": json.loads})
print(json.dumps([worker.pid, worker.ask("starts", deadline_s=600)]), flush=True)
worker.ask("hangs", deadline_s=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no lifeline")
def test_when_the_parent_is_killed_its_processes_and_theirs_end() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=ENV)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert all(map(has_ended, pids))


def test_an_ended_process_leaves_no_open_file(start: Call, way: str) -> None:
    def num_open() -> int:
        gc.collect()  # what other tests have left
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    with open(os.devnull, "w") as output:
        worker = start(output=output.fileno())
        with pytest.raises(Lost):
            call(way, worker, "dies", 1)
        start(output=output.fileno()).close()
    assert num_open() == before


# A worker that somebody else has started


class Forked(Link):
    """A process that is forked with what it runs, as a zygote does it."""

    where = "a forked process"

    def __init__(self, serving: Callable[[socket.socket], None]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                serving(theirs)
            finally:
                os._exit(0)
        theirs.close()
        super().__init__(ours)

    def end(self, *, grace_s: float, ask_stack: bool = False) -> Ending:
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.connection.close()
        return Ending(how=f"status {status}", status=status)


def test_a_process_that_a_zygote_forked_is_called_like_any_other(way: str) -> None:
    link = Forked(lambda connection: serve(connection.fileno(), Own()))
    worker = Worker(link, name="environment 7", answers=ANSWERS)
    assert call(way, worker, "add", 1, 2) == 3 and call(way, worker, "pid") == worker.pid
    with pytest.raises(Lost, match=r"environment 7 \(a forked process\) died \(status 5\)"):
        call(way, worker, "dies", 5)


def answer_backwards(connection: socket.socket) -> None:
    """A host of many takes calls as they come, and answers each when it is done."""
    frames, calls = Frames(), list[bytes]()
    while len(calls) < 3:
        calls += frames.feed(connection.recv(1 << 16))
    for message in reversed(calls):
        number, _ = HEAD.unpack_from(message)
        _, (given,) = PICKLE.loads(message[HEAD.size :])
        connection.sendall(frame(HEAD.pack(number, PART) + JSON.dumps("it runs")))
        connection.sendall(frame(HEAD.pack(number, DONE) + JSON.dumps(given * 10)))
    connection.recv(1)


def test_a_process_of_many_answers_calls_in_any_order() -> None:
    async def play(worker: Worker) -> tuple[list[int], list[int]]:
        ended: list[int] = []

        async def one(number: int) -> int:
            parts: list[str] = []
            answer = await worker.call("play", number, deadline_s=WAIT_S, each=parts.append)
            ended.append(number)
            assert parts == ["it runs"]
            return answer

        return list(await asyncio.gather(*map(one, (1, 2, 3)))), ended

    worker = Worker(Forked(answer_backwards), name="host 0", answers=ANSWERS)
    try:
        assert asyncio.run(play(worker)) == ([10, 20, 30], [3, 2, 1])
    finally:
        worker.close()


# What a confined process says


def number(body: bytes) -> int:
    value = json.loads(body)
    if not isinstance(value, int):
        raise ValueError("not a number")
    return value


READERS = {"add": number, "forges": number, "raises": number, "counts": number}


def test_no_byte_of_a_confined_process_is_unpickled(start: Call, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*_: Any, **__: Any) -> Any:
        raise AssertionError("a byte of a confined process was unpickled")

    monkeypatch.setattr(pickle, "loads", poisoned)
    worker = start(answers=READERS)
    parts: list[int] = []
    assert call(way, worker, "add", 1, 2) == 3
    with pytest.raises(Raised, match="KeyError: 'no.*such'") as caught:
        call(way, worker, "raises", "no\x1b[2Jsuch")
    assert "\x1b" not in str(caught.value)
    with pytest.raises(Lost, match="sent an invalid message"):
        call(way, worker, "counts", 2, 0.0, each=parts.append)  # it returns a text
    assert parts == [0, 1]


@pytest.mark.parametrize(
    "what",
    ["a pickle", "a raised pickle", "another call's", "no head", "no kind", "another type", "too much", "deep"],
)
def test_a_confined_process_that_lies_is_killed_and_lost(
    start: Call, way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("a byte of a confined process was unpickled"))
    worker = start(answers=READERS, longest=1 << 20)
    with pytest.raises(Lost, match="sent an invalid message"):
        call(way, worker, "forges", what)
    assert has_ended(worker.pid)


def test_messages_are_whole_however_their_bytes_arrive() -> None:
    sent = [b"", b"a", b"b" * 1000]
    stream = b"".join(map(frame, sent))
    for step in (1, 7, 100, len(stream)):
        frames = Frames()
        found = [one for at in range(0, len(stream), step) for one in frames.feed(stream[at : at + step])]
        assert found == sent
    with pytest.raises(ValueError, match="the limit is 999"):
        Frames(999).feed(stream)
