"""`rollcall serve`: which model, which key, and the command until it is stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import openai
import pytest
from commands import WAIT_S, start
from tiny import save_model

from rollcall.base.errors import ConfigError
from rollcall.config import Config
from rollcall.nodes.http_server import listen
from rollcall.run.serving import plan_serving, read_key, serve


def test_a_directory_a_name_and_a_run_are_each_a_model(tmp_path: Path, undisturbed: Config) -> None:
    folder = save_model(tmp_path / "mine")
    plan = plan_serving(str(folder), overrides=["rollout.max_running=7"], engine="vllm")
    assert (plan.config.run.name, plan.model_path) == ("mine", str(folder))
    assert (plan.config.rollout.max_running, plan.config.rollout.engine) == (7, "vllm")
    assert plan_serving("builtin:arithmetic", overrides=[]).config.run.name == "builtin:arithmetic"
    run = plan_serving(str(undisturbed.run.dir), overrides=[])
    assert run.origin == "trained model" and run.model_path == str(undisturbed.run.dir / "model")


def test_a_key_comes_from_a_file_or_a_variable_and_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-that-is-long-enough\n")
    assert read_key(file) == "a-key-that-is-long-enough" and read_key(None) is None
    monkeypatch.setenv("ROLLCALL_SERVE_KEY", "another-key-that-is-long")
    assert read_key(None) == "another-key-that-is-long"
    for bad in ("", "short", "with a space in it 123"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="at least 16"):
            read_key(file)


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    command = start("serve", "builtin:arithmetic", "--port", "0", cwd=tmp_path)
    try:
        end_s = time.monotonic() + WAIT_S
        while command.stdout.count("\n") < 2 and command.poll() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        base, key = command.stdout.split()
        client = openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=WAIT_S)
        answer = client.completions.create(model="builtin:arithmetic", prompt="12+34=", max_tokens=4, temperature=0)
        assert answer.choices[0].text and set(answer.choices[0].text) <= set("0123456789+=")
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="builtin:arithmetic", messages=[{"role": "user", "content": "1"}])
        os.kill(command.pid, signal.SIGINT)
        assert command.wait() == 130 and "stopped by Ctrl-C" in command.stderr and "Traceback" not in command.stderr
    finally:
        command.kill()


def test_a_port_that_is_taken_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    plan = plan_serving(str(tmp_path / "no-such-model"), overrides=[])
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="cannot be used .*choose another port"):
        serve(plan, host="127.0.0.1", port=taken.getsockname()[1], key=None, show=print)
