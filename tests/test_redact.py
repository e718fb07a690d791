"""Secrets: none in what is printed, logged or saved, wherever it comes from."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from commands import ROOT, rollcall
from hypothesis import given
from hypothesis import strategies as st
from runs import finish, make_run, metric_rows
from scored import a_prompt, completions_of

from rollcall.base import redact as module
from rollcall.base.errors import ConfigError
from rollcall.base.journal import Journal
from rollcall.base.redact import (
    REDACTED,
    GuardedStream,
    OutputError,
    Redactor,
    harmless,
    is_secret,
    redact,
    redact_end,
    redact_env,
    redact_source,
    remember,
)
from rollcall.config import FunctionReward, dump_config, load_config, parse_config
from rollcall.observe.sinks import WandbSink
from rollcall.reward.scorer import Scorer

SECRET = "wandb-5e77a9-not-for-you"


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_remembered", set())


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_PASSWORD", "ROLLCALL_TOKEN", "my_key"],
)
def test_a_name_that_ends_as_secrets_do_is_one(name: str) -> None:
    assert is_secret(name)


def test_what_stands_for_a_secret_in_help_is_shown_as_it_is() -> None:
    for text in (
        "ROLLCALL_TOKEN=... rollcall node",
        "rollcall train [FILE] [KEY=VALUE]...",
        "rollcall train [FILE] [KEY=VALUE...]",
        "  KEY=VALUE  keys to set",
    ):
        assert redact(text) == text
    assert redact("A_KEY=VALUES") == f"A_KEY={REDACTED}"
    assert redact("ROLLCALL_TOKEN=...1f rollcall node") == f"ROLLCALL_TOKEN={REDACTED} rollcall node"


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "NCCL_DEBUG", "RAY_AUTH_TOKEN_PATH", "KEYBOARD", "PATH"]
)
def test_a_name_that_only_sounds_like_it_is_none(name: str) -> None:
    assert not is_secret(name)


def test_the_value_of_a_secret_variable_is_redacted_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    assert (
        redact(f"401 for key {SECRET}, see https://x/?k={SECRET}.")
        == f"401 for key {REDACTED}, see https://x/?k={REDACTED}."
    )


@pytest.mark.parametrize("spell", [json.dumps, lambda value: urllib.parse.quote(value, safe=""), str])
def test_a_secret_is_found_however_it_is_spelt(spell: Any) -> None:
    value = 'a"b/c d\ne-123'
    remember([value])
    assert redact(spell(value)).strip('"') == REDACTED


def test_an_assignment_is_redacted_though_nobody_knows_the_value() -> None:
    assert (
        redact("env: OTHER_TOKEN=abc123 'X_KEY=1' MODE=fast")
        == f"env: OTHER_TOKEN={REDACTED} 'X_KEY={REDACTED}' MODE=fast"
    )


def test_a_value_that_is_too_short_is_redacted_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "on")
    assert redact("turned on") == "turned on"
    assert redact_env({"MY_KEY": "on", "MODE": "on"}) == {"MY_KEY": REDACTED, "MODE": "on"}


def test_a_variable_that_contains_a_secret_is_one() -> None:
    remember([SECRET])
    assert redact_env({"URL_OF_IT": f"https://me:{SECRET}@host", "HOST": "host"}) == {
        "URL_OF_IT": REDACTED,
        "HOST": "host",
    }


@given(st.text("abc \n", max_size=30), st.text("abc \n", max_size=30), st.lists(st.integers(0, 90), max_size=6))
def test_a_text_in_pieces_is_redacted_as_the_whole_is(before: str, after: str, cuts: list[int]) -> None:
    remember([SECRET])
    text = before + SECRET + after
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    redactor = Redactor()
    pieces = [redactor.feed(text[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    assert "".join([*pieces, redactor.end()]) == before + REDACTED + after


def test_an_assignment_that_arrives_in_pieces_is_redacted() -> None:
    redactor = Redactor()
    shown = redactor.feed("first\nMY_KEY=hun") + redactor.feed("ter2hunter2\nlast") + redactor.end()
    assert shown == f"first\nMY_KEY={REDACTED}\nlast"


def test_a_secret_of_several_lines_that_arrives_in_pieces_is_redacted() -> None:
    remember(["-----BEGIN KEY\nabcdef\n-----END"])
    redactor = Redactor()
    shown = [redactor.feed(piece) for piece in ("key: -----BEGIN KEY\n", "abcdef\n", "-----END\nnext\n")]
    assert "".join([*shown, redactor.end()]) == f"key: {REDACTED}\n{REDACTED}\n{REDACTED}\nnext\n"


@pytest.mark.parametrize("secret", [SECRET, "MY_KEY=hunter2hunter2", "https://me:hunter2hunter2@host"])
@pytest.mark.parametrize("shift", [0, 5, 20])
def test_a_secret_on_the_edge_of_a_line_without_an_end_is_redacted(
    secret: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the end of a line is bounded; the cut is never inside a secret."""
    remember([SECRET])
    longest_line, longest_secret, piece = 1 << 14, 1 << 10, 1 << 10
    monkeypatch.setattr("rollcall.base.redact.LONGEST_LINE", longest_line)
    monkeypatch.setattr("rollcall.base.redact.LONGEST_SECRET", longest_secret)
    before = longest_line - longest_secret - shift
    text = "://" + "x " * (before // 2) + secret + " y" * longest_line
    redactor, shown, longest = Redactor(), "", 0
    for start in range(0, len(text), piece):
        shown += redactor.feed(text[start : start + piece])
        longest = max(longest, len(redactor._held))
    shown += redactor.end()
    assert "hunter2" not in shown and SECRET not in shown and REDACTED in shown
    assert shown == redact(text) and longest <= longest_line + piece


def test_the_end_of_a_text_does_not_begin_with_the_rest_of_a_secret() -> None:
    remember([SECRET])
    assert redact_end(f"a {SECRET}{'b' * 10}", 14) == f"{REDACTED}{'b' * 10}"[-14:]
    assert redact_end("short", 100) == "short"


def test_a_long_text_of_letters_and_dots_is_redacted_in_moments() -> None:
    text = "a." * 50_000 + "://" + "a-" * 50_000
    assert redact(text) == text


def test_a_guarded_stream_redacts_and_is_otherwise_the_stream_beneath() -> None:
    remember([SECRET])
    beneath = io.StringIO()
    stream: Any = GuardedStream(beneath)
    print("key", SECRET, file=stream)
    stream.writelines([SECRET, "\n"])
    assert beneath.getvalue() == f"key {REDACTED}\n{REDACTED}\n"
    assert stream.isatty() is False


def test_a_guarded_stream_controls_no_terminal_and_says_where_it_cannot_write(tmp_path: Path) -> None:
    beneath = io.StringIO()
    stream = GuardedStream(beneath)
    stream.write("a\x1b[31m red\x1b]0;title\x07 name\x9b2J\x1b\n\t\u3000")
    stream.styled.write("\x1b[1mown\x1b[0m")
    assert beneath.getvalue() == "a red name2J\n\t\u3000\x1b[1mown\x1b[0m"
    orders = "\u202e\u2066\u200f\u061c\u200b\u2060\ufeff\U000e0041"
    assert harmless(f"a{orders}b\u200d\u200c\u00ad") == "ab\u200d\u200c\u00ad"
    full = mock.Mock(**{"write.side_effect": OSError(errno.ENOSPC, "No space left on device")})
    with pytest.raises(OutputError, match=r"cannot write to standard output \(No space left on device\)"):
        print("text", file=GuardedStream(full))


def test_a_command_that_cannot_write_its_output_says_so_in_one_line_and_one_whose_output_is_closed_is_silent() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rollcall", "version"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=600)
    assert ended.returncode == 1 and ended.stderr.startswith("error: cannot write to standard output (No space left")
    assert len(ended.stderr.splitlines()) == 1
    closed = ["sh", "-c", '"$@" >&-', "sh", *command]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_dumped_run_has_no_secrets_and_keeps_the_rest() -> None:
    config = parse_config({"cluster": {"env": {"A_KEY": "k", "MODE": "fast"}, "env_pass": ["B_KEY"]}})
    cluster = yaml.safe_load(dump_config(config))["cluster"]
    assert cluster["env"] == {"A_KEY": REDACTED, "MODE": "fast"} and cluster["env_pass"] == ["B_KEY"]
    assert config.cluster and config.cluster.env["A_KEY"] == "k"


def test_the_run_file_that_a_run_saves_has_no_secrets(tmp_path: Path) -> None:
    config = make_run(tmp_path, "trainer.steps=1")
    section = parse_config({"cluster": {"env": {"A_KEY": SECRET}}}).cluster
    config = config.model_copy(update={"cluster": section})
    finish(config)
    saved = load_config(config.run.dir / "run.yaml")
    assert saved.cluster and saved.cluster.env == {"A_KEY": REDACTED}
    assert not files_with(SECRET, config.run.dir)


def test_what_a_reward_raises_is_saved_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "import os\ndef score(prompt, completion, answer, metadata):\n"
        "    if answer != 'a':\n        return 0.0\n"
        "    raise RuntimeError('refused: ' + os.environ['JUDGE_API_KEY'])\n"
    )
    (tmp_path / "judge_of_test_redact.py").write_text(code)
    reward = [{"type": "function", "path": "judge_of_test_redact:score", "env": ["JUDGE_API_KEY"]}]
    config = make_run(tmp_path / "run", "trainer.steps=1", reward=reward)
    summary = finish(config)
    assert summary["reward_failures"][0]["why"].endswith(f"refused: {REDACTED}")
    with Journal(config.run.dir / "journal") as journal:
        assert REDACTED in str([score.errors for group in journal.read(1) for score in group.scores])
    assert metric_rows(config) and not files_with(SECRET, config.run.dir)


