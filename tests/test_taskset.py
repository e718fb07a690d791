"""Tasksets of verifiers: its own server plays their episodes. `scripts/setup_peers.sh .peers verifiers` makes its environment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from debugged import wait_for
from endpoints import Writer, chat_tokenizer, plain_sampling
from hosts import end_host
from peers import peer

from rollcall.base.errors import ConfigError
from rollcall.base.process_table import Process, environment_of
from rollcall.base.types import Completion, EndReason, Prompt
from rollcall.config.environments import VerifiersEnvironment
from rollcall.environments.agent import AgentEnvironments
from rollcall.environments.host import EnvironmentHost, HostPlace, make_environments, make_here
from rollcall.environments.hosted import HostedEnvironments
from rollcall.environments.program import KEY
from rollcall.environments.taskset import MARK, TasksetPrograms
from rollcall.nodes.door import new_secret
from rollcall.process.worker import Worker

HANGMAN = {"taskset": {"id": "textarena", "game": "Hangman-v0"}}
LETTERS = "ETAOINSHRLDU"
FROM_HERE = (
    "NLTK_DATA",
    "SSL_CERT_FILE",
    "HTTPS_PROXY",
    "UV_INDEX",
)  # where its data and programs come from on this machine


# What packages/verifiers.py uses of verifiers. A task is a number; playing it is one question, and its reward the number.
STAND_IN = {
    "v1/__init__.py": """
from collections import namedtuple
EvalClientConfig = namedtuple("EvalClientConfig", "base_url api_key_var")
ModelContext = namedtuple("ModelContext", "model client")
""",
    "v1/configs/agent.py": "class AgentConfig: pass",
    "v1/utils/loaders.py": """
import asyncio, contextlib, json, os, urllib.request
from types import SimpleNamespace as Made

class Taskset(list):
    bounded = True

class Env:
    taskset = Taskset([10, 11])

    @contextlib.asynccontextmanager
    async def serving(self):
        open(os.environ["STAND_IN_PID"], "w").write(str(os.getpid()))
        yield

    def slots(self, task):
        return [task]

    async def run_slot(self, task, context):
        def ask():
            body = {"model": context.model, "messages": [{"role": "user", "content": f"task {task}"}]}
            assert "API_KEY" in context.client.api_key_var, "a harness would see the keys of other episodes"
            headers = {"Authorization": f"Bearer {os.environ[context.client.api_key_var]}"}
            request = urllib.request.Request(context.client.base_url + "/chat/completions", json.dumps(body).encode(), headers)
            urllib.request.urlopen(request, timeout=120).read()
        await asyncio.to_thread(ask)
        return Made(errors=[], ok=True, traces=[Made(errors=[], rewards={}, metrics={}, reward=float(task))])

