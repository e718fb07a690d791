"""Runs for the end-to-end tests: a model and a task that train in seconds, and child processes that kill themselves at
an exact moment."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import quick_rewards
from commands import WAIT_S, fork_context
from safetensors.numpy import load_file
from tiny import save_model

from rollcall.base.group_record import MAGIC
from rollcall.base.journal import ATTEMPTS, Journal
from rollcall.base.types import Group
from rollcall.config import Config, dump_config, load_config
from rollcall.loop.record import Saves
from rollcall.observe.sinks import read_rows
from rollcall.run.training import train

LETTERS = "abcd"


def letter_rows(count: int = 16, **columns: Any) -> list[dict[str, Any]]:
    """Prompts that name a letter; the answer is that letter."""
    return [
        {"id": f"row-{index}", "prompt": f"{index % 10}{letter}=", "answer": letter, **columns}
        for index, letter in enumerate((LETTERS * count)[:count])
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_run(
    folder: Path,
    *overrides: str,
    name: str = "run",
    rows: Sequence[dict[str, Any]] | None = None,
    val: Sequence[dict[str, Any]] | None = None,
    reward: Sequence[Mapping[str, Any]] | None = None,
    model: Path | None = None,
) -> Config:
    """A run in ``folder/name``; several of one folder share model and data, so their results can be compared."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model or folder / "model"
    if not model.exists():
        save_model(model)
    train_file = folder / "train.jsonl"
    if rows is not None or not train_file.exists():
        write_rows(train_file, letter_rows() if rows is None else rows)
    run_file = {
        "run": {"name": name, "dir": str(folder / name), "seed": 7},
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": str(train_file),
            "val": str(write_rows(folder / "val.jsonl", val)) if val is not None else None,
            "prompts_per_step": 8,
        },
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
        "reward": list(reward) if reward else [{"type": "function", "path": "rewards_bad:share_of_answer"}],
        "algorithm": {"name": "grpo"},
        "actor": {"lr": 3e-3},
        "trainer": {"steps": 6, "eval_every": 0, "save_every": 2, "loggers": [], "num_threads": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(run_file))  # JSON is YAML
    return load_config(path, list(overrides))


SHARDED = (
    "cluster.num_nodes=2", "cluster.num_gpus_per_node=1", "cluster.accelerator=cpu",
    "cluster.component_placement={'actor,rollout': all}", "actor.sharding=fsdp",
)  # fmt: skip


def sharded_run(folder: Path, *overrides: str, name: str = "sharded") -> Config:
    return make_run(folder, *SHARDED, *overrides, name=name)


@contextmanager
def lean() -> Iterator[None]:
    """Runs draw no learning curve, half of the work of one so small, and have one process for their rewards, forked."""
    with (
        mock.patch("rollcall.run.training.learning_curve", return_value=None),
        mock.patch("rollcall.run.build.NUM_REWARD_WORKERS", 1),
        mock.patch("rollcall.process.here.subprocess", quick_rewards.SUBPROCESS),
    ):
        yield


