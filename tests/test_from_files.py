"""Models read straight into parts: equal to the whole model cut, and never more in memory than a piece."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import LONGEST, TEMPERATURE, section
from ranks import Ranks
from safetensors.torch import load_file, save_file
from tiny import make_model, make_tokenizer, save_model
from transformers import AutoModelForCausalLM

from rollcall.checkpoint.training import export_learner
from rollcall.config import Config, Grpo, RunSection
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Learner
from rollcall.model import load as loader
from rollcall.model.decoder import Decoder, fuse_parameters
from rollcall.model.load import WholeOnly, load_causal_lm, open_unread, outline_causal_lm
from rollcall.model.stored import tensors
from rollcall.model.stored.tensors import Stored
from rollcall.plan.placement import Role
from rollcall.run import worker as worker_module
from rollcall.run.worker import RoleWorker

FSDP = dict(sharding="fsdp")
BOTH = dict(sharding="fsdp", tensor_parallel_size=2)
FOUR = dict(tensor_parallel_size=4)  # two ranks share each key/value head
HSDP = dict(sharding="hsdp", sharding_group_size=2)
PIECE = 2048


class Meter:
    """The most bytes of stored tensors that were in memory at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.largest = 0
        read = Stored.read

        def counted(stored: Stored, name: str, **where: Any) -> torch.Tensor:
            tensor = read(stored, name, **where)
            size = tensor.numel() * tensor.element_size()
            self.now += size
            self.most, self.largest = max(self.most, self.now), max(self.largest, size)
            weakref.finalize(tensor, self._gone, size)
            return tensor

        patch.setattr(Stored, "read", counted)

    def _gone(self, size: int) -> None:
        self.now -= size


def learner_of(gang: Gang, model: Any, changes: dict[str, Any], **how: Any) -> Learner:
    return Learner(
        model, section(**changes), algorithm=Grpo(), temperature=TEMPERATURE, max_response_tokens=LONGEST,
        total_updates=10, gang=gang, **how,
    )  # fmt: skip


def read_both_ways(gang: Gang, path: str, changes: dict[str, Any], dtype: str) -> tuple[list[str], int, int]:
    """Names of the parts that differ from the whole model's; the most bytes read that were alive; those of the largest tensor."""
    kind = getattr(torch, dtype)
    cpu = torch.device("cpu")
    cut = learner_of(gang, load_causal_lm(path, device=cpu, dtype=kind), changes)
    outline = outline_causal_lm(path, dtype=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "PIECE_BYTES", PIECE)
        meter = Meter(patch)
        read = learner_of(gang, outline, changes, device=cpu, unread=open_unread(path, outline))
    assert all(parameter.is_meta for parameter in outline.parameters())
    differ = [name for name, part in cut.body.named.items() if not torch.equal(part, read.body.named[name])]
    assert [part.dtype for part in cut.body.named.values()] == [part.dtype for part in read.body.named.values()]
    whole = max(parameter.numel() for parameter in outline.parameters()) * 4
    return differ, meter.most, whole


@pytest.mark.parametrize(
    ("name", "changes", "dtype"),
    [
        ("llama-bias", BOTH, "bfloat16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("qwen2-tied", FSDP, "float32"), ("qwen3-untied", BOTH, "float32"), ("llama-tied", FOUR, "float32"), ("qwen2-untied", HSDP, "bfloat16"),
        )),
    ],
)  # fmt: skip
def test_a_model_is_read_straight_into_parts(
    ranks: Ranks, tmp_path: Path, name: str, changes: dict[str, Any], dtype: str
) -> None:
    path = save_model(tmp_path, name)
    several = make_model(name, scale=1.0)
    several.save_pretrained(path, max_shard_size="40KB")
    (path / "model.safetensors").unlink()  # of the first save
    for differ, most, whole in ranks.run(read_both_ways, str(path), changes, dtype, size=4):
        assert differ == []
        assert most <= 2 * PIECE < whole, "one piece, and the next while it is freed"


def export(gang: Gang, path: str, place: Path, unwritable: Path) -> tuple[str, int]:
    """What a rank says of an export that cannot be written, and the largest share of the model that it held of the other."""
    outline = outline_causal_lm(path, dtype=torch.float32)
    learner = learner_of(gang, outline, BOTH, device=torch.device("cpu"), unread=open_unread(path, outline))
    said = ""
    try:
        export_learner(learner, make_tokenizer(), unwritable)
    except ValueError as error:
        said = str(error)
    export_learner(learner, make_tokenizer(), place)
    return said, sum(parameter.numel() for parameter in learner.model.parameters() if not parameter.is_meta)