def test_what_a_reward_prints_has_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.setenv("JUDGE_DB", "postgres://me:hunter2-and-more@host/rows")
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "import os, sys\ndef score(completion):\n"
        "    print('key', os.environ['JUDGE_API_KEY'])\n    print('at', os.environ['JUDGE_DB'], file=sys.stderr)\n"
        "    raise RuntimeError('refused: hunter2-and-more')\n"
    )
    (tmp_path / "loud_judge_of_test_redact.py").write_text(code)
    reward = FunctionReward(path="loud_judge_of_test_redact:score", env=["JUDGE_API_KEY", "JUDGE_DB"])
    with Scorer([reward], num_workers=1, model_rewards={}) as scorer:
        (score,) = asyncio.run(scorer.score(a_prompt(), completions_of("a")))
    printed = capfd.readouterr().err
    assert f"key {REDACTED}\nat {REDACTED}\n" in printed
    assert score.errors["score"].endswith(f"refused: {REDACTED}")


def test_a_tracker_gets_the_config_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def init(**options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    WandbSink(parse_config({"cluster": {"env": {"A_KEY": SECRET}}}), tmp_path)
    assert given["config"]["cluster"]["env"] == {"A_KEY": REDACTED}


def test_the_config_command_prints_no_secrets(tmp_path: Path) -> None:
    path = run_file(tmp_path, f"cluster: {{env: {{A_KEY: {SECRET}, MODE: fast}}}}")
    result = rollcall("config", str(path), cwd=tmp_path)
    assert result.returncode == 0 and "MODE: fast" in result.stdout and f"A_KEY: {REDACTED}" in result.stdout
    assert SECRET not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "cluster: {env: {A_KEY: 4815162342}}",
        "cluster: {env: {A_KEY: 4815162342, MODE: [}}",
        "run: {name: [4815162342]}",
    ],
)
def test_a_refused_run_file_is_not_quoted_with_its_secrets(tmp_path: Path, text: str) -> None:
    result = rollcall("config", str(run_file(tmp_path, text)), cwd=tmp_path, B_TOKEN="4815162342")
    assert result.returncode == 1 and "error: " in result.stderr and "Traceback" not in result.stderr
    assert "4815162342" not in result.stderr