def finish(config: Config, *, is_lean: bool = True, **options: Any) -> dict[str, Any]:
    """Train in this process, to the end."""
    with lean() if is_lean else nullcontext():
        return train(config, quiet=True, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Where a child kills itself: at the n-th call (from 1) of a function, ``module:Class.method`` or ``module:function``.

    ``when``: before the call, after it, or half-way: "torn" lets a write put down half of its bytes first.
    """

    call: str
    number: int
    when: str = "after"


IN_UPDATE = "rollcall.learner.optimizer:Optimizer.step"
IN_JOURNAL = "rollcall.base.journal:AppendFile.append"
IN_SAVE_WRITE = "rollcall.checkpoint.saving:Saving.write"
IN_SAVE_FLUSH = "rollcall.checkpoint.store:fsync_tree"
IN_EXPORT_FLUSH = "rollcall.checkpoint.export:fsync_tree"
IN_PRUNE = "rollcall.checkpoint.store:CheckpointStore._prune"
IN_MARK_TRAINED = "rollcall.base.journal:Journal.mark_trained"
IN_METRICS = "rollcall.observe.sinks:JsonlSink.log"
IN_EVALUATION = "rollcall.loop.evaluate:summarize"
IN_EXPORT = "rollcall.loop.record:Record.export"
IN_SUMMARY = "rollcall.run.training:write_summary"


def run_and_be_killed(config: Config, kill: Kill) -> None:
    """Train in a process of its own that SIGKILLs itself at ``kill``; fails if it lived."""
    code = run_in_child(config, kill)
    assert code == -signal.SIGKILL, f"the child ended with {code} instead of being killed at {kill}"


def run_in_child(config: Config, kill: Kill | None = None) -> int:
    """Exit code of a process that trains; it starts in a fraction of the seconds that importing torch takes."""
    child = fork_context().Process(target=_child, args=(dump_config(config), str(config.run.dir), kill))
    child.start()
    child.join(timeout=WAIT_S)
    if child.exitcode is None:
        child.kill()
        raise AssertionError(f"the child neither ended nor was killed within {WAIT_S:g} s")
    return child.exitcode


def _child(run_file: str, run_dir: str, kill: Kill | None) -> None:
    if kill is not None:
        _arm(kill)
    quick_rewards.fork_server()
    path = Path(run_dir).with_suffix(".child.yaml")
    path.write_text(run_file)
    finish(load_config(path))


def begin_and_settle(saves: Saves, step: int, save: Callable[[], Path], *, begin: Any = Saves.begin) -> None:
    """In place of ``Saves.begin``: what happens after a save happens with its checkpoint on disk."""
    begin(saves, step, save)
    saves.settle()


def _arm(kill: Kill) -> None:
    setattr(Saves, "begin", begin_and_settle)  # noqa: B010
    module_name, _, dotted = kill.call.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = dotted.split(".")
    for parent in parents:
        found = getattr(owner, parent)
        if found.__module__ != module_name:  # others use it too: a class of this module's own
            found = type(parent, (found,), {})
            setattr(owner, parent, found)
        owner = found
    original = getattr(owner, name)
    calls = 0

    def armed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if kill.call == IN_JOURNAL and args[0].path.suffix == f".{ATTEMPTS}":  # once a second, so nobody can count them
            return original(*args, **kwargs)
        calls += 1
        if calls < kill.number:
            return original(*args, **kwargs)
        if kill.when == "after":
            original(*args, **kwargs)
        elif kill.when == "torn":
            _tear(original, args, kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("nobody survives SIGKILL")

    setattr(owner, name, armed)


def _tear(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Half of what the call writes: half a record, or every second file cut in half."""
    subject = args[-1]
    if isinstance(subject, bytes):
        original(*args[:-1], subject[: len(subject) // 2], **kwargs)
        return
    original(*args, **kwargs)
    for path in sorted(path for path in Path(subject).rglob("*") if path.is_file())[::2]:
        os.truncate(path, path.stat().st_size // 2)


def weights(config: Config) -> dict[str, np.ndarray]:
    return load_file(config.run.dir / "model" / "model.safetensors")


def groups(config: Config, step: int) -> dict[int, Group]:
    """The step's journaled groups by draw."""
    with Journal(config.run.dir / "journal") as journal:
        return {group.draw: group for group in journal.read(step)}


def journal_bytes(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((config.run.dir / "journal").glob("*.groups"))}


def num_records(config: Config) -> int:
    """Group records in the journal, repeats counted."""
    return sum(data.count(MAGIC) for data in journal_bytes(config).values())


def metric_rows(config: Config) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as they are, not merged by step."""
    return [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]


def column(config: Config, name: str) -> list[float]:
    """A metric over the steps that have it."""
    return [row[name] for row in metric_rows(config) if name in row]


def wait_for_steps(run_dir: Path, count: int, *, timeout_s: float) -> None:
    """Until a run that another process makes has trained so many steps."""
    deadline = time.monotonic() + timeout_s
    while sum("time/step_s" in row for row in read_rows(run_dir / "metrics.jsonl")) < count:
        assert time.monotonic() < deadline, f"{run_dir} did not get to step {count} within {timeout_s:g} s"
        time.sleep(0.2)
