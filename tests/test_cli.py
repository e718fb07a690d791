"""The `rollcall` command as a user runs it: in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from commands import Command, rollcall, start
from tiny import save_model
from typer.testing import CliRunner

from rollcall import __version__
from rollcall.base.redact import redact
from rollcall.cli.main import app
from rollcall.config import load_config

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
WAIT_S = 600.0
SUMMARY_KEYS = (
    "steps", "seconds", "tokens_generated", "tokens_trained", "rollout_tokens_per_s", "train_tokens_per_s", "step_s",
    "logprob_mismatch", "peak_memory_gib",
)  # fmt: skip


def started(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it, imports and all."""
    return subprocess.run(
        [sys.executable, "-m", "rollcall", *arguments],
        cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


def environment(cwd: Path) -> dict[str, str]:
    extra = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **extra, "OMP_NUM_THREADS": "1"}


def write_run(folder: Path, **sections: dict[str, Any]) -> Path:
    """A run file for a tiny model and sums, both written beside it."""
    save_model(folder / "tiny-model")
    for name, firsts in {"sums.jsonl": range(4), "val.jsonl": range(4, 8)}.items():
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in firsts for b in range(4)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: dict[str, Any] = {
        "run": {"name": "tiny", "dir": "runs/tiny"},
        "model": {"path": str(folder / "tiny-model"), "device": "cpu"},
        "data": {"train": "sums.jsonl", "val": "val.jsonl", "prompts_per_step": 4},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 4},
        "trainer": {"steps": 2, "save_every": 1, "num_threads": 1},
    }
    for name, section in sections.items():
        run[name] = {**run.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def trained_draws(run_dir: Path) -> list[int]:
    rows = [json.loads(line) for line in (run_dir / "journal" / "trained.jsonl").read_text().splitlines()]
    return [draw for row in {row["step"]: row for row in rows}.values() for draw in row["draws"]]


def test_help_leads_a_stranger_to_the_demo_the_examples_and_the_tests(tmp_path: Path) -> None:
    result = rollcall("--help", cwd=tmp_path)
    assert result.returncode == 0
    first = ("make demo", "make test", "rollcall train", "examples/gsm8k.yaml", "docs/configuration.md")
    for words in (*first, "rollcall node", "rollcall check", "rollcall submit", "docs/clusters.md"):
        assert words in result.stdout


def commands() -> list[str]:
    """Every verb of the command line, such as "train" and "job list"."""
    nested = [f"{group.name} {one.name}" for group in app.registered_groups for one in _app(group).registered_commands]
    return [*(one.name or "" for one in app.registered_commands), *nested]


def _app(group: Any) -> Any:
    return group.typer_instance


def test_these_are_the_verbs() -> None:
    assert sorted(commands()) == [
        "check", "compare", "config", "data", "debug", "doctor", "down", "env", "eval", "fetch-model", "finish", "gather", "here", "init", "job list", "job logs",
        "job status", "job stop",
        "launch down", "launch dstack", "launch init", "launch kuberay", "launch list", "launch logs", "launch skypilot", "launch slurm",
        "launch ssh", "launch status", "merge", "node", "plan", "prepare", "profile", "recover", "reward test", "serve", "simulate", "ssh", "stacks", "status", "submit", "trace", "train", "tunnel",
            "upload",
        "version", "view",
    ]  # fmt: skip


@mock.patch("rollcall.base.redact._remembered", set())  # the secrets of other tests
@pytest.mark.parametrize("command", commands())
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="rollcall")
    assert result.exit_code == 0
    assert re.search(rf"^ {{4,6}}(?:[A-Z_]+=\S+ )?rollcall {command}\b", result.stdout, re.MULTILINE), result.stdout
    assert redact(result.stdout) == result.stdout  # nothing in it is taken for a secret
    assert command == "version" or "--debug" in result.stdout