def test_a_traceback_shows_no_secrets(tmp_path: Path) -> None:
    path = tmp_path / SECRET
    result = rollcall("config", str(path), "--debug", cwd=tmp_path, B_TOKEN=SECRET)
    assert "Traceback" in result.stderr and REDACTED in result.stderr and SECRET not in result.stderr


def test_a_piece_of_yaml_is_redacted_by_names() -> None:
    assert redact_source("in line 3: {A_KEY: abc, MODE: fast}") == f"in line 3: {{A_KEY: {REDACTED}, MODE: fast}}"


@pytest.mark.parametrize(
    "cluster",
    [
        f"{{env: 'A_KEY: {SECRET}'}}",
        f"{{env: 'A_KEY={SECRET}'}}",
        f"{{env: [A_KEY={SECRET}]}}",
        f"{{env: [{{name: A_KEY, value: {SECRET}}}]}}",
        f"{{env: {{A_KEY: [{SECRET}]}}}}",
        f"{{env: {{A_KEY: {{value: {SECRET}}}}}}}",
        f"{{env: {{a_key={SECRET}: 1}}}}",
        f"{{env: '{SECRET}'}}",
        f"{{node_env: {{0: 'A_KEY: {SECRET}'}}}}",
        f"{{node_env: 'A_KEY: {SECRET}'}}",
        f"'env: {{A_KEY: {SECRET}}}'",
        f"[{{env: {{A_KEY: {SECRET}}}}}]",
        f"{{component_placement: 'A_KEY: {SECRET}'}}",
        f"{{num_nodes: {{A_KEY: {SECRET}}}}}",
    ],
)
def test_variables_in_a_wrong_shape_are_refused_without_their_secrets(tmp_path: Path, cluster: str) -> None:
    path = run_file(tmp_path, f"cluster: {cluster}")
    with pytest.raises(ConfigError, match="cluster") as refused:
        load_config(path)
    assert SECRET not in str(refused.value)


