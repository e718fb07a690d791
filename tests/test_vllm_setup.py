"""What can be told of the vLLM engine without vLLM: refusals before it starts, its sizes, weights in shared memory."""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from runs import make_run
from tiny import make_model, make_tokenizer
from tokenizers import normalizers, pre_tokenizers

from rollcall.config import VllmSection, load_config
from rollcall.engine.vllm.child import ALIGN, Child, SharedMemory, VllmError, child_environment
from rollcall.engine.vllm.engine import vllm_seed
from rollcall.engine.vllm.server import Server, begin_weights, end_weights, take_weights, verify
from rollcall.engine.vllm.setup import PYTHON_VARIABLE, VllmUnavailable, find_python, make_spec
from rollcall.model.tokenizers import char_tokenizer, refuse_other_tokenizers, tokenizer_mark
from rollcall.run.training import train

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@without_vllm
def test_an_engine_that_is_not_installed_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(VllmUnavailable, match="vLLM is not installed; .*pip install vllm.*rollout.vllm.python"):
        find_python(None)
    with pytest.raises(VllmUnavailable, match="rollout.vllm.python=/no/such/python is not a program"):
        find_python("/no/such/python")
    with pytest.raises(
        VllmUnavailable, match="cannot import vLLM .vllm is not among its packages.; create an environment"
    ):
        find_python(sys.executable)
    monkeypatch.setenv(PYTHON_VARIABLE, "no-python")
    with pytest.raises(VllmUnavailable, match=rf"\${PYTHON_VARIABLE}=no-python is not a program"):
        find_python(None)
    config = make_run(tmp_path, "rollout.engine=vllm")
    with pytest.raises(VllmUnavailable):
        train(config, quiet=True)
    assert not config.run.dir.exists(), "refused before anything is made"


@without_vllm
def test_a_process_that_cannot_start_is_told_with_the_end_of_its_log() -> None:
    child = Child(sys.executable, num_threads=1)
    with pytest.raises(VllmError, match=r"(?s)vLLM failed in `version`: ModuleNotFoundError: .*No module named 'vllm'"):
        child.wait_until_ready()
    child.close()


def spec_of(model: Any, *, kv_tokens: int | None = None, **section: Any) -> dict[str, Any]:
    return make_spec(model, VllmSection(**section), max_running=4, kv_tokens=kv_tokens, kv_fraction=0.3)


def test_the_room_of_the_cache_is_what_was_asked_for() -> None:
    model = make_model(hidden_size=128)
    token_bytes = 2 * 2 * 2 * 32 * 4  # keys and values, layers, KV heads, head size, float32
    asked = spec_of(model, kv_tokens=100)
    assert (asked["kv_tokens"], asked["max_positions"]) == (100, 100)
    assert asked["kv_blocks"] == 4 + 1 and asked["kv_bytes"] == 5 * 32 * token_bytes
    free = spec_of(model)
    assert (free["kv_tokens"], free["max_positions"]) == (4 * 256, 256), "all that can run at once, in full"
    assert free["enforce_eager"] and not spec_of(model, sleep=True)["sleep"], "nothing sleeps on a CPU"
    assert free["config"]["architectures"] == ["Qwen2ForCausalLM"] and free["config"]["hidden_size"] == 128


