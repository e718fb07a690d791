"""Seeded hostile inputs, some in `make test` and thousands in `make slow`: each ends in success or in a clear
refusal. No traceback, no hang, no flood of output, nothing accepted that a run cannot mean.

One case again: ``python -m pytest tests/test_fuzz.py -k overrides`` prints the numbers of those that failed, and
``Random("overrides:17")`` makes number 17.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asgi import Client
from fuzz import data_files, directories, run_files
from fuzz.judge import Failure, judge, judge_command
from runs import finish, make_run
from tiny import make_tokenizer, save_model

from rollcall.base.journal import Journal
from rollcall.checkpoint.store import CheckpointStore
from rollcall.config import DataSection, load_config
from rollcall.loop.data.load import load_prompts
from rollcall.model.load import load_causal_lm, load_tokenizer
from rollcall.observe.sinks import read_rows
from rollcall.run.evaluation import plan_evaluation
from rollcall.run.training import train
from rollcall.view.api import ADDRESSES, ShownRuns
from rollcall.view.page_process import OPEN, Keys
from rollcall.view.reader import RunReader
from rollcall.view.server import make_app

Case = Callable[[Random, Path], Iterator[Failure | None]]  # what went wrong, of each thing that was tried


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory and a finished run, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder / "model")
    finish(make_run(folder, "trainer.steps=2", "trainer.save_every=1", "data.prompts_per_step=2"))
    return folder


def run_file_case(random: Random, folder: Path) -> Iterator[Failure | None]:
    path = folder / "hostile.yaml"
    path.write_bytes(run_files.run_file(random))
    command = random.choice(("config", "config", "plan"))
    ends = (lambda text: run_files.accepted(text, folder=folder)) if command == "config" else (lambda text: None)
    # A plan that is drawn and does not work says so without the file's name.
    yield judge_command(
        "run file", [command, str(path)], named="hostile.yaml" if command == "config" else "", accepted=ends
    )


def override_case(random: Random, folder: Path) -> Iterator[Failure | None]:
    overrides = [run_files.override(random) for _ in range(random.randint(1, 3))]
    if random.random() < 0.3:
        yield judge_command("override", ["plan", *overrides])
    else:
        ends = lambda text: run_files.accepted(text, folder=folder)  # noqa: E731
        yield judge_command("override", ["config", "--", *overrides], accepted=ends)


def data_case(random: Random, folder: Path) -> Iterator[Failure | None]:
    path = data_files.data_file(folder, random)

    def load() -> str | None:
        found = load_prompts(str(path), data=DataSection(), tokenizer=_tokenizer())
        return data_files.unsound(found)

    yield judge("data file", load, named=path.name)


def template_case(random: Random, folder: Path) -> Iterator[Failure | None]:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    tokenizer = make_tokenizer()
    tokenizer.chat_template = data_files.chat_template(random)

    def load() -> str | None:
        return data_files.unsound(load_prompts(str(path), data=DataSection(), tokenizer=tokenizer))

    yield judge("chat template", load, named=path.name)


@cache
def _tokenizer() -> Any:
    return make_tokenizer()


def model_case(random: Random, folder: Path, *, whole: Path) -> Iterator[Failure | None]:
    import torch

    model = folder / "model"
    shutil.copytree(whole / "model", model)
    name = directories.hurt_model(model, random)

    def load() -> None:
        load_tokenizer(str(model), chat_template=None)
        load_causal_lm(str(model), device=torch.device("cpu"), dtype=torch.float32)

    yield judge(f"model directory, {name}", load, named="model")
    yield judge_command(f"model directory, {name}", ["plan", f"model.path={model}"])


def run_dir_case(random: Random, folder: Path, *, whole: Path, trains: bool) -> Iterator[Failure | None]:
    run = folder / "run"
    shutil.copytree(whole / "run", run)
    name = directories.hurt_run(run, random)
    if random.random() < 0.2:
        name += f" and {directories.hurt_lease(run, random)}"
    case = f"run directory, {name}"
    for arguments in (["status"], ["recover"], ["recover", "--json"], ["status", "--json"]):
        yield judge_command(case, [arguments[0], str(run), *arguments[1:]], named="run")
    yield judge(case, lambda: _look(run), named="run")
    yield judge(case, lambda: _show(run), named="run")
    if trains:
        config = load_config(whole / "run.yaml", [f"run.dir={run}", "trainer.steps=3"])
        yield judge(case, lambda: _train(config), named="run")


def _look(run: Path) -> None:
    """What a resume and an evaluation read before any weights."""
    plan_evaluation(run, overrides=["data.val=x.jsonl"], data=None, samples=None, temperature=None, max_prompts=None)
    CheckpointStore(run / "checkpoints", keep_last=2, keep_best=1).latest()
    read_rows(run / "metrics.jsonl")
    RunReader(run).summary()
    with Journal(run / "journal") as journal:
        for step in journal.steps():
            journal.read(step)
        journal.trained()


def _show(run: Path) -> None:
    """Every view of the page."""
    keys = Keys()
    client = Client(make_app(ShownRuns([run], is_one=True), keys=keys))
    client.get(OPEN + keys.new())
    (one,) = client.get("/api/runs").json["runs"]
    for name in ADDRESSES:
        answer = client.get(f"/api/{name}", run=one["id"], names="train/loss", step=1, draw=0)
        assert answer.status in (200, 400, 403, 404) and json.loads(answer.body) is not None, (name, answer.status)


def _train(config: Any) -> None:
    train(config, quiet=True)


def command_case(random: Random, folder: Path) -> Iterator[Failure | None]:
    odd = (
        "1000", "-1", "", " ", "--", "-", "/dev/zero", "/dev/null", "/", ".", "..", "~", "nowhere.yaml", "x" * 5000, "\u202e", "a=b",
        "=", "--json", "--fresh", "--samples", "0", "--samples=-1", "--temperature=nan", "--max-prompts=1e9", "--data=/dev/zero",
        "--data", "--phase=x", "--phase", "--debug=1", "--worker=-5", "--num-nodes", "--gpu-memory=nan", "--gpu-memory=inf", "--repair",
        "--model-config=/dev/zero", "--model-config=/", "--num=-3", "--seed=x", "--out=/dev/null", "--out=/proc/x", "--unknown", "[", "{",
        str(folder), str(folder / "pipe"), "run.dir=/", "trainer.steps=1", "cluster.num_nodes=99999999",
    )  # fmt: skip
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    verb = random.choice(
        ("config", "plan", "eval", "recover", "status", "data", "nothing", "version", "job", "simulate")
    )
    arguments = [random.choice(odd) for _ in range(random.randint(0 if verb == "version" else 1, 4))]
    if verb == "simulate":
        arguments = ["nowhere.yaml", *arguments]  # an embedded run file would be rehearsed
    if verb == "status" and not arguments[0].strip("-"):
        arguments[0] = "nowhere"  # of no directory it is the cluster's
    if verb == "data":
        arguments = [random.choice(("countdown", "x", "arithmetic:", "reasoning-gym:")), *arguments, "--num=5"]
    yield judge_command("command", [verb, *arguments])


def failures(case: Case, *, name: str, count: int, folder: Path) -> list[Failure]:
    found: list[Failure] = []
    for number in range(count):
        place = folder / str(number)
        place.mkdir(parents=True)
        found += [
            Failure(case=f"{name}:{number}, {one.case}", kind=one.kind, detail=one.detail)
            for one in case(Random(f"{name}:{number}"), place)
            if one is not None
        ]
        shutil.rmtree(place, ignore_errors=True)
    return found


def report(found: list[Failure]) -> str:
    return f"{len(found)} failures:\n" + "\n".join(map(str, found[:20]))


# Cases of each kind: in `make test`, and in `make slow`.
FEW = {
    "run files": 8,
    "overrides": 10,
    "data files": 80,
    "chat templates": 8,
    "models": 5,
    "run directories": 4,
    "commands": 15,
}
MANY = {
    "run files": 1500,
    "overrides": 1500,
    "data files": 5000,
    "chat templates": 300,
    "models": 300,
    "run directories": 100,
    "commands": 600,
}


def check(name: str, count: int, *, folder: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, trains: bool) -> None:
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    monkeypatch.setenv("ROLLCALL_STATE_DIR", str(folder / "state"))
    monkeypatch.setattr("rollcall.model.chat_template.LIMIT_S", 0.3)
    monkeypatch.setattr("rollcall.base.lease.WATCH_S", 0.1)
    monkeypatch.setattr("rollcall.base.lease.LOOK_S", 0.02)
    found = failures(cases(whole, trains=trains)[name], name=name, count=count, folder=folder)
    assert not found, report(found)


def cases(whole: Path, *, trains: bool) -> dict[str, Case]:
    return {
        "run files": run_file_case,
        "overrides": override_case,
        "data files": data_case,
        "chat templates": template_case,
        "models": lambda random, folder: model_case(random, folder, whole=whole),
        "run directories": lambda random, folder: run_dir_case(random, folder, whole=whole, trains=trains),
        "commands": command_case,
    }


@pytest.mark.parametrize("name", FEW)
def test_hostile_input_ends_in_success_or_in_a_clear_refusal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    check(name, FEW[name], folder=tmp_path, monkeypatch=monkeypatch, whole=whole, trains=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_thousands_of_hostile_inputs_end_in_success_or_in_a_clear_refusal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    check(name, MANY[name], folder=tmp_path, monkeypatch=monkeypatch, whole=whole, trains=True)
