"""The debugger in environments: a child that stops is not late, and one that lies holds nobody."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from debugged import WAIT_S, at_a_terminal, beside, run_dir, talk, wait_for

from rollcall.config.environments import ClassEnvironment, StepEnvironment
from rollcall.environments import episode
from rollcall.environments.episode import TooLong, within
from rollcall.environments.host import make_environments
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.protocol import Environment, EnvironmentFailed
from rollcall.process.debug import attach, here
from rollcall.process.debug.attach import End
from rollcall.process.debug.board import BOARD, Board, Waiting, read_board
from rollcall.process.pause import paused

__all__ = ["run_dir"]  # a fixture

MODULE = """
import rollcall.process.debug.stopped  # on a busy machine its import takes longer than the limits below

class Game:
    def reset(self, answer="", **row):
        self.answer = answer
        if answer == "stop":
            breakpoint()
        if answer == "raise":
            raise KeyError(answer)
        return self.answer

    def look(self, what: str) -> str:
        '''Look.

        Args:
            what: Anything.
        '''
        seen = what * 2
        breakpoint()
        return seen

    def exec(self, code: str) -> str:
        '''Run code.

        Args:
            code: Of the model.
        '''
        exec(code)
        return "done"

    def fail(self) -> str:
        '''Fail.'''
        table = {"a": 1}
        return table["b"]

class Walk:
    async def reset(self, row):
        return "go"

    async def step(self, text, token_ids):
        import asyncio
        async with asyncio.timeout(3.0):
            length = len(text)
            breakpoint()
            await asyncio.sleep(0)
        return "", float(length), True

def double(x: int) -> int:
    '''Double.

    Args:
        x: A number.
    '''
    breakpoint()
    return 2 * x
"""

FORGED = """
import json, os, struct, sys, time

class Game:
    def reset(self, answer="", **row):
        if not answer:
            return None
        message = json.dumps({"stopped": {"file": [[]], "line": "one"}}).encode()
        line = sys.breakpointhook.__self__._fd
        os.write(line, struct.pack("<Q", len(message)) + message)
        time.sleep(600)
"""


@pytest.fixture
def module(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (run_dir / "stopping_games.py").write_text(MODULE)
    monkeypatch.chdir(run_dir)
    return run_dir


def playing(section: Any, work: Callable[[ProcessEnvironments], Coroutine[Any, Any, Any]]) -> tuple[Any, list[Any]]:
    """An event loop beside the test, as that of a run without a terminal."""

    async def main() -> Any:
        environments = make_environments(section, chat_template=None)
        assert isinstance(environments, ProcessEnvironments)
        try:
            return await work(environments)
        finally:
            await environments.aclose()

    return beside(lambda: asyncio.run(main()))


async def call(work: Coroutine[Any, Any, Any], *, limit_s: float = WAIT_S) -> Any:
    return await within(work, limit_s, "late")


def tool(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def a_game(**keys: Any) -> ClassEnvironment:
    return ClassEnvironment(path="stopping_games:Game", call_format="hermes", **keys)


def waiting(run_dir: Path, *, function: str) -> Waiting:
    return wait_for(lambda: [one for one in read_board(run_dir) if one.function == function])[0]


def test_a_class_that_stops_in_reset_or_a_tool_is_not_late_and_its_episode_ends_right(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play(environments: ProcessEnvironments) -> list[Any]:
        environment = await call(environments.start(""))
        opened = await call(environment.reset({"answer": "stop"}))
        result = await call(environment.step(tool("look", '{"what": "ab"}'), []))
        code = await call(environment.step(tool("exec", '{"code": "breakpoint()"}'), []))
        await environment.close(broken=False)
        return [opened, result.calls[0].result, code.calls[0].result]

    thread, results = playing(a_game(), play)
    waits = waiting(module, function="reset")
    assert (waits.role, waits.rank, waits.why) == ("environment", 1, "breakpoint")
    assert waits.who == "environment process 1 on node 0" and BOARD.is_held
    assert talk(waits, "p 'row', self.answer", "quit") is End.LEFT
    assert talk(waits, "self.answer = 'changed'", "continue") is End.GOES
    waits = waiting(module, function="look")
    assert talk(waits, "seen = 'cd'", "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == [["changed", "cd", "done"]]
    assert "('row', 'stop')" in capsys.readouterr().out
    wait_for(lambda: not BOARD.is_held and not read_board(module))


def test_on_another_node_the_worker_that_hosts_environments_shows_one_stop_after_the_other(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has no board. What it is told reaches the controller by the worker's pulse."""
    shown: list[Any] = []
    monkeypatch.setattr(here, "_served", here._Served(host=here.LOOPBACK, node=1, on_stop=shown.append, is_on=True))
    monkeypatch.setattr("rollcall.process.debug.here.BOARD", Board())

    async def play(environments: ProcessEnvironments) -> list[Any]:
        two = [await call(environments.start("")) for _ in range(2)]
        return await asyncio.gather(*(call(one.reset({"answer": "stop"})) for one in two))

    def latest() -> Waiting:
        place = wait_for(lambda: shown and shown[-1])
        return Waiting(number=1, run="", role="environment", rank=0, node=1, who="", since=0.0, **place)

    thread, results = playing(a_game(), play)
    for answer in ("one", "two"):
        waits = latest()
        assert waits.function == "reset" and talk(waits, f"self.answer = {answer!r}", "continue") is End.GOES
        wait_for(lambda before=waits: shown[-1] is None or shown[-1]["port"] != before.port)
    thread.join(WAIT_S)
    assert sorted(results[0]) == ["one", "two"]
    wait_for(lambda: shown[-1] is None)