def test_a_model_that_vllm_cannot_run_here_is_refused_before_it_starts() -> None:
    with pytest.raises(VllmUnavailable, match="a head dimension of 16; on a CPU, vLLM has kernels only for 32, 64"):
        spec_of(make_model())
    with pytest.raises(
        VllmUnavailable, match="tensor_parallel_size=3 does not divide 4 attention heads and 2 KV heads"
    ):
        spec_of(make_model(hidden_size=128), tensor_parallel_size=3)
    divided = [spec_of(make_model(hidden_size=128), kv_tokens=64, tensor_parallel_size=size) for size in (1, 2, 4)]
    assert [spec["kv_bytes"] // divided[-1]["kv_bytes"] for spec in divided] == [2, 1, 1], "two KV heads, one at least"


def test_the_section_is_part_of_the_run_file(tmp_path: Path) -> None:
    config = make_run(tmp_path, "rollout.engine=vllm", "rollout.vllm.tensor_parallel_size=2")
    assert config.rollout.vllm == VllmSection(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="did you mean rollout.vllm.enforce_eager?"):
        load_config(None, ["rollout.vllm.enforced_eager=true"])


def test_weights_in_shared_memory_are_found_and_checked() -> None:
    memory = SharedMemory()
    tensors = {
        "whole": torch.randn(5, 7),
        "part of a wider one": torch.randn(8, 6)[:, 2:4],
        "half": torch.randn(9).to(torch.bfloat16),
    }
    message = memory.write(list(tensors.items()))
    path = f"/proc/self/fd/{memory.fd}"
    verify(path, **message)
    for name, dtype, shape, offset, length, _ in message["tensors"]:
        data = bytearray(os.pread(memory.fd, length, offset))
        found = torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
        assert offset % ALIGN == 0 and torch.equal(found, tensors[name])
    _, _, _, offset, length, _ = message["tensors"][1]
    for place in (offset, offset + length - 1):
        before = os.pread(memory.fd, 1, place)
        os.pwrite(memory.fd, bytes([before[0] ^ 1]), place)
        with pytest.raises(ValueError, match="torn: part of a wider one differs from what was sent"):
            verify(path, **message)
        os.pwrite(memory.fd, before, place)
    verify(path, **message)
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        verify(path, 0, message["size"] + 1, message["tensors"])
    memory.close()


def test_a_part_takes_the_first_room_that_nobody_reads() -> None:
    memory = SharedMemory()
    page, one = mmap.PAGESIZE, torch.ones(mmap.PAGESIZE // 4)
    places = [memory.write([("one", one)], held=held)["offset"] for held in ((), (0,), (0, page), (page, 2 * page))]
    assert places == [0, page, 2 * page, 0]
    two = torch.ones(mmap.PAGESIZE // 2)
    assert memory.write([("two", two)], held=(page,))["offset"] == 2 * page, "the gap before it is too small"
    assert memory.write([("two", two)])["offset"] == 0
    memory.close()


class Worker:
    """A process of vLLM: it keeps what it is given of ``kept`` until the end, as vLLM keeps padded embeddings."""

    device = torch.device("cpu")
    model_runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(tie_word_embeddings=False)))

    def __init__(self, names: list[str], *, kept: str, fails_at: str = "") -> None:
        self.kept, self.fails_at = kept, fails_at
        self.loaded: dict[str, torch.Tensor] = {}
        loading = {"load_weights": lambda model, weights: self.load_weights(weights)}
        self.model: Any = type("Model", (torch.nn.ParameterDict,), loading)({name: torch.zeros(1) for name in names})

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, *, weights_iterator: Any) -> None:
        self.model.load_weights(weights_iterator)

    def load_weights(self, weights: Any) -> set[str]:
        later = {}
        for name, tensor in weights:
            if name == self.fails_at:
                raise KeyError(name)
            if name == self.kept:
                later[name] = tensor
            else:
                self.loaded[name] = tensor.clone()
        self.loaded |= {name: tensor.clone() for name, tensor in later.items()}
        return set(self.loaded)


def feed(worker: Any, tensors: dict[str, torch.Tensor]) -> tuple[SharedMemory, list[list[int]]]:
    """Each tensor as a part of its own; which parts were still read after each."""
    memory, read = SharedMemory(), [list[int]()]
    begin_weights(worker)
    for pair in tensors.items():
        message = memory.write([pair], held=read[-1])
        read.append(take_weights(worker, f"/proc/self/fd/{memory.fd}", **message))
    return memory, read


def test_what_vllm_still_reads_of_a_part_is_not_written_over() -> None:
    tensors = {f"w{index}": torch.full((2000,), float(index)) for index in range(8)}
    worker: Any = Worker(list(tensors), kept="w1")
    memory, read = feed(worker, tensors)
    end_weights(worker, True)
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in tensors.items())
    assert all(len(held) <= 2 for held in read), "what is kept, and the last that it was given"
    assert os.fstat(memory.fd).st_size < 4 * 8192
    memory.close()