def test_what_needs_no_model_does_not_import_torch(tmp_path: Path) -> None:
    commands = [["--help"], ["train", "--help"], ["config", "actor.lr=1e-5"], ["version"]]
    code = (
        "import sys\nfrom rollcall.cli.main import app\n"
        f"for arguments in {commands}:\n"
        "    app(arguments, standalone_mode=False)\n"
        "    print(arguments, [name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-len(commands) :] == [f"{arguments} []" for arguments in commands]


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["rollcall"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    assert f"rollcall {__version__} " in rollcall("--version", cwd=tmp_path).stdout
    assert f"rollcall {__version__} " in rollcall("version", cwd=tmp_path).stdout


def test_config_prints_a_run_file_that_reads_back_as_the_same_run(tmp_path: Path) -> None:
    result = rollcall("config", str(ROOT / "examples/gsm8k.yaml"), "actor.lr=2e-6", "reward.0.weight=0.5", cwd=tmp_path)
    (tmp_path / "resolved.yaml").write_text(result.stdout)
    resolved = load_config(tmp_path / "resolved.yaml")
    assert resolved == load_config(ROOT / "examples/gsm8k.yaml", ["actor.lr=2e-6", "reward.0.weight=0.5"])
    assert (resolved.actor.lr, resolved.reward[0].weight) == (2e-6, 0.5)


def test_a_first_argument_with_an_equals_sign_overrides_the_embedded_default(tmp_path: Path) -> None:
    result = rollcall("config", "run.name=mine", "trainer.steps=7", cwd=tmp_path)
    resolved = yaml.safe_load(result.stdout)
    assert (resolved["run"]["name"], resolved["trainer"]["steps"]) == ("mine", 7)
    assert resolved["model"]["path"] == "builtin:arithmetic"


def test_a_misspelt_key_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    result = rollcall("config", "rollout.max_tokens=5", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: rollout.max_tokens is not a field; did you mean rollout.max_response_tokens?\n"


def test_a_run_name_does_not_control_the_terminal() -> None:
    result = CliRunner().invoke(app, ["plan", "run.name=a\x1b[31m red\x1b[0m name"])
    assert "a red name: 1 node" in result.stdout and "\x1b" not in result.output


def test_wrong_usage_ends_with_status_2(tmp_path: Path) -> None:
    for arguments in (["trian"], ["train", "--frehs"], ["eval"]):
        result = rollcall(*arguments, cwd=tmp_path)
        assert result.returncode == 2 and "Usage: rollcall" in result.stderr
    split = CliRunner().invoke(app, ["train", "--rollout-split", "foo"])
    assert split.exit_code == 2 and "'foo' is not one of train, eval" in split.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_loads_and_is_short(path: Path) -> None:
    assert load_config(path).run.dir.parent == Path("runs")
    assert len(path.read_text().splitlines()) <= 35


def test_no_two_examples_share_a_run_directory() -> None:
    assert len({load_config(path).run.dir for path in EXAMPLES}) == len(EXAMPLES)


def test_the_arithmetic_example_is_the_embedded_default() -> None:
    assert load_config(ROOT / "examples/arithmetic.yaml") == load_config(), (
        "examples/arithmetic.yaml: copy default.yaml"
    )


def test_data_makes_files_and_says_how_to_use_them(tmp_path: Path) -> None:
    result = rollcall("data", "arithmetic", "--num", "50", "--out", "sums", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "sums/train.parquet").exists() and (tmp_path / "sums/test.parquet").exists()
    assert "50 rows" in result.stdout and "reward: [{type: exact}]" in result.stdout


def bad_runs(folder: Path) -> dict[str, tuple[list[str], str]]:
    run = str(write_run(folder))

    def train(name: str, *overrides: str) -> list[str]:
        return [run, f"run.dir=runs/{name}", *overrides]

    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    (folder / "empty").mkdir()
    tokenizer = save_model(folder / "no-eos", "llama-tied") / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(tokenizer.read_text()).items() if key != "eos_token"}
    tokenizer.write_text(json.dumps(settings))
    return {
        "missing run file": (
            ["none.yaml"],
            "none.yaml does not exist; give a run file or a run directory",
        ),
        "missing data": (train("0", "data.train=none.jsonl"), "data file none.jsonl does not exist"),
        "malformed data": (train("1", "data.train=broken.jsonl"), "broken.jsonl, row 2 is not valid JSON"),
        "overlong prompts": (
            train("2", "data.max_prompt_tokens=2"),
            "all 16 prompts are longer than data.max_prompt_tokens=2",
        ),
        "not a model": (train("3", "model.path=./empty"), "model.path=./empty has no config.json"),
        "no eos token": (train("4", "model.path=./no-eos"), "the tokenizer of ./no-eos has no eos token"),
        "unknown reward": (train("5", "reward=[{type: function, path: none:f}]"), "none"),
        "run.dir inside a file": (
            [run, "run.dir=run.yaml/x"],
            "cannot write to the folder run.yaml: File exists; choose another run.dir",
        ),
    }


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "cases.json").write_text(json.dumps(bad_runs(folder)))
    return folder


@pytest.mark.parametrize(
    "case",
    [
        "missing run file", "missing data", "malformed data", "overlong prompts", "not a model", "no eos token",
        "unknown reward", "run.dir inside a file",
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_message_without_a_traceback(bad: Path, case: str) -> None:
    arguments, message = json.loads((bad / "cases.json").read_text())[case]
    result = rollcall("train", *arguments, cwd=bad)
    assert result.returncode == 1
    assert all(line.startswith(("loading ", "reading ", "starting ")) for line in result.stdout.splitlines())
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = rollcall("train", "none.yaml", "--debug", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "ConfigError: none.yaml does not exist" in result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a run of two steps, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, rollcall("train", str(write_run(folder)), "--json", cwd=folder)


@pytest.mark.slow
def test_a_command_as_a_shell_starts_it_trains_and_prints_only_its_summary(tmp_path: Path) -> None:
    result = started("train", str(write_run(tmp_path)), "--json", cwd=tmp_path)
    assert result.returncode == 0 and json.loads(result.stdout)["steps"] == 2
    (said,) = result.stderr.splitlines()
    assert said.startswith("warning: no step had a signal")  # of a random model


def test_training_leaves_the_whole_run_directory(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, result = trained
    assert result.returncode == 0, result.stderr
    (said,) = result.stderr.splitlines()  # no progress bars, no advice of libraries
    assert said.startswith("warning: no step had a signal")  # of a random model
    run_dir = folder / "runs/tiny"
    summary = json.loads(result.stdout)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert all(isinstance(summary[key], int | float) for key in SUMMARY_KEYS), summary
    assert summary["eval"]["accuracy"].keys() >= {"first", "last"} and summary["steps"] == 2
    assert load_config(run_dir / "run.yaml") == load_config(folder / "run.yaml")
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert set(steps) == {0, 1, 2}
    assert list((run_dir / "tensorboard").glob("events.out.*"))
    assert sorted(path.name for path in (run_dir / "journal").glob("*.groups")) == ["000001.groups", "000002.groups"]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert (run_dir / "samples/val-000002.jsonl").exists() and (run_dir / "learning_curve.png").exists()
    assert_opens_with_transformers(run_dir / "model")
    assert "last     finished; " in CliRunner().invoke(app, ["status", str(run_dir)]).stdout


def test_the_same_command_again_has_nothing_left_to_do(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, first = trained
    again = rollcall("train", "run.yaml", "--json", cwd=folder)
    assert again.returncode == 0, again.stderr
    for key in ("steps", "tokens_generated", "tokens_trained", "eval"):
        assert json.loads(again.stdout)[key] == json.loads(first.stdout)[key]
    assert trained_draws(folder / "runs/tiny") == list(range(8))


def test_fresh_moves_the_old_run_aside_and_starts_over(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, first = trained
    result = rollcall("train", "run.yaml", "--fresh", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "step 2/2" in result.stdout and "runs/tiny/model" in result.stdout
    old = json.loads((folder / "runs/tiny.old-1/summary.json").read_text())
    assert old["tokens_generated"] == json.loads(first.stdout)["tokens_generated"]
    assert trained_draws(folder / "runs/tiny") == list(range(8))


def assert_opens_with_transformers(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = model.generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] > 4


def test_who_stops_a_run_before_its_first_checkpoint_is_told_what_is_kept(tmp_path: Path) -> None:
    from rollcall.view.summary import interrupted

    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "time/step_s": 1.0}\n')
    said = interrupted(tmp_path, num_steps=40, by="Ctrl-C", fresh=True)
    assert (
        f"after step 7 of 40; {tmp_path} contains every finished group; the same command without --fresh continues"
        in said
    )


# Past the first checkpoint every score takes its time, until the test says go: a signal then meets a run in its middle.
SLOW_ONCE = """
import time
from pathlib import Path

def score(*row):
    is_late = Path("runs/tiny/checkpoints/step-000003").exists() and not Path("go").exists()
    time.sleep(2.0 if is_late else 0.01)
    return 0.0
"""


@pytest.mark.chaos
def test_ctrl_c_is_a_clean_stop_and_the_same_command_finishes_the_run(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_ONCE)
    reward: Any = [{"type": "function", "path": "slow:score"}]
    run_file = write_run(tmp_path, reward=reward, trainer={"steps": 6, "save_every": 3, "eval_every": 0})
    run_dir = tmp_path / "runs/tiny"
    process = start("train", str(run_file), cwd=tmp_path)
    wait_for(lambda: (run_dir / "checkpoints/step-000003").exists(), process)
    os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal sends it
    status, errors = process.wait(), process.stderr
    assert status == 130
    assert errors.startswith("stopped by Ctrl-C after step ") and "the same command continues" in errors
    assert "Traceback" not in errors
    before = {path: path.read_bytes() for path in (run_dir / "journal").glob("*.groups")}
    assert before and len(before) < 6, "the run was stopped in its middle"

    (tmp_path / "go").touch()
    result = rollcall("train", str(run_file), "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 6
    assert trained_draws(run_dir) == list(range(24))
    for path, content in before.items():
        assert path.read_bytes().startswith(content), f"{path.name}: finished groups were made again"


def wait_for(happened: Any, process: Command) -> None:
    give_up = time.monotonic() + WAIT_S
    while not happened():
        assert process.poll() is None, f"the run ended by itself: {process.stderr}"
        assert time.monotonic() < give_up, "the run did not get that far"
        time.sleep(0.05)


def test_what_is_not_an_address_of_a_ray_is_refused_before_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("ROLLCALL_CLUSTER", raising=False)
    (tmp_path / "run.yaml").write_text("cluster: {num_nodes: 2}\n")
    ended = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert ended.exit_code == 1 and "Ray Client, which Rollcall does not use" in ended.stderr
    assert "loading torch" not in ended.stdout