def test_a_step_by_step_class_stops_and_its_own_time_limits_stand_still(module: Path) -> None:
    async def play(environments: ProcessEnvironments) -> Any:
        environment = await call(environments.start(""))
        await call(environment.reset({}))
        return (await call(environment.step("four", []))).reward

    thread, results = playing(StepEnvironment(type="step", path="stopping_games:Walk"), play)
    waits = waiting(module, function="step")
    time.sleep(3.2)
    assert talk(waits, "length = 7", "next", "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == [7.0]


def test_functions_and_modules_that_are_imported_stop_too(module: Path) -> None:
    path = module / "stopping_games.py"
    path.write_text(MODULE + "\nbreakpoint()\n")

    async def play(environments: ProcessEnvironments) -> Any:
        environment = await call(environments.start(""))
        await call(environment.reset({}))
        return (await call(environment.step(tool("double", '{"x": 4}'), []))).calls[0].result

    section = ClassEnvironment(tools=["stopping_games:double"], call_format="hermes")
    thread, results = playing(section, play)
    waits = waiting(module, function="<module>")
    assert talk(waits, "continue") is End.GOES
    waits = waiting(module, function="double")
    assert talk(waits, "x = 21", "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == ["42"]


def test_what_an_environment_raises_opens_the_debugger_once_in_all_its_processes(
    module: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(here.POST_MORTEM, "1")

    async def reset(environments: ProcessEnvironments, answer: str) -> Environment:
        environment = await call(environments.start(""))
        try:
            await call(environment.reset({"answer": answer}))
        except BaseException:
            await environment.close(broken=True)
            raise
        return environment

    async def play(environments: ProcessEnvironments) -> Any:
        for _ in range(3):
            with pytest.raises(EnvironmentFailed, match="KeyError: 'raise'"):
                await reset(environments, "raise")
        made = [await reset(environments, "") for _ in range(2)]
        found = [await call(each.step(tool("fail", "{}"), [])) for each in made]
        return [result.calls[0].failed for result in found]

    thread, results = playing(a_game(), play)
    waits = waiting(module, function="reset")
    assert waits.why == "KeyError: 'raise'"
    assert talk(waits, "p answer * 2", "continue") is End.GOES
    waits = waiting(module, function="fail")
    assert talk(waits, "p table", "continue") is End.GOES
    thread.join(WAIT_S)
    assert results == [[True, True]]
    shown = capsys.readouterr().out
    assert "'raiseraise'" in shown and "{'a': 1}" in shown


def test_an_environment_that_forges_a_stop_ends_by_its_limit_once_nobody_has_come(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "UNATTENDED_S", 0.3)
    (module / "stopping_games.py").write_text(FORGED)

    async def play(environments: ProcessEnvironments) -> Any:
        ends = []
        for answer in ("forge", "forge", ""):
            environment = await call(environments.start(""))
            try:
                await call(environment.reset({"answer": answer}), limit_s=0.5 if answer else WAIT_S)
                ends.append("done")
            except TooLong:
                ends.append("late")
            await environment.close(broken=True)
        return ends

    thread, results = playing(a_game(), play)
    thread.join(WAIT_S)
    assert results == [["late", "late", "done"]] and attach._has_given_up
    wait_for(lambda: not BOARD.is_held and not read_board(module))


AT_A_TERMINAL = """
import asyncio
from rollcall.config.environments import ClassEnvironment
from rollcall.process.debug import here
from rollcall.environments.episode import within
from rollcall.environments.host import make_environments

async def main():
    environments = make_environments(ClassEnvironment(path="stopping_games:Game", call_format="hermes"), chat_template=None)
    environment = await environments.start("")
    for _ in range(2):
        opened = await within(environment.reset({"answer": "stop"}), 60.0, "late")
        print("opened", opened)
    await environments.aclose()

here.serve()
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("stopped")
"""


def test_a_run_with_a_terminal_opens_pdb_there_and_quit_stops_it(tmp_path: Path) -> None:
    (tmp_path / "stopping_games.py").write_text(MODULE)
    shown = at_a_terminal(
        [sys.executable, "-c", AT_A_TERMINAL],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(here.__file__).parents[3])},
        typed=["p self.answer * 2", "self.answer = 'new'", "c", "q"],
    )
    for text in ("'stopstop'", "opened new", "stopped"):
        assert text in shown, shown
    assert "Traceback" not in shown, shown


# Time


async def ends_within(limit_s: float, future: asyncio.Future[None]) -> bool:
    try:
        await within(asyncio.wait([future]), limit_s, "")
    except TooLong:
        return False
    return True


def test_no_time_counts_while_a_debugger_holds_a_process_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[bool, bool]:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(BOARD, "_waiting", {"an engine": None})
        ending = asyncio.create_task(ends_within(0.05, never))
        await asyncio.sleep(0.3)
        is_late_when_held = ending.done()
        BOARD._waiting.clear()
        return is_late_when_held, await ending

    monkeypatch.setattr(episode, "LOOK_S", 0.02)
    assert asyncio.run(main()) == (False, False)


def test_no_time_counts_while_a_prompt_at_the_terminal_stops_the_loop() -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def prompt() -> None:
            with paused():
                time.sleep(1.2)
            loop.call_later(0.3, answer.set_result, None)

        loop.call_soon(prompt)
        return await ends_within(1.0, answer)

    assert asyncio.run(main())
