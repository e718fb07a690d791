"""The Python interface: train, evaluate, load a run, callbacks, and what it does in a notebook."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import groups, lean, letter_rows, make_run
from transformers import AutoModelForCausalLM

import rollcall
from rollcall.base.stop import heeded
from rollcall.config import Config, dump_config
from rollcall.observe.samples import write_samples
from rollcall.run.api import Run, read_config


@pytest.fixture(autouse=True)
def lean_runs() -> Iterator[None]:
    with lean():
        yield


def sections(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def small(folder: Path, *overrides: str) -> Config:
    steps = ("trainer.steps=2", "trainer.save_every=1", "trainer.eval_every=1", "data.prompts_per_step=2")
    return make_run(folder, *steps, *overrides, val=letter_rows(2))


def test_importing_rollcall_imports_no_library_and_knows_its_names() -> None:
    code = (
        "import sys, rollcall\n"
        "heavy = {'torch', 'ray', 'transformers', 'pydantic', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(rollcall.__all__) <= set(dir(rollcall))\n"
        "rollcall.train, rollcall.load_run, rollcall.Run, rollcall.Config, rollcall.StepDone\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    for name in rollcall.__all__:
        assert getattr(rollcall, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'; its attributes are .*train"):
        rollcall.trian  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_in_python_tells_its_callbacks_and_gives_what_it_left(tmp_path: Path) -> None:
    told: list[Any] = []
    run = rollcall.train(
        small(tmp_path), quiet=True, on_step=told.append, on_evaluation=told.append, on_save=told.append
    )
    trained = [one for one in told if not isinstance(one, rollcall.CheckpointSaved)]
    assert [(type(one).__name__, one.step) for one in trained] == [
        ("EvaluationDone", 0), ("StepDone", 1), ("EvaluationDone", 1), ("StepDone", 2), ("EvaluationDone", 2),
    ]  # fmt: skip
    saves = [one for one in told if isinstance(one, rollcall.CheckpointSaved)]
    assert [one.step for one in saves] == [1, 2] and told.index(saves[0]) > told.index(trained[1]), "on disk, later"
    step, saved = trained[-2], told[-1]
    assert step.num_steps == 2 and step.reward_mean == step.metrics["train/reward_mean"] and len(step.groups) == 2
    assert saved.path == tmp_path / "run" / "checkpoints" / "step-000002"

    loaded = rollcall.load_run(run.dir)
    for one in (run, loaded):
        assert one.step == 2 and one.config.trainer.steps == 2 and one.summary["steps"] == 2
        assert one.result == json.loads((one.dir / "summary.json").read_text())
    metrics = loaded.metrics
    assert metrics["step"].to_pylist() == [0, 1, 2] and metrics.num_rows == 3
    assert metrics["train/reward_mean"].to_pylist()[1:] == [trained[1].reward_mean, step.reward_mean]
    assert {(row["split"], row["step"]) for row in loaded.samples.to_pylist()} == {
        ("val", 0), ("val", 1), ("val", 2), ("train", 1), ("train", 2),
    }  # fmt: skip
    assert json.loads(loaded.samples["parts"].to_pylist()[0]).keys() == step.groups[0].scores[0].parts.keys()
    assert [group.step for group in loaded.groups()] == [1, 1, 2, 2]
    assert {group.draw for group in loaded.groups(2)} == {group.draw for group in step.groups}
    assert [(one.step, one.problem) for one in loaded.checkpoints] == [(1, ""), (2, "")]
    assert loaded.model_dir is not None
    AutoModelForCausalLM.from_pretrained(loaded.model_dir)


def test_a_callback_that_raises_ends_the_run_with_its_name_and_the_run_goes_on(tmp_path: Path) -> None:
    def watch(done: rollcall.StepDone) -> None:
        raise KeyError("mine")

    with pytest.raises(rollcall.CallbackError, match=r"on_step=.*watch raised at step 1: KeyError: 'mine'") as raised:
        rollcall.train(small(tmp_path), quiet=True, on_step=watch)
    assert isinstance(raised.value.__cause__, KeyError)
    assert rollcall.train(small(tmp_path), quiet=True).step == 2


def test_settings_are_given_as_dotted_keys_or_maps_and_checked_as_on_the_command_line(tmp_path: Path) -> None:
    config = small(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    for source in (file, str(file), sections(config), config):
        for changes in ({"trainer.steps": 5, "run.seed": 9}, {"trainer": {"steps": 5}, "run": {"seed": 9}}):
            read = read_config(source, changes=changes)
            assert (read.trainer.steps, read.run.seed, read.trainer.save_every) == (5, 9, 1)
    placed = read_config(
        None, changes={"cluster": {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}}}
    )  # fmt: skip
    changed = read_config(placed, changes={"cluster": {"component_placement": {"actor,rollout": "all"}}})
    assert changed.cluster is not None and list(changed.cluster.component_placement) == ["actor,rollout"]
    with pytest.raises(
        rollcall.ConfigError, match=r"with the call's changes: trainer.stepz .*did you mean trainer.steps"
    ):
        rollcall.train(file, trainer={"stepz": 3})
    with pytest.raises(rollcall.ConfigError, match=r"nowhere.yaml does not exist.*rollcall init"):
        rollcall.train(tmp_path / "nowhere.yaml")
    with pytest.raises(rollcall.ConfigError, match="phase='all' is not one of both, rollout, update"):
        rollcall.train(file, phase="all")
    with pytest.raises(rollcall.ConfigError, match="is not a run directory"):
        (tmp_path / "empty").mkdir()
        rollcall.load_run(tmp_path / "empty")


def test_a_run_works_inside_a_running_event_loop_and_twice_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def cell(**changes: Any) -> rollcall.Run:
        return rollcall.train(small(tmp_path), **changes)

    assert asyncio.run(cell()).step == 2
    before = running()  # with the process that forks the tests' rewards, if this is their first run
    assert "loading torch and transformers" in capsys.readouterr().out
    assert asyncio.run(cell(quiet=True, **{"trainer.steps": 3})).step == 3
    assert capsys.readouterr().out == ""

    async def measure() -> float:
        return rollcall.evaluate(tmp_path / "run", quiet=True).evaluation.accuracy

    assert asyncio.run(measure()) == rollcall.load_run(tmp_path / "run").summary["eval"]["accuracy"]["last"]
    assert "rollcall" not in {thread.name for thread in threading.enumerate()}
    give_up = time.monotonic() + 60
    while running() - before and time.monotonic() < give_up:
        time.sleep(0.05)  # a killed process is still listed for a moment
    assert running() <= before


def running() -> set[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return {child for child in children if child.status() != psutil.STATUS_ZOMBIE}


def send(number: signal.Signals) -> None:
    """To this process; returns when its main thread has heard it."""
    stop = heeded()
    os.kill(os.getpid(), number)
    end_s = time.monotonic() + 60
    while stop.asked is None and not stop.is_interrupted and time.monotonic() < end_s:
        time.sleep(0.01)


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("in_loop", [False, True])
def test_an_interrupt_ends_the_call_and_the_same_call_goes_on(tmp_path: Path, in_loop: bool) -> None:
    def interrupt(done: rollcall.StepDone) -> None:
        if done.step == 1:
            send(signal.SIGINT)

    async def cell() -> None:
        rollcall.train(small(tmp_path), quiet=True, on_step=interrupt)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell()) if in_loop else rollcall.train(small(tmp_path), quiet=True, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    assert rollcall.load_run(tmp_path / "run").step == 1
    assert rollcall.train(small(tmp_path), quiet=True).step == 2


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_signal_to_stop_saves_the_step(tmp_path: Path, in_loop: bool) -> None:
    config = small(tmp_path, "trainer.save_every=0")

    def stop(done: rollcall.StepDone) -> None:
        send(signal.SIGTERM)

    async def cell() -> None:
        rollcall.train(config, quiet=True, on_step=stop)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        asyncio.run(cell()) if in_loop else rollcall.train(config, quiet=True, on_step=stop)
    assert signal.getsignal(signal.SIGINT) is handler
    run = rollcall.load_run(config.run.dir)
    assert (run.step, [one.step for one in run.checkpoints]) == (1, [1])


def test_an_evaluation_in_python_is_that_of_the_command_line(tmp_path: Path) -> None:
    run = rollcall.train(small(tmp_path), quiet=True)
    report = rollcall.evaluate(run, quiet=True, max_prompts=2)
    assert report.evaluation.accuracy == run.summary["eval"]["accuracy"]["last"]
    sampled = rollcall.evaluate(run.dir, quiet=True, samples=2, eval={"threshold": 0.5})
    assert set(sampled.evaluation.pass_at) == {1, 2} and sampled.plan.config.eval.threshold == 0.5
    given = rollcall.evaluate(run, quiet=True, model={"path": str(tmp_path / "model")})
    assert given.plan.origin == "given by model.path"


def test_an_empty_map_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(small(tmp_path)))
    assert read_config(file, changes={"trainer": {}, "algorithm": {}}) == read_config(file)
    assert read_config(file, changes={"cluster": {}}).cluster is not None


def test_a_dotted_key_in_a_map_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(
        rollcall.ConfigError,
        match="because a dot is not a separator in keys of a file or a dict; write steps under trainer",
    ):
        read_config({"trainer.steps": 3})


def test_a_function_in_the_place_of_one_reward_is_refused_with_the_way_to_give_it() -> None:
    with pytest.raises(rollcall.ConfigError, match=r"reward\.0 cannot be a function; give all rewards in one list"):
        given: dict[str, Any] = {"reward.0": lambda completion: 1.0}
        rollcall.train(None, **given)


def test_maps_that_contain_themselves_or_are_very_deep_are_refused() -> None:
    circular: dict[str, Any] = {"steps": 3}
    circular["again"] = circular
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for given in (circular, deep):
        with pytest.raises(rollcall.ConfigError, match="nested more than 40 deep, or one contains itself"):
            read_config({"trainer": given})
        with pytest.raises(rollcall.ConfigError, match="nested more than 40 deep, or one contains itself"):
            read_config(None, changes={"trainer": given})
    while deep:  # piece by piece: freeing it at once recurses too
        deep = deep.pop("a")


def test_settings_that_were_changed_after_they_were_checked_are_checked_again(tmp_path: Path) -> None:
    config = small(tmp_path)
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": -4})})
    with pytest.raises(rollcall.ConfigError, match="trainer.steps=-4"):
        rollcall.train(changed, quiet=True)
    config.reward.append(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rollcall.ConfigError, match=r"reward\.1=3"):
        rollcall.train(config, quiet=True)
    assert not config.run.dir.exists()


def test_a_callback_that_cannot_be_waited_for_is_refused(tmp_path: Path) -> None:
    async def watch(done: Any) -> None: ...

    with pytest.raises(rollcall.ConfigError, match="on_step=.*watch is async"):
        rollcall.train(small(tmp_path), on_step=watch)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rollcall.ConfigError, match="on_save=3 is not callable"):
        rollcall.train(small(tmp_path), on_save=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_each_run_keeps_its_own_function_of_one_name(tmp_path: Path) -> None:
    one = rollcall.train(small(tmp_path), quiet=True, reward=[lambda completion: 1.0])
    rollcall.train(small(tmp_path), quiet=True, reward=[lambda completion: 7.0], run={"dir": tmp_path / "other"})
    assert rollcall.evaluate(one, quiet=True).evaluation.reward_mean == 1.0


@pytest.mark.slow
def test_samples_hold_any_text_and_a_run_that_goes_on_has_its_newest_numbers(tmp_path: Path) -> None:
    config = small(tmp_path)
    run = rollcall.train(config, quiet=True)
    first = groups(config, 1)[0]
    odd = replace(first, completions=tuple(replace(one, text="a\u2028b\x85c\ud83d") for one in first.completions))
    write_samples(run.dir / "samples", step=1, split="train", groups=[odd])
    assert "a\u2028b\x85c\\ud83d" in run.samples["completion"].to_pylist()
    steps: list[int] = []
    rollcall.train(
        config, quiet=True, trainer={"steps": 3}, on_step=lambda done: steps.append(Run(run.dir).summary["steps"])
    )
    assert steps == [3]
    (run.dir / "summary.json").write_text('{"steps":')
    assert run.summary["steps"] == 3


@pytest.mark.parametrize("call", [rollcall.train, rollcall.evaluate, rollcall.load_run])
def test_what_is_not_a_path_is_refused(call: Any) -> None:
    with pytest.raises(rollcall.ConfigError, match="3 is not a path; give "):
        call(3)


def test_a_run_that_trains_further_has_no_trained_model_and_the_readers_memory_is_not_its_own(tmp_path: Path) -> None:
    run = rollcall.train(small(tmp_path), quiet=True)
    assert run.model_dir == tmp_path / "run/model"
    newest = run.checkpoints[-1].path
    later = newest.with_name("step-000003")
    newest.rename(later)
    manifest = later / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": 3}))
    os.utime(manifest, (time.time() + 10, time.time() + 10))
    assert run.model_dir is None
    (tmp_path / "run/summary.json").unlink()
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps({"step": 1, "perf/peak_memory_gib": 0.001}) + "\n")
    assert run.summary["peak_memory_gib"] == 0.001
