"""The vLLM engine: the contract with vLLM in a process of its own, the traps of its weight reload, and how it fails.

All of it with vLLM itself is `make vllm`; what needs one process runs in `make test` with a stand-in for vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("engine_contract", "generate_contract")

from engine_contract import *  # noqa: F403
from engine_contract import (
    TOLERANCE,
    EngineKind,
    Tight,
    abort,
    off_by,
    perturb,
    request,
    requests_for,
    run,
    run_one,
    submit,
)
from forked import ForkedBackend
from generate_contract import *  # noqa: F403
from generate_contract import House
from runs import column, finish, groups, make_run
from tiny import make_model, random_prompts, save_model
from typer.testing import CliRunner

import rollcall
from rollcall.cli.main import app
from rollcall.config import VllmSection, dump_config
from rollcall.engine.protocol import Refused
from rollcall.engine.ticker import Ticker
from rollcall.engine.vllm.child import Child, VllmError
from rollcall.engine.vllm.engine import VllmEngine
from rollcall.engine.vllm.setup import PYTHON_VARIABLE, VllmUnavailable, find_python
from rollcall.engine.weights.protocol import RefusedUpdateError

STAND_IN = Path(__file__).with_name("stand_in")
SHAPE = dict(hidden_size=128, head_dim=32)  # vLLM's kernels for CPUs begin at heads of 32
QUICK_SHAPE = dict(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
BLOCK = 32  # tokens


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return find_python(None)
    except VllmUnavailable as error:
        pytest.skip(f"{error}, or in {PYTHON_VARIABLE}")


@pytest.fixture(scope="module", params=["stand-in", pytest.param("vllm", marks=pytest.mark.vllm)])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def child(version: str, request: pytest.FixtureRequest) -> Iterator[Child]:
    """One process for all engines: importing vLLM takes longer than making an engine of a tiny model."""
    if version == "stand-in":
        with mock.patch.dict(os.environ, PYTHONPATH=str(STAND_IN)):
            child = Child(sys.executable, num_threads=1)
    else:
        child = Child(request.getfixturevalue("python"), num_threads=1)
    assert (child.wait_until_ready() == "stand-in") == (version == "stand-in")
    yield child
    child.close()


@pytest.fixture
def kind(child: Child, version: str) -> EngineKind:
    def make(model: Any, tokenizer: Any, *, max_running: int, kv_tokens: int | None) -> VllmEngine:
        if version == "vllm" and getattr(model.config, "use_sliding_window", False):
            pytest.skip("vLLM runs qwen2 with a window on all layers or on none")
        return VllmEngine(model, tokenizer, child, section=VllmSection(), max_running=max_running, kv_tokens=kv_tokens)

    return EngineKind(
        device="cpu",
        make=make,
        push_weights=lambda engine, model, version: engine.update_weights(version),
        num_preemptions=lambda engine: engine.num_preemptions,
        in_order=False,
        # Eight completions start in one block each and all need a second one.
        tight=Tight(kv_tokens=BLOCK * 9, prompt_lengths=(20, 28), max_tokens=30),
        shape=SHAPE if version == "vllm" else QUICK_SHAPE,
    )


@pytest.fixture
def house(kind: EngineKind, model: Any, tokenizer: Any) -> House:
    core = kind.make(model, tokenizer, max_running=16, kv_tokens=None)
    core.close = lambda: None  # the process stays for the next test
    return House(make=lambda: Ticker(core, max_running=16), model=model, cores=[core])


def test_a_prompt_of_several_blocks_is_not_remembered_from_older_weights(
    kind: EngineKind, engine: Any, model: Any
) -> None:
    requests = requests_for(random_prompts(2, lengths=(3 * BLOCK, 4 * BLOCK)), max_tokens=8)
    run(engine, requests)
    for version in (1, 2):
        perturb(model, seed=version)
        engine.update_weights(version)
        assert off_by(model, requests, run(engine, requests)) < TOLERANCE


@pytest.mark.parametrize("architecture", ["qwen2-tied", "llama-bias"])
def test_a_change_of_any_parameter_reaches_the_engine(kind: EngineKind, tokenizer: Any, architecture: str) -> None:
    model = kind.model(architecture)
    engine = kind.make(model, tokenizer, max_running=16, kv_tokens=None)
    requests = requests_for(random_prompts(2), max_tokens=8)
    before = run(engine, requests)
    for version, (name, parameter) in enumerate(model.named_parameters(), start=1):
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
        assert off_by(model, requests, before) > 2 * TOLERANCE, f"{name} makes no difference here"
        engine.update_weights(version)
        assert off_by(model, requests, run(engine, requests)) < TOLERANCE, name
        with torch.no_grad():
            parameter.copy_(kept)


@pytest.mark.vllm
def test_a_model_divided_between_processes_is_exact_and_takes_updates_in_the_middle(
    child: Child, kind: EngineKind, tokenizer: Any
) -> None:
    model = kind.model()
    engine = VllmEngine(
        model, tokenizer, child, section=VllmSection(tensor_parallel_size=2), max_running=8, kv_tokens=None
    )
    requests = requests_for(random_prompts(2), max_tokens=40, stop_token_ids=())
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE
    submit(engine, *requests)
    engine.step()
    perturb(model, seed=1)
    engine.update_weights(1)
    for one in (run(engine, []), run(engine, requests)):
        assert {len(group) for group in one.values()} == {2}
    assert off_by(model, requests, one) < TOLERANCE


def test_weights_that_change_here_change_there_only_with_an_update(engine: Any, model: Any) -> None:
    one = request(random_prompts(1)[0], stop_token_ids=())
    before = run_one(engine, one)
    perturb(model, seed=9)
    engine.child.memory.write(list(model.named_parameters()))  # sent, and not announced
    after = run_one(engine, one)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_array_equal(after.logprobs, before.logprobs)


def test_a_stale_update_is_refused_and_leaves_the_engine_as_it_was(engine: Any, model: Any) -> None:
    perturb(model, seed=1)
    engine.update_weights(5)
    requests = requests_for(random_prompts(2))
    state = {name: parameter.clone() for name, parameter in model.named_parameters()}
    perturb(model, seed=2)
    with pytest.raises(RefusedUpdateError, match="^version 4 of the weights is stale: vLLM has version 5$"):
        engine.update_weights(4)
    assert engine.version == 5
    model.load_state_dict(state, strict=False)
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_a_torn_update_is_refused_and_leaves_the_engine_as_it_was(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = engine.child.memory
    write = memory.write

    def write_and_tear(tensors: Any, **where: Any) -> Any:
        message = write(tensors, **where)
        os.pwrite(memory.fd, b"\x55" * 40, message["offset"] + 400)
        return message

    requests = requests_for(random_prompts(2))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "write", write_and_tear)
        with pytest.raises(VllmError, match="torn: model.embed_tokens.weight differs from what was sent"):
            engine.update_weights(2)
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE, "it still has the weights before"
    perturb(model, seed=1)
    engine.update_weights(2)
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_an_update_without_one_of_the_parameters_fails_by_its_name(engine: Any, model: Any) -> None:
    tensors = [pair for pair in model.named_parameters() if pair[0] != "model.norm.weight"]
    with pytest.raises(VllmError, match="no weights were sent for model.norm.weight"):
        engine.load_weights(1, tensors)


@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.vllm)])
def test_weights_come_part_by_part_and_no_process_keeps_them(
    child: Child, kind: EngineKind, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int
) -> None:
    """From an outline: what is sampled comes from the stream alone. A vocabulary that vLLM pads is kept by it until the end."""
    monkeypatch.setattr("rollcall.engine.vllm.engine.PART_BYTES", 20_000)
    used: list[int] = []  # how far into the memory each part reaches, which other tests have grown
    write = child.memory.write

    def noted(tensors: Any, **kwargs: Any) -> dict[str, Any]:
        written = write(tensors, **kwargs)
        used.append(written["offset"] + written["size"])
        return written

    monkeypatch.setattr(child.memory, "write", noted)
    model = make_model("qwen2-untied", **SHAPE)
    with torch.device("meta"):
        outline = type(model)(model.config).to(model.dtype)
    engine = VllmEngine(
        outline, tokenizer, child, section=VllmSection(tensor_parallel_size=tensor_parallel_size), max_running=8,
        kv_tokens=None, device=torch.device("cpu"),
    )  # fmt: skip
    requests = requests_for(random_prompts(2), max_tokens=20, stop_token_ids=())
    submit(engine, requests[0])
    with pytest.raises(VllmError, match="no weights have been sent yet"):
        engine.step()
    abort(engine, requests[0])
    assert engine.step() == {}
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for version in (0, 1, 2):
        engine.load_weights(version, ((name, parameter.clone()) for name, parameter in model.named_parameters()))
        assert off_by(model, requests, run(engine, requests)) < TOLERANCE
        perturb(model, seed=version)
    assert 0 < max(used) < whole / 2


def test_an_update_that_breaks_off_leaves_nothing_to_sample_from_and_the_next_is_whole(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcall.engine.vllm.engine.PART_BYTES", 20_000)
    requests = requests_for(random_prompts(2))

    def cut() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.named_parameters())[:9]
        raise ConnectionError("the actor is gone")

    with pytest.raises(ConnectionError):
        engine.load_weights(1, cut())
    with pytest.raises(VllmError, match="no weights have been sent yet"):
        run(engine, requests)
    for one in requests:
        abort(engine, one)
    assert engine.step() == {}
    engine.load_weights(1, model.named_parameters())
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_seeds_that_vllm_reads_otherwise_are_seeds_all_the_same(engine: Any) -> None:
    """-1 is no seed to vLLM, and torch's generator on a CPU reads 32 bits."""
    (prompt,) = random_prompts(1)
    seeds = (-1, 3, 3 + 2**32, -1)
    one, two = (run(engine, [request(prompt, seeds=seeds, stop_token_ids=())])["r"] for _ in range(2))
    drawn = [tuple(completion.token_ids.tolist()) for completion in one]
    assert drawn == [tuple(completion.token_ids.tolist()) for completion in two]
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