env_config_type = lambda taskset, name: Made(model_fields={})
resolve_env_config = lambda config: config
load_environment = lambda config: Env()
""",
}


def section(python: str, *, config: dict[str, Any] | None = None, **fields: Any) -> VerifiersEnvironment:
    env = [name for name in FROM_HERE if name in os.environ]
    return VerifiersEnvironment(config=config or HANGMAN, python=python, env=env, **fields)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLTK's list of words, which Hangman would fetch from the network."""
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("station\nteacher\norange\nwinter\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


def guesses(prompt: str) -> str:
    """The next letter: one for each turn that the model has had."""
    return f"I guess [{LETTERS[prompt.count('[assistant]') - 1]}]"


def play(given: VerifiersEnvironment, *, count: int) -> list[Completion]:
    tokenizer = chat_tokenizer()
    return play_in(make_environments(given, chat_template=tokenizer.chat_template), count=count)


def play_in(environments: Any, *, count: int) -> list[Completion]:
    tokenizer = chat_tokenizer()
    writer = Writer(tokenizer=tokenizer, says=guesses)
    assert isinstance(environments, AgentEnvironments)

    async def one(player: Any, number: int) -> Completion:
        prompt = Prompt(id="p", token_ids=np.array([5], dtype=np.int32), text="", answer="", metadata={"index": number})
        return await player.play(
            prompt, seed=number, sampling=plain_sampling(8000), session=f"episode-{number}", sample=writer.sample
        )

    async def work() -> list[Completion]:
        player = environments.player(tokenizer=tokenizer, max_prompt_tokens=4000, max_response_tokens=8000)
        try:
            return await asyncio.gather(*(one(player, number // 2) for number in range(count)))
        finally:
            await environments.aclose()

    return asyncio.run(work())


def test_a_taskset_must_be_named() -> None:
    with pytest.raises(ValueError, match="config names no taskset; write for example"):
        VerifiersEnvironment(config={"game": "Hangman-v0"}, python="python3")


def test_a_python_without_verifiers_is_refused() -> None:
    """Before the run begins, and nothing of the server is left."""
    python = getattr(sys, "_base_executable", sys.executable)
    with pytest.raises(
        ConfigError, match="verifiers refuses environment.config: ModuleNotFoundError: No module named 'verifiers'"
    ):
        make_environments(section(python), chat_template=None)


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_played_by_its_own_server(words: None) -> None:
    """Hangman of the taskset `textarena` that comes with verifiers, two episodes each of two words."""
    completions = play(section(peer("verifiers"), max_turns=12), count=4)
    episodes = [one.episode for one in completions if one.episode is not None]
    assert [episode.error for episode in episodes] == [""] * 4
    for completion, episode in zip(completions, episodes, strict=True):
        assert episode.ended is EndReason.DONE and episode.branches == () and len(episode.turns) > 3
        assert "[A]" in episode.turns[2].text and episode.turns[0].observation.startswith("C00 C01")  # the board
        assert episode.metrics["game_reward"] == episode.reward
        assert completion.mask.sum() == sum(turn.num_sampled for turn in episode.turns)
    assert episodes[0].reward == episodes[1].reward and max(episode.reward or 0.0 for episode in episodes) > 0.0


@pytest.mark.slow
def test_a_server_of_verifiers_on_a_host_plays_the_same_words(words: None) -> None:
    given = section(peer("verifiers"), max_turns=12)
    elsewhere = [one.episode for one in play_on_a_host(given, count=4) if one.episode is not None]
    here = [one.episode for one in play(given, count=4) if one.episode is not None]
    assert [one.error for one in elsewhere] == [""] * 4
    assert [[turn.text for turn in one.turns] for one in elsewhere] == [
        [turn.text for turn in one.turns] for one in here
    ]
    assert [one.reward for one in elsewhere] == [one.reward for one in here]


def play_on_a_host(given: VerifiersEnvironment, *, count: int) -> list[Completion]:
    host = EnvironmentHost(make_here(given, chat_template=None))

    def renew(number: int) -> HostPlace:
        raise AssertionError(f"host {number} is not lost")

    try:
        place = host.listen("127.0.0.1", name="node 1", secret=new_secret())
        programs = HostedEnvironments([place], renew=renew, wait_s=20.0)
        return play_in(AgentEnvironments(given, programs=programs), count=count)
    finally:
        end_host(host)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiersEnvironment:
    """A Python that has what stands in for verifiers; its server writes its number to ``folder / "pid"``."""
    for name, text in STAND_IN.items():
        (folder / "verifiers" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "verifiers" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("STAND_IN_PID", str(folder / "pid"))
    return VerifiersEnvironment(config=HANGMAN, python=sys.executable, env=["STAND_IN_PID"])


@pytest.mark.slow
def test_the_server_of_a_taskset_runs_on_the_host_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = stand_in(tmp_path, monkeypatch)
    episodes = [one.episode for one in play_on_a_host(given, count=4) if one.episode is not None]
    assert [(one.ended, one.error) for one in episodes] == [(EndReason.DONE, "")] * 4
    assert [one.reward for one in episodes] == [10.0, 10.0, 11.0, 11.0]
    assert Process.of(int((tmp_path / "pid").read_text())) is None


def test_a_harness_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = """while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass"""
    loaders = STAND_IN["v1/utils/loaders.py"].replace("await asyncio.to_thread(ask)", endless)
    monkeypatch.setitem(STAND_IN, "v1/utils/loaders.py", loaders)
    monkeypatch.setattr("rollcall.environments.taskset.END_TIMEOUT_S", 0.5)
    programs = TasksetPrograms(stand_in(tmp_path, monkeypatch))
    stop = asyncio.Event()

    async def play() -> str:
        variables = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", KEY: "key", "ROLLCALL_ROW": "{}"}
        playing = asyncio.create_task(programs.run(variables, stop=stop))
        await asyncio.sleep(0.1)
        stop.set()
        ended = await asyncio.wait_for(playing, 60)
        await programs.aclose()
        return ended.stderr

    assert asyncio.run(play()) == "it did not stop within 0.5 s"


def test_a_server_whose_start_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = STAND_IN["v1/utils/loaders.py"].replace(
        "        yield\n", "        await asyncio.sleep(600)\n        yield\n"
    )
    monkeypatch.setitem(STAND_IN, "v1/utils/loaders.py", loaders)
    monkeypatch.setattr("rollcall.environments.taskset.END_TIMEOUT_S", 0.5)
    given, folder = stand_in(tmp_path, monkeypatch), tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def interrupted(worker: Worker, *args: Any, **keys: Any) -> None:
        wait_for((tmp_path / "pid").exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TasksetPrograms(given)
    assert Process.of(int((tmp_path / "pid").read_text())) is None
    assert not os.listdir(folder)


def test_a_server_that_has_died_is_started_again_and_leaves_no_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = stand_in(tmp_path, monkeypatch)
    programs = TasksetPrograms(given)
    pid = programs.worker.pid
    mark = {MARK: (environment_of(pid) or {})[MARK]}
    harness = subprocess.Popen(["sleep", "600"], env={**os.environ, **mark}, start_new_session=True)
    os.kill(pid, signal.SIGKILL)
    completions = play_in(AgentEnvironments(given, programs=programs), count=2)
    episodes = [one.episode for one in completions if one.episode is not None]
    assert [(one.ended, one.error) for one in episodes] == [(EndReason.DONE, "")] * 2
    assert "died (SIGKILL" in caplog.text and caplog.text.count("restarting it") == 1
    assert harness.wait(60) == -signal.SIGKILL
    assert Process.of(int((tmp_path / "pid").read_text())) is None
