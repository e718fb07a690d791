"""Episodes that a program drives: what it asks becomes the episode, and whatever it does, the episode ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from pathlib import Path
from typing import Any

import programs
import pytest
from endpoints import chat_tokenizer
from programs import TWO_TURNS, play

from rollcall.base.errors import ConfigError
from rollcall.base.process_table import Process, living, session_of
from rollcall.base.types import Completion, EndReason
from rollcall.config.environments import AgentEnvironment
from rollcall.environments.host import make_environments


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


def played(tokenizer: Any, command: str, **options: Any) -> Completion:
    (completion,), _ = play(tokenizer, command, **options)
    assert completion.episode is not None
    return completion


def test_what_a_program_asks_becomes_the_episode(tmp_path: Path, tokenizer: Any) -> None:
    (completion,), writer = play(tokenizer, programs.write(tmp_path, TWO_TURNS))
    episode = completion.episode
    assert episode is not None and (episode.ended, episode.error) == (EndReason.DONE, "")
    assert (episode.reward, episode.metrics) == (0.5, {"steps": 2.0, "requests_refused": 0.0})
    assert episode.prompt_ids is not None and tokenizer.decode(episode.prompt_ids) == "[user]hello<eos>[assistant]"
    assert tokenizer.decode(completion.token_ids[completion.mask]) == "27 read<eos>66 read<eos>"
    assert [turn.observation for turn in episode.turns] == ["go on", ""] and episode.branches == ()
    before = [*episode.prompt_ids.tolist(), *completion.token_ids.tolist()]
    assert writer.prompts[1] == before[: len(writer.prompts[1])] and len(set(writer.seeds)) == 2
    assert episode.opening == "", "the row has a prompt"


def test_where_only_the_program_has_the_task_its_first_request_is_kept_to_be_shown(
    tmp_path: Path, tokenizer: Any
) -> None:
    begins = TWO_TURNS.replace('row["prompt"]', "'a task'")
    episode = played(tokenizer, programs.write(tmp_path, begins), text="").episode
    assert episode is not None and episode.opening == "a task"


def test_episodes_run_side_by_side_each_with_its_own_row(tmp_path: Path, tokenizer: Any) -> None:
    body = 'status, answer = chat([{"role": "user", "content": str(row["level"])}])\nprint(json.dumps({"reward": row["level"]}))'
    completions, writer = play(tokenizer, programs.write(tmp_path, body), count=4)
    assert [one.episode.reward for one in completions if one.episode] == [0, 1, 2, 3]
    assert [tokenizer.decode(one.episode.prompt_ids)[6] for one in completions if one.episode] == ["0", "1", "2", "3"]
    assert len(set(writer.sessions)) == 4


def test_a_reward_can_be_posted(tmp_path: Path, tokenizer: Any) -> None:
    body = 'chat([{"role": "user", "content": "x"}])\nprint(post("/reward", {"reward": 2}))\nprint("{not json")'
    completion = played(tokenizer, programs.write(tmp_path, body))
    assert completion.episode and completion.episode.reward == 2.0 and completion.episode.ended is EndReason.DONE


def test_a_reward_that_no_float_holds_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    body = """
chat([{"role": "user", "content": "x"}])
large = "1" + "0" * 400
for text in ('{"reward": %s}' % large, '{"reward": 1, "metrics": {"a": %s}}' % large, '{"reward": 1e16}'):
    assert post("/reward", text.encode())[0] == 400
names = ["\x1b[2J", "len<100", "", "<part>", *map(str, range(200))]
assert post("/reward", {"reward": 2, "metrics": {name: 1 for name in names}})[0] == 200
print('{"reward": %s}' % large)
"""
    episode = played(tokenizer, programs.write(tmp_path, body)).episode
    assert episode and (episode.ended, episode.reward) == (EndReason.DONE, 2.0), episode
    assert [*episode.metrics][:3] == ["\N{REPLACEMENT CHARACTER}[2J", "len<100", "metrics_dropped"]
    assert episode.metrics["requests_refused"] == 4.0 and episode.metrics["metrics_dropped"] == 204 - 99


def test_a_program_that_rewrites_its_history_has_branches(tmp_path: Path, tokenizer: Any) -> None:
    body = """