def test_what_vllm_would_change_silently_is_refused(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    with pytest.raises(Refused, match="temperature 0.001, which vLLM would silently raise to 0.01"):
        submit(engine, request(prompt, temperature=0.001))
    with pytest.raises(
        Refused, match="has token 40, but the model has only tokens 0 to 39: .* another model's tokenizer"
    ):
        submit(engine, request(np.array([5, 40], dtype=np.int32)))
    assert engine.num_unfinished == 0


def test_a_failure_in_vllm_is_told_with_its_log_and_the_process_goes_on(engine: Any, model: Any) -> None:
    with pytest.raises(VllmError, match=r"(?s)vLLM failed in `abort`: TypeError.*Traceback"):
        engine.child.ask("abort", 3)
    requests = requests_for(random_prompts(2))
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_a_process_that_ends_or_stands_still_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable  # it does not get as far as vLLM
    monkeypatch.setattr("rollcall.engine.vllm.child.START_S", 0.1)
    stuck = Child(python, num_threads=1)
    os.kill(stuck.pid, signal.SIGSTOP)
    with pytest.raises(VllmError, match="the vLLM process has not answered version within 0.1 s; the end of its log"):
        stuck.wait_until_ready()
    assert not _is_alive(stuck.pid), "nothing is left behind"
    stuck.close()
    monkeypatch.undo()
    ended = Child(python, num_threads=1)
    os.kill(ended.pid, signal.SIGKILL)
    with pytest.raises(VllmError, match=r"the vLLM process died \(SIGKILL.*\); the end of its log"):
        ended.wait_until_ready()
    ended.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no lifeline")
def test_the_process_ends_when_its_starter_is_killed() -> None:
    code = (
        "import os, signal, sys\n"
        "from rollcall.engine.vllm.child import Child\n"
        "child = Child(sys.executable, num_threads=1)\n"
        "assert child.wait_until_ready() == 'stand-in'\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(Path(rollcall.__file__).parents[1])])},
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    starter.kill()
    starter.wait()
    until = time.monotonic() + 60
    while _is_alive(pid):
        assert time.monotonic() < until, "vLLM outlived its starter"
        time.sleep(0.2)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.vllm
def test_a_run_trains_with_the_engine_and_the_learner_agreeing(python: str, tmp_path: Path) -> None:
    """Through the command line; after every update the learner's log-probs are those that vLLM sampled with."""
    model = save_model(tmp_path / "model", hidden_size=128)
    config = make_run(
        tmp_path,
        "rollout.engine=vllm",
        f"rollout.vllm.python={python}",
        "trainer.steps=4",
        "actor.lr=0.01",
        model=model,
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    mismatches = column(config, "rollout/logprob_mismatch_max")
    assert len(mismatches) == 4 and max(mismatches) < 1e-4
    versions = [
        {
            segment.version
            for group in groups(config, step).values()
            for one in group.completions
            for segment in one.segments
        }
        for step in (1, 2, 3, 4)
    ]
    assert versions == [{0}, {1}, {2}, {3}]
    native = make_run(tmp_path, "trainer.steps=4", "actor.lr=0.01", name="native", model=model)
    finish(native)
    assert column(native, "train/entropy")[0] == pytest.approx(column(config, "train/entropy")[0], abs=0.2)


@pytest.mark.vllm
def test_a_sharded_actor_sends_its_parts_to_an_engine_of_two_processes(python: str, tmp_path: Path) -> None:
    """Actors of FSDP 2, vLLM of tensor parallel 2 in another process, which holds no copy of the model itself."""
    config = make_run(
        tmp_path,
        "cluster.num_nodes=1",
        "cluster.num_gpus_per_node=4",
        "cluster.accelerator=cpu",
        "cluster.component_placement={actor: 0-1, rollout: '2-3:0'}",
        "actor.sharding=fsdp",
        "rollout.engine=vllm",
        f"rollout.vllm.python={python}",
        "rollout.vllm.tensor_parallel_size=2",
        "trainer.steps=3",
        "actor.lr=0.01",
        model=save_model(tmp_path / "model", hidden_size=128),
    )
    assert finish(config, backend=ForkedBackend(tmp_path / "nodes"))["steps"] == 3
    mismatches = column(config, "rollout/logprob_mismatch_max")
    assert len(mismatches) == 3 and max(mismatches) < 1e-4