def test_a_reload_that_fails_or_lacks_a_tensor_is_told() -> None:
    tensors = {name: torch.ones(3) for name in ("a", "b")}
    with pytest.raises(KeyError, match="b"):
        feed(Worker(["a", "b"], kept="", fails_at="b"), tensors)
    worker: Any = Worker(["a", "b", "c"], kept="")
    feed(worker, tensors)
    with pytest.raises(RuntimeError, match="no weights were sent for c"):
        end_weights(worker, True)
    feed(worker, tensors)
    end_weights(worker, False)  # broken off: nothing is missed


def test_nothing_of_an_update_that_could_not_begin_is_left() -> None:
    worker: Any = Worker(["a"], kept="")
    memory, server = SharedMemory(), Server(0)
    server.memory_path = f"/proc/self/fd/{memory.fd}"
    server.engine = SimpleNamespace(
        collective_rpc=lambda call, args=(): [call(worker, *args)],
        reset_prefix_cache=lambda reset_running_requests: True,
        abort_request=lambda names, internal: None,
        output_processor=SimpleNamespace(request_states={}),
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(requests={}))),
    )
    part = memory.write([("a", torch.ones(3))])
    with mock.patch.object(worker, "reload_weights", side_effect=OSError("the card is gone")):
        server.begin()
        with pytest.raises(OSError, match="the card is gone"):
            server.part(**part)
    with pytest.raises(RuntimeError, match="has not begun to load"):
        server.end()
    for _ in range(2):
        server.begin()
        server.part(**part)
    server.end()
    assert server.has_weights and torch.equal(worker.loaded["a"], torch.ones(3))
    server.adapter = "an adapter"
    server.load(None)  # type: ignore[arg-type]
    assert not server.has_weights and server.adapter is None
    memory.close()


def test_sockets_of_vllm_have_a_short_path_also_in_a_deep_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert "VLLM_RPC_BASE_PATH" not in child_environment(num_threads=1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("deep" * 20)))
    assert child_environment(num_threads=1)["VLLM_RPC_BASE_PATH"] == "/tmp"
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/mine")
    assert child_environment(num_threads=1)["VLLM_RPC_BASE_PATH"] == "/mine"


def test_weights_of_another_size_fit_the_same_memory() -> None:
    memory = SharedMemory()
    for size in (3, 1000, 20):
        message = memory.write([("one", torch.arange(size))])
        verify(f"/proc/self/fd/{memory.fd}", **message)
    memory.close()


def test_seeds_become_such_as_vllm_takes_and_stay_apart() -> None:
    seeds = [-(2**63), -1, 0, 1, 3, 3 + 2**32, 2**63 - 1]
    taken = [vllm_seed(seed) for seed in seeds]
    assert all(0 <= seed < 2**63 for seed in taken)
    assert len({seed % 2**32 for seed in taken}) == len(seeds)


def test_processes_with_another_tokenizer_are_refused_by_name() -> None:
    ours, same, other = make_tokenizer(), make_tokenizer(), char_tokenizer("0123456789+-*/=() abcdefghijklmnopqs")
    same(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_mark(ours) == tokenizer_mark(same) != tokenizer_mark(other)
    lowers = make_tokenizer()
    lowers.backend_tokenizer.normalizer = normalizers.Lowercase()
    splits = make_tokenizer()
    splits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Digits()
    slow = SimpleNamespace(get_vocab=ours.get_vocab, all_special_ids=[0], eos_token_id=0)
    assert len(set(map(tokenizer_mark, (ours, lowers, splits, slow)))) == 4
    marks = {"actor on node 0": tokenizer_mark(same), "rollout on node 1": tokenizer_mark(other)}
    with pytest.raises(
        ValueError, match="the tokenizer of /models/x differs between rollout on node 1 and the controller"
    ):
        refuse_other_tokenizers(tokenizer_mark(ours), marks, path="/models/x")
    refuse_other_tokenizers(tokenizer_mark(ours), {"actor on node 0": tokenizer_mark(same)}, path="/models/x")