ask = {"role": "user", "content": "begin"}
_, first = chat([ask])
chat([ask, first, {"role": "user", "content": "more"}])
chat([{"role": "user", "content": "summary: " + first["content"]}])
"""
    completion = played(tokenizer, programs.write(tmp_path, body))
    assert completion.episode and len(completion.episode.branches) == 1 and len(completion.episode.turns) == 2
    (branch,) = completion.episode.branches
    assert tokenizer.decode(branch.prompt_ids).startswith("[user]summary: 27 read<eos>") and branch.mask.all()


def test_a_program_that_fails_ends_its_episode_with_its_words(tmp_path: Path, tokenizer: Any) -> None:
    body = 'chat([{"role": "user", "content": "x"}])\nraise ValueError("my own mistake")'
    completion = played(tokenizer, programs.write(tmp_path, body))
    assert completion.episode and completion.episode.ended is EndReason.ERROR and len(completion.token_ids)
    assert "exit status 1" in completion.episode.error and "my own mistake" in completion.episode.error


def test_without_room_for_temporary_files_an_episode_fails_and_says_so(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = programs.write(tmp_path, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    completion = played(tokenizer, command)
    assert completion.episode and completion.episode.ended is EndReason.ERROR
    assert "folder for temporary files" in completion.episode.error and "missing" in completion.episode.error


def test_a_program_that_never_calls_has_failed(tmp_path: Path, tokenizer: Any) -> None:
    completion = played(tokenizer, programs.write(tmp_path, 'print("nothing to do")'))
    assert completion.episode and completion.episode.ended is EndReason.ERROR and not len(completion.token_ids)
    assert "without sending a request to OPENAI_BASE_URL" in completion.episode.error


def test_a_program_whose_requests_all_fail_is_told_why(tmp_path: Path, tokenizer: Any) -> None:
    def broken(prompt: str) -> str:
        raise RuntimeError("the engine is broken")

    failed = 'assert chat([{"role": "user", "content": "x"}])[0] == 500'
    episode = played(tokenizer, programs.write(tmp_path, failed), says=broken).episode
    assert episode and episode.ended is EndReason.ERROR and episode.metrics["requests_refused"] == 0
    assert episode.error.endswith("the last error: the server failed to answer this request; its log has the reason")
    refused = 'assert post("/chat/completions", {"messages": 7})[0] == 400'
    episode = played(tokenizer, programs.write(tmp_path, refused)).episode
    assert episode and "none of the program's requests was answered; the last error: messages" in episode.error


def test_a_reward_that_cannot_be_read_is_not_a_request(tmp_path: Path, tokenizer: Any) -> None:
    episode = played(tokenizer, programs.write(tmp_path, """print('{"reward": much}')""")).episode
    assert episode and episode.ended is EndReason.ERROR
    assert "without sending a request to OPENAI_BASE_URL; stderr: (nothing)" in episode.error


def test_a_program_has_tools_though_its_rows_are_not_chats(tmp_path: Path, tokenizer: Any) -> None:
    body = """
add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_, answer = chat([{"role": "user", "content": row["prompt"]}], tools=[add])
print(json.dumps({"reward": len(answer["tool_calls"])}))
"""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    episode = played(tokenizer, programs.write(tmp_path, body), says=lambda prompt: call).episode
    assert episode and (episode.ended, episode.reward) == (EndReason.DONE, 1.0), episode
    assert [one.name for one in episode.turns[0].calls] == ["add"]


def test_a_program_that_calls_forever_is_told_and_ends(tmp_path: Path, tokenizer: Any) -> None:
    body = """
while True:
    status, answer = chat([{"role": "user", "content": "x"}])
    if status != 200:
        print(json.dumps({"reward": 1.0, "metrics": {"status": status}}))
        sys.exit(3)