def test_a_secret_in_another_sections_value_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"actor": {"lr": {"HF_TOKEN": SECRET}}, "trainer": {"steps": f"HF_TOKEN={SECRET}"}})
    assert SECRET not in str(refused.value) and "actor.lr={'HF_TOKEN': '<redacted>'}" in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "cluster={env: {A_KEY: abc}}", "cluster={node_env: {0: {A_KEY: abc}}}", "cluster.env=A_KEY: abc", "cluster.env=[A_KEY=abc]",
        "cluster.env={A_KEY: abc, MODE: [}", "cluster={env: [{name: A_KEY, value: abc}]}", "cluster.env.A_KEY=",
    ],
)  # fmt: skip
def test_a_secret_on_the_command_line_is_found_in_any_shape(override: str) -> None:
    with pytest.raises(ConfigError, match="A_KEY looks like a secret") as refused:
        load_config(None, [override])
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize(
    "override", ["cluster.env.A_KEY=abc", "cluster.env={A_KEY: abc}", "cluster.node_env.0.A_KEY=abc"]
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(ConfigError, match="A_KEY looks like a secret") as refused:
        load_config(None, [override])
    assert "abc" not in str(refused.value)


def test_other_variables_may_be_given_on_the_command_line() -> None:
    section = load_config(None, ["cluster.env.NCCL_DEBUG=WARN"]).cluster
    assert section and section.env == {"NCCL_DEBUG": "WARN"}


def files_with(text: str, folder: Path) -> list[str]:
    assert ROOT not in folder.parents
    found = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return [str(path) for path in found if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://me:hunter2@host/a", f"https://me:{REDACTED}@host/a"),
        ("s3://:hunter2@host:80/a@b", f"s3://:{REDACTED}@host:80/a@b"),
        ("x=https://me:hun@ter2@host", f"x=https://me:{REDACTED}@host"),
        ("No such file: 'https:/me:hunter2@host/a'", f"No such file: 'https:/me:{REDACTED}@host/a'"),
        ("https://hunter2@host/a", f"https://{REDACTED}@host/a"),
        ("https://host/a?n=1&access_token=hunter2&b=2", f"https://host/a?n=1&access_token={REDACTED}&b=2"),
        ("https://host/a?X-Amz-Signature=hunter2", f"https://host/a?X-Amz-Signature={REDACTED}"),
        ("http://[::1]:80/a, ssh://git@host/a, https://host:443/a?b=c@d", None),
        ("https://host/@user/a:b@c", None),
    ],
)
def test_a_url_is_shown_without_its_password(text: str, wanted: str | None) -> None:
    assert redact(text) == (wanted or text)


def test_a_url_that_arrives_in_pieces_is_redacted() -> None:
    redactor = Redactor()
    shown = [redactor.feed(piece) for piece in ("get https://me:hun", "ter2@host\nnext")]
    assert "".join([*shown, redactor.end()]) == f"get https://me:{REDACTED}@host\nnext"


def test_the_places_in_a_dumped_run_have_no_passwords_and_its_prompts_are_left_as_they_are() -> None:
    url = "https://me:hunter2@host/x"
    rewards = [{"type": "model", "path": url}, {"type": "exact"}]
    data = {"train": url, "val": url, "system": f"Never open {url}"}
    config = parse_config({"model": {"path": url}, "data": data, "reward": rewards})
    saved = yaml.safe_load(dump_config(config))
    hidden = f"https://me:{REDACTED}@host/x"
    assert [saved["model"]["path"], saved["data"]["train"], saved["data"]["val"], saved["reward"][0]["path"]] == [
        hidden
    ] * 4
    assert saved["data"]["system"] == data["system"] and config.model.path == url