@pytest.mark.parametrize("name", ["qwen2-tied", pytest.param("llama-bias", marks=pytest.mark.slow)])
def test_a_model_in_parts_is_exported_without_a_whole_copy(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path, place, taken = save_model(tmp_path / "model", name), tmp_path / "out", tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    found = ranks.run(export, str(path), place, taken, size=4)
    assert "is not a model directory" in found[0][0]
    assert found[1:] == [("", 0)] * 3 and found[0][1] == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (path, place))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def build(gang: Gang, config: Config, path: str) -> tuple[int, list[str]]:
    """How often a process of the cluster loads its model whole, and what it says."""
    loads, said = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        load = worker_module.load_causal_lm
        patch.setattr(worker_module, "load_causal_lm", lambda *args, **how: (loads.append(1), load(*args, **how))[1])
        patch.setattr(worker_module, "say", said.append)
        in_parts = frozenset({Role.ACTOR, Role.REFERENCE})
        worker = RoleWorker(config, path, in_parts=in_parts)
        worker._join = lambda ranks, meeting: gang  # type: ignore[method-assign]
        worker.build({Role.ACTOR: gang.rank, Role.REFERENCE: gang.rank}, {})
    assert worker.learner is not None and all(part.isfinite().all() for part in worker.learner.body.named.values())
    return len(loads), said


def test_no_process_of_a_gang_loads_the_model_whole(ranks: Ranks, tmp_path: Path) -> None:
    config = Config(run=RunSection(dir=tmp_path / "run"), actor=section(**FSDP), algorithm=Grpo(kl_coef=0.1))
    path = save_model(tmp_path / "model")
    assert ranks.run(build, config, str(path), size=2) == [(0, []), (0, [])]
    weights = load_file(path / "model.safetensors")
    torch.save(weights, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    first, other = ranks.run(build, config, str(path), size=2)
    assert other == (0, []) and first[0] == 2, "actor and reference"
    assert "the first actor process loads the full model" in first[1][0] and "no safetensors" in first[1][0]


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-untied", "llama-bias", "llama3-rope"])
def test_a_whole_model_comes_to_a_device_piece_by_piece(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cpu = str(save_model(tmp_path, name)), torch.device("cpu")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    fuse_parameters(expected)
    monkeypatch.setattr(tensors, "PIECE_BYTES", PIECE)
    meter, outline = Meter(monkeypatch), outline_causal_lm(path, dtype=torch.bfloat16)
    found = loader.fill(outline, open_unread(path, outline), device=cpu, path=path)
    assert meter.most <= 2 * PIECE
    parameters, wanted = (dict(model.named_parameters()) for model in (found, expected))
    assert parameters.keys() == wanted.keys() and not any(one.requires_grad for one in parameters.values())
    assert all(torch.equal(parameters[key], wanted[key]) for key in wanted)
    one, other = Decoder.of(found), Decoder.of(expected)
    assert torch.equal(one.rope.cos, other.rope.cos) and torch.equal(one.rope.sin, other.rope.sin)
    assert one.named_tensors().keys() == other.named_tensors().keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-bias"])
def test_a_whole_model_comes_to_a_gpu_without_being_whole_on_the_host(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cuda = str(save_model(tmp_path, name)), torch.device("cuda")
    expected = load_causal_lm(path, device=torch.device("cpu"), dtype=torch.bfloat16)
    monkeypatch.setattr(tensors, "PIECE_BYTES", PIECE)
    meter = Meter(monkeypatch)
    found = load_causal_lm(path, device=cuda, dtype=torch.bfloat16)
    assert 0 < meter.most <= 2 * PIECE
    wanted = Decoder.of(expected).named_tensors()
    for key, tensor in Decoder.of(found).named_tensors().items():
        assert tensor.is_cuda and torch.equal(tensor.cpu(), wanted[key]), key


def refused(gang: Gang, path: str) -> str:
    outline = outline_causal_lm(path, dtype=torch.float32)
    try:
        learner_of(gang, outline, FSDP, device=torch.device("cpu"), unread=open_unread(path, outline))
    except ValueError as error:
        return str(error)
    return ""


def test_weights_that_do_not_fit_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen2-tied")
    file = path / "model.safetensors"
    weights = load_file(file)
    embed = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embed.clone()}, file, metadata={"format": "pt"})
    assert ranks.run(refused, str(path), size=2) == ["", ""], "an equal head is the embeddings"
    head = embed.clone()
    head[-1, -1] += 1  # a row of the last rank
    save_file({**weights, "lm_head.weight": head}, file, metadata={"format": "pt"})
    for message in ranks.run(refused, str(path), size=2):
        assert "has an output head that differs from the embeddings, but config.json ties them" in message
    embed[0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    for message in ranks.run(refused, str(path), size=2):
        assert "1 tensor is not finite (model.embed_tokens.weight)" in message


def test_what_only_transformers_can_read_is_said(tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen2-tied")
    file = path / "model.safetensors"
    outline = outline_causal_lm(str(path), dtype=torch.float32)
    weights = load_file(file)
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, file, metadata={"format": "pt"})
    with pytest.raises(WholeOnly, match=r"tensors are missing \(model\.embed_tokens\.weight, "):
        open_unread(str(path), outline)
    save_file({**weights, "extra": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(WholeOnly, match=r"1 tensor is not part of the model \(extra\)"):
        open_unread(str(path), outline)
    save_file({**weights, "lm_head.weight": torch.ones(40, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(WholeOnly, match="an output head that differs from the embeddings"):
        open_unread(str(path), outline)
    open_unread(str(path), outline, compares_head=False)  # another process of the gang compares them
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "vocab_size": 39}))
    wider = outline_causal_lm(str(path), dtype=torch.float32)
    with pytest.raises(WholeOnly, match=r"model\.embed_tokens\.weight is \[40, 64\], not \[39, 64\]"):
        open_unread(str(path), wider)