"""
    completion = played(tokenizer, programs.write(tmp_path, body), max_turns=3)
    episode = completion.episode
    assert episode and episode.ended is EndReason.TURNS and episode.reward == 1.0 and episode.metrics["status"] == 400
    assert len(episode.turns) + len(episode.branches) == 3


def test_a_program_that_does_not_listen_is_killed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.environments.agent.GRACE_S", 0.2)
    body = 'while True:\n    chat([{"role": "user", "content": "x"}])'
    completion = played(tokenizer, programs.write(tmp_path, body), max_turns=2)
    assert completion.episode and completion.episode.ended is EndReason.TURNS


def test_tokens_of_all_turns_are_bounded(tmp_path: Path, tokenizer: Any) -> None:
    body = """
messages = [{"role": "user", "content": "x"}]
while True:
    status, answer = chat(messages)
    if status != 200:
        break
    messages += [answer, {"role": "user", "content": "more"}]
"""
    completion = played(tokenizer, programs.write(tmp_path, body), max_tokens=60, max_turns=50)
    assert completion.episode and completion.episode.ended is EndReason.TOKENS and len(completion.token_ids) <= 60


@pytest.mark.parametrize(("max_tokens", "ended"), [(4, EndReason.TOKENS), (60, EndReason.DONE)])
def test_an_answer_that_the_limit_of_tokens_cut_short_is_told(
    tmp_path: Path, tokenizer: Any, max_tokens: int, ended: EndReason
) -> None:
    command = programs.write(tmp_path, 'chat([{"role": "user", "content": "x"}])')
    completion = played(tokenizer, command, max_tokens=max_tokens)
    assert completion.episode and completion.episode.ended is ended and completion.is_cut is (max_tokens == 4)


def test_a_request_that_is_refused_is_not_a_turn(tmp_path: Path, tokenizer: Any) -> None:
    body = """
for _ in range(3):
    assert chat([{"role": "user", "content": "y" * 3000}])[1]["code"] == "context_length_exceeded"
assert chat([{"role": "user", "content": "x"}])[0] == 200
"""
    completion = played(tokenizer, programs.write(tmp_path, body), max_turns=2)
    assert completion.episode and completion.episode.ended is EndReason.DONE, completion.episode


def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path: Path, tokenizer: Any) -> None:
    body = f"""
import subprocess
open({str(tmp_path / "sid")!r}, "w").write(str(os.getsid(0)))
subprocess.Popen(["sleep", "600"]); subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(600)
"""
    command = programs.write(tmp_path, body)
    completion = played(tokenizer, f"{command}; true", episode_timeout_s=8)
    assert completion.episode and completion.episode.ended is EndReason.TIMEOUT and "8" in completion.episode.error
    sid = int((tmp_path / "sid").read_text())
    assert not [process for process in living() if session_of(process.pid) == sid]


def test_a_program_that_leaves_a_daemon_behind_has_ended_and_the_daemon_ends_too(
    tmp_path: Path, tokenizer: Any
) -> None:
    body = f"""
chat([{{"role": "user", "content": "x"}}])
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        os.write(writer, b"x")
        time.sleep(600)  # with the program's own stdout
    os._exit(0)
os.wait(), os.read(reader, 1)
print(json.dumps({{"reward": 1}}))
"""
    episode = played(tokenizer, programs.write(tmp_path, body)).episode
    assert episode and (episode.ended, episode.reward) == (EndReason.DONE, 1.0), episode
    assert Process.of(int((tmp_path / "pid").read_text())) is None


def test_a_program_that_eats_memory_ends_its_own_episode(tmp_path: Path, tokenizer: Any) -> None:
    completion = played(tokenizer, programs.write(tmp_path, "held = bytearray(2 << 30)"), memory_mb=256)
    assert completion.episode and completion.episode.ended is EndReason.ERROR
    assert "MemoryError" in completion.episode.error


def test_rubbish_is_counted_and_the_episode_goes_on(tmp_path: Path, tokenizer: Any) -> None:
    body = """
