"""Environments in processes of their own: what they answer, how they fail, and that nothing outlives them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollcall.base.errors import ConfigError
from rollcall.base.process_table import Process
from rollcall.config.environments import ClassEnvironment, StepEnvironment
from rollcall.environments.host import make_environments
from rollcall.environments.processes import ProcessEnvironments
from rollcall.environments.protocol import Environment, EnvironmentFailed
from rollcall.process.debug.here import warn_ignored

MODULE = "tests.environments_of_users"


def made(path: Any = f"{MODULE}:Secret", *, call_format: Any = "hermes", **keys: Any) -> ProcessEnvironments:
    section = ClassEnvironment(path=path, call_format=call_format, **keys)
    environments = make_environments(section, chat_template=None)
    assert isinstance(environments, ProcessEnvironments)
    return environments


def pids_of(environments: ProcessEnvironments) -> list[int]:
    """The zygote and its children."""
    return [environments._zygote.worker.pid, *environments._zygote.pids]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@asynccontextmanager
async def episode(environments: ProcessEnvironments, **row: Any) -> AsyncIterator[Environment]:
    """One that is broken when its block raises."""
    environment = await environments.start(row.get("environment", ""))
    try:
        await environment.reset(row)
        yield environment
    except BaseException:
        await environment.close(broken=True)
        raise
    await environment.close(broken=False)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_a_class_is_played_from_reset_to_reward_and_its_process_is_kept() -> None:
    async def play() -> None:
        environments = made()
        names = [schema["function"]["name"] for schema in environments.tools_of("")]
        assert names == ["ask", "ask_later", "refuse"]
        environment = await environments.start("")
        assert await environment.reset({"prompt": "p", "answer": "7"}) == "reset 1: prompt"
        result = await environment.step(f"I ask. {call('ask', times='2')}{call('ask_later')}", [1])
        assert [message.content for message in result.messages] == ["77", '{"secret": "7", "unit": "s"}']
        assert not result.done and [each.failed for each in result.calls] == [False, False]
        refused = await environment.step(call("refuse"), [1])
        assert refused.messages[0].content == '{"error": "not today"}' and refused.calls[0].failed
        assert (await environment.step("It is 7.", [1])).done
        assert await environment.reward() == 0.5
        pids = pids_of(environments)
        await environment.close(broken=False)
        async with episode(environments, answer="8") as again:
            assert pids_of(environments) == pids
            assert await again.reset({"answer": "8"}) == "reset 3: "
        await environments.aclose()
        assert not any(Process.of(pid) for pid in pids)

        with pytest.raises(EnvironmentFailed, match="environments are closed"):
            await environments.start("")

    run(play())


def test_a_row_chooses_its_class_by_the_environment_column_and_each_has_its_own_tools() -> None:
    async def play() -> None:
        paths = {"secret": f"{MODULE}:Secret", "plain": f"{MODULE}:Plain"}
        environments = made(paths, tools=[f"{MODULE}:add"], max_running=1)
        assert [schema["function"]["name"] for schema in environments.tools_of("plain")] == ["look", "add"]
        with pytest.raises(ValueError, match="'other', but environment.path has only secret, plain"):
            environments.tools_of("other")
        with pytest.raises(EnvironmentFailed, match="no environment column"):
            await environments.start("")
        async with episode(environments, environment="secret", answer="7") as environment:
            opening = await environment.reset({"environment": "secret", "answer": "7", "other": 1})
            assert opening == "reset 2: other"
            assert (await environment.step(call("add", a=1, b="2"), [])).messages[0].content == "3"
        async with episode(environments, environment="plain", prompt="p", answer="a", other=1) as environment:
            result = await environment.step(call("look") + call("ask"), [])
            assert [each.result for each in result.calls][0] == "p a" and result.calls[1].failed
            assert await environment.reward() is None
        assert len(pids_of(environments)) <= 3
        await environments.aclose()

    run(play())


def test_step_by_step_classes_say_everything_themselves() -> None:
    async def play() -> None:
        section = StepEnvironment(path={"fully": f"{MODULE}:Guess", "plainly": f"{MODULE}:GuessPlainly"})
        environments = make_environments(section, chat_template=None)
        assert isinstance(environments, ProcessEnvironments)
        guess = await environments.start("fully")
        assert await guess.reset({"answer": "4"}) == "Guess."
        wrong = await guess.step("3", [5, 6])
        assert (wrong.messages[0].role, wrong.messages[0].name, wrong.reward) == ("tool", "judge", -0.5)
        right = await guess.step("4", [5, 6])
        assert right.done and right.reward == 1.0 and right.metrics == {"tokens": 2.0} and await guess.reward() is None
        plainly = await environments.start("plainly")
        await plainly.reset({"answer": "4"})
        assert (await plainly.step("wrong", [])).messages[0].content == "No."
        assert (await plainly.step("right", [])).reward == 1.0
        with pytest.raises(EnvironmentFailed, match="step returned None"):
            await plainly.step("none", [])
        await environments.aclose()

    run(play())


def test_what_cannot_be_used_is_refused_at_the_start_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="environment.path=.* there is no module 'tests.environments_of_nobody'"):
        made("tests.environments_of_nobody:Game")
    with pytest.raises(ConfigError, match="environment.env names ROLLCALL_NOT_SET"):
        made(env=["ROLLCALL_NOT_SET"])


def test_a_module_that_ends_its_process_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_module.py").write_text("import os\nos._exit(0)")
    with pytest.raises(
        ConfigError, match="ended during startup.*exit status 0.*; check what its module does when imported"
    ):
        made("odd_module:Game")


def test_a_copy_of_the_process_that_a_module_forks_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twin_module.py").write_text(
        "import os\ncopy = os.fork()\nclass Game:\n    def reset(self, **row):\n        return str(copy)"
    )

    async def play() -> None:
        environments = made("twin_module:Game")
        environment = await environments.start("")
        copy = int(await environment.reset({}) or "0")
        assert copy > 0
        await environments.aclose()
        await gone([copy])

    run(play())


def test_hostile_environments_fail_their_own_episode_alone(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_ignored.cache_clear()
    failures = {
        "eat": r"(?s)MemoryError.*memory_mb=300",
        "die": "its process died .SIGKILL",
        "exit": "SystemExit: 3",
        "write": "its process sent an invalid message",
    }

    async def play() -> None:
        environments = made(f"{MODULE}:Hostile", memory_mb=300)
        async with episode(environments) as bystander:
            for tool, why in failures.items():
                with pytest.raises(EnvironmentFailed, match=why):
                    async with episode(environments) as environment:
                        await environment.step(call(tool), [])
            for how, why in {"raise": "(?s)reset.*KeyError: 'no such row'", "number": "reset returned int"}.items():
                with pytest.raises(EnvironmentFailed, match=why) as failed:
                    async with episode(environments, how=how):
                        pass
                assert "/src/rollcall/" not in str(failed.value)
            async with episode(environments) as environment:
                flood = await environment.step(call("flood"), [])
                assert flood.calls[0].failed and "100,000,000 characters" in flood.messages[0].content
                assert (await environment.step(call("shout"), [])).messages[0].content == "done"
                assert (await environment.step(call("fork"), [])).messages[0].content == "parent"
                assert (await environment.step(call("stop_here"), [])).messages[0].content == "done"
            assert (await bystander.step(call("shout"), [])).messages[0].content == "done"
            with pytest.raises(EnvironmentFailed, match="get_reward returned nan"):
                await bystander.reward()
        await environments.aclose()

    run(play())
    assert "x" * 10_000 in capfd.readouterr().err and "breakpoint() in an environment is ignored" in caplog.text


def test_a_call_that_is_given_up_is_killed_with_all_that_its_episode_started() -> None:
    async def play() -> None:
        environments = made(f"{MODULE}:Hostile")
        started: list[int] = []
        with pytest.raises(TimeoutError):
            async with episode(environments) as environment:
                started += map(int, (await environment.step(call("start"), [])).messages[0].content.split())
                async with asyncio.timeout(0.3):
                    await environment.step(call("hang"), [])
        assert len(pids_of(environments)) == 1
        await gone(started)
        await environments.aclose()

    run(play())


def test_a_child_that_closes_its_socket_fails_its_episode_and_is_killed() -> None:
    async def play() -> None:
        environments = made(f"{MODULE}:Hostile")
        with pytest.raises(EnvironmentFailed, match="its process .*user code closed the connection"):
            async with episode(environments) as environment:
                await environment.step(call("close"), [])
        assert len(pids_of(environments)) == 1
        await environments.aclose()

    run(play())


def test_a_killed_zygote_fails_what_runs_and_is_started_again() -> None:
    async def play() -> None:
        environments = made(f"{MODULE}:Hostile")
        with pytest.raises(EnvironmentFailed, match="forked from is gone"):
            async with episode(environments) as environment:
                started = (await environment.step(call("start"), [])).messages[0].content.split()
                before = [*pids_of(environments), *map(int, started)]
                os.kill(before[0], signal.SIGKILL)
                await environment.step(call("hang"), [])
        await gone(before)
        async with episode(environments) as environment:
            assert pids_of(environments)[0] != before[0]
        await environments.aclose()

    run(play())


def test_a_zygote_that_cannot_be_started_again_fails_the_episode_and_leaves_no_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any, **keys: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async def play() -> None:
        environments = made()
        os.kill(pids_of(environments)[0], signal.SIGKILL)
        await gone(pids_of(environments))
        with monkeypatch.context() as patched:
            patched.setattr("rollcall.environments.processes.LinkHere", full)
            num_open = []
            for _ in range(3):
                with pytest.raises(EnvironmentFailed, match="cannot start a process .*too many open files"):
                    await environments.start("")
                num_open.append(len(os.listdir("/proc/self/fd")))
            assert len(set(num_open)) == 1
        async with episode(environments, answer="7"):
            pass
        await environments.aclose()

    run(play())


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_parent_that_is_killed_leaves_nothing(tmp_path: Path, is_stopped: bool) -> None:
    async def play() -> None:
        environments = made(f"{MODULE}:Hostile")
        async with episode(environments) as environment:
            started = (await environment.step(call("start"), [])).messages[0].content
            hanging = asyncio.create_task(environment.step(call("hang"), []))
            await asyncio.sleep(0.1)
            if is_stopped:
                os.kill(pids_of(environments)[0], signal.SIGSTOP)
            (tmp_path / "pids.tmp").write_text(f"{started} {' '.join(map(str, pids_of(environments)))}")
            (tmp_path / "pids.tmp").rename(tmp_path / "pids")
            await hanging

    parent = os.fork()
    if parent == 0:
        try:
            run(play())
        finally:
            os._exit(1)
    while not (tmp_path / "pids").exists():
        assert os.waitpid(parent, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    run(gone([int(pid) for pid in (tmp_path / "pids").read_text().split()]))


async def gone(pids: list[int]) -> None:
    """Wait until none of these lives."""
    assert pids
    while any(Process.of(pid) for pid in pids):
        await asyncio.sleep(0.02)