for rubbish in (b"", b"[[[[", b'{"messages": 7}', {"messages": [{"role": "user", "content": "x"}], "n": -1}):
    assert post("/chat/completions", rubbish)[0] == 400
assert post("/nothing", {})[0] == 404
assert chat([{"role": "user", "content": "x"}])[0] == 200
"""
    completion = played(tokenizer, programs.write(tmp_path, body))
    assert completion.episode and completion.episode.ended is EndReason.DONE, completion.episode
    assert completion.episode.metrics["requests_refused"] == 5


def test_a_program_gets_only_the_variables_that_are_named(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hidden")
    monkeypatch.setenv("MY_SETTING", "seen")
    body = f"""
json.dump(dict(os.environ), open({str(tmp_path / "env.json")!r}, "w"))
chat([{{"role": "user", "content": "x"}}])
"""
    played(tokenizer, programs.write(tmp_path, body), env=["MY_SETTING"])
    given = json.loads((tmp_path / "env.json").read_text())
    assert given["MY_SETTING"] == "seen" and "MY_SECRET_TOKEN" not in given
    assert not os.path.exists(given["TMPDIR"])
    with pytest.raises(ConfigError, match="NOT_SET"):
        make_environments(AgentEnvironment(run="true", env=["NOT_SET"]), chat_template=None)


def test_the_key_of_an_episode_opens_nothing_once_it_has_ended(tmp_path: Path, tokenizer: Any) -> None:
    body = f"""
if row["level"] == 0:
    chat([{{"role": "user", "content": "x"}}])
    json.dump(key, open({str(tmp_path / "new")!r}, "w"))
    os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "first")!r})
    while not os.path.exists({str(tmp_path / "second")!r}):
        time.sleep(0.02)
else:
    while not os.path.exists({str(tmp_path / "first")!r}):
        time.sleep(0.02)
    other = json.load(open({str(tmp_path / "first")!r}))
    open({str(tmp_path / "second")!r}, "w").close()
    status = 200
    while status == 200:
        status = post("/models", {{}}, key=other)[0]
        status = 200 if status == 405 or status == 404 else status
        time.sleep(0.02)
    chat([{{"role": "user", "content": "x"}}])
    print(json.dumps({{"reward": 1, "metrics": {{"ended": status}}}}))
"""
    completions, _ = play(tokenizer, programs.write(tmp_path, body), count=2)
    episode = completions[1].episode
    assert episode and episode.metrics["ended"] == 401


def test_the_run_decides_how_tokens_are_sampled(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    body = 'chat([{"role": "user", "content": "x"}], temperature=0, top_p=0.1, seed=3, max_tokens=2, stop=["q"])'
    (completion,), writer = play(tokenizer, programs.write(tmp_path, body))
    (asked,) = writer.asked
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.stop_strings) == (1.0, 1.0, 2, ("q",))
    assert writer.seeds == [0] and "seed, temperature, top_p" in caplog.text and completion.episode


def test_a_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The pipe that its shell watches has no writer left when that process is gone."""
    from rollcall.environments.program import _LIMITED

    script = _LIMITED.format(
        kilobytes=1 << 20, command=f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 600"
    )

    async def work() -> int:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", script, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.02)
        assert process.stdin is not None
        process.stdin.close()
        return await asyncio.wait_for(process.wait(), 300)

    assert asyncio.run(work()) == -9


def test_an_endpoint_that_is_closed_answers_nobody(tmp_path: Path, tokenizer: Any) -> None:
    body = f'json.dump(base.port, open({str(tmp_path / "port")!r}, "w"))\nchat([{{"role": "user", "content": "x"}}])'
    played(tokenizer, programs.write(tmp_path, body))
    line = http.client.HTTPConnection("127.0.0.1", json.loads((tmp_path / "port").read_text()), timeout=10)
    with pytest.raises(OSError):
        line.request("GET", "/v1/models")
