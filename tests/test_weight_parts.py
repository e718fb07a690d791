"""Weights from actors that hold parts of them: what arrives is the whole model, and nobody holds more than a little of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learners import decoder_of, layout_of, make_samples, section
from ranks import Ranks
from tiny import make_model, save_model
from torch import Tensor

from rollcall.base.errors import MissingPeerError, WeightUpdateError
from rollcall.base.wait import Wait
from rollcall.config import Config, Grpo, RolloutSection, RunSection
from rollcall.engine.vllm.engine import VllmEngine
from rollcall.engine.weights import broadcast, shared_memory
from rollcall.engine.weights.layout import Layout, Parts, SentBlock
from rollcall.engine.weights.parts import PartsReceiver
from rollcall.engine.weights.protocol import BucketSize, Invitation, RefusedUpdateError
from rollcall.engine.weights.transports import FanOut, open_sender
from rollcall.learner.gang import Gang
from rollcall.learner.layout import WeightSplit, module_shapes
from rollcall.model.decoder import Decoder, module_names
from rollcall.plan.mesh import ModelSplit
from rollcall.plan.placement import Role
from rollcall.run import worker as worker_module
from rollcall.run.worker import RoleWorker

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
SMALL = BucketSize(num_bytes=4096, alone_from=1024)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many buckets also of a tiny model."""
    for end in (
        broadcast.BroadcastOutlet, broadcast.BroadcastInlet, shared_memory._RingOutlet, shared_memory._RingInlet,
    ):  # fmt: skip
        monkeypatch.setattr(end, "bucket_size", SMALL)


def layouts_of(decoder: Decoder, split: ModelSplit) -> dict[str, WeightSplit]:
    return {name: layout_of(decoder, name, split) for name in decoder.named_tensors()}


def parts_of(decoder: Decoder, split: ModelSplit, *, dtype: torch.dtype, device: torch.device = CPU) -> Parts:
    """What a rank of this mesh sends; its shards are in float32, whatever travels."""
    named = decoder.named_tensors()
    return Parts(
        [
            SentBlock(
                name=block.name, start=block.start, whole=block.whole, dtype=dtype,
                values=block.of(layout.cut(named[name]).clone().to(device)),
            )
            for name, layout in layouts_of(decoder, split).items()
            for block in layout.blocks(own=True)
        ],
        device=device,
    )  # fmt: skip


def expected_of(decoder: Decoder, *, dtype: torch.dtype) -> dict[str, Tensor]:
    whole = ModelSplit(replicate=1, shard=1, tensor=1, rank=0)
    return {
        module: tensor.to(dtype)
        for name, layout in layouts_of(decoder, whole).items()
        for module, tensor in zip(module_names(name), decoder.named_tensors()[name].split(layout.rows), strict=True)
    }


class Update:
    """Actors that hold parts, and receivers, as threads."""

    def __init__(
        self, sent: Sequence[Parts], wanted: Mapping[str, Sequence[int]], *, receivers: Mapping[str, bool]
    ) -> None:
        self.sent = sent
        self.senders: list[FanOut] = [
            open_sender(
                "auto", receivers=receivers, name=f"actor rank {rank}", host="127.0.0.1", on_gpu=False,
                folder=Path("unused"),
            )
            for rank in range(len(sent))
        ]  # fmt: skip
        self.receivers: dict[str, PartsReceiver] = {
            name: PartsReceiver(
                [sender.invitations[name] for sender in self.senders], name=name, wanted=wanted, device=CPU
            )
            for name in receivers
        }
        self.taken: dict[str, dict[str, Tensor]] = {}
        self.most_alive = 0
        self.failures: list[Exception] = []

    def run(self, version: int, *, due: int | None = None) -> None:
        def receive(name: str, receiver: PartsReceiver) -> None:
            receiver.receive(lambda tensors: self._take(name, tensors), version=version if due is None else due)

        work = [
            *(lambda sender=sender, own=own: sender.send(own, version=version) for sender, own in zip(self.senders, self.sent, strict=True)),
            *(lambda name=name, one=one: receive(name, one) for name, one in self.receivers.items()),
        ]  # fmt: skip
        threads = [threading.Thread(target=self._try, args=(one,), daemon=True) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)

    def _try(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self.failures.append(error)

    def _take(self, name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.taken[name] = {}
        alive: list[weakref.ref[Tensor]] = []
        for key, tensor in tensors:
            self.taken[name][key] = tensor.clone()
            alive = [*(one for one in alive if one() is not None), weakref.ref(tensor)]
            self.most_alive = max(self.most_alive, len(alive))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()


def update_of(
    architecture: str,
    mesh: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    receivers: Mapping[str, bool],
    device: torch.device = CPU,
) -> tuple[Update, dict[str, Tensor]]:
    decoder = decoder_of(architecture)
    replicate, shard, tensor = mesh
    splits = [ModelSplit(replicate=replicate, shard=shard, tensor=tensor, rank=rank) for rank in range(shard * tensor)]
    wanted = module_shapes(layouts_of(decoder, splits[0]).values())
    sent = [parts_of(decoder, split, dtype=dtype, device=device) for split in splits]
    return Update(sent, wanted, receivers=receivers), expected_of(decoder, dtype=dtype)


@pytest.mark.parametrize(
    ("architecture", "mesh", "dtype"),
    [
        ("qwen2-tied", (1, 1, 1), torch.float32), ("llama-bias", (1, 2, 2), torch.bfloat16),
        pytest.param("qwen3-untied", (2, 1, 4), torch.float32, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_byte_is_sent_once_and_arrives_whole(architecture: str, mesh: Any, dtype: torch.dtype) -> None:
    """To receivers on the host and on others, from a whole model, from FSDP x tensor parallel, from ranks that share a key/value head."""
    update, expected = update_of(architecture, mesh, dtype=dtype, receivers={"near": True, "far": False, "away": False})
    try:
        for version in (1, 2):
            update.run(version)
            assert not update.failures, update.failures
            for taken in update.taken.values():
                assert list(taken) == list(expected)
                assert all(taken[name].dtype == dtype and torch.equal(taken[name], expected[name]) for name in expected)
        sent = sum(one.layout.num_bytes for one in update.sent)
        assert sent == sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
        assert update.most_alive <= 2, "the one before is freed while the next is taken"
    finally:
        update.close()


@pytest.mark.gpu
def test_parts_on_a_gpu_reach_the_memory_of_hosts() -> None:
    near_and_far = {"near": True, "far": False}
    update, expected = update_of(
        "llama-bias", (1, 2, 2), dtype=torch.bfloat16, receivers=near_and_far, device=torch.device("cuda")
    )
    try:
        update.run(1)
        assert not update.failures, update.failures
        for taken in update.taken.values():
            assert all(torch.equal(taken[name], expected[name]) for name in expected)
    finally:
        update.close()


def test_a_torn_part_makes_all_senders_send_again(monkeypatch: pytest.MonkeyPatch) -> None:
    update, expected = update_of("qwen2-tied", (1, 2, 1), receivers={"near": True})
    tears = [True]
    each = shared_memory._RingInlet.each

    def torn(self: Any, buckets: Any, deadline: Any) -> Iterator[int]:
        for total in each(self, buckets, deadline):
            yield total ^ (bool(tears) and tears.pop())

    monkeypatch.setattr(shared_memory._RingInlet, "each", torn)
    try:
        update.run(1)
        assert not update.failures and not tears
        assert all(torch.equal(update.taken["near"][name], expected[name]) for name in expected)
        update.run(2, due=3)
        assert {type(error) for error in update.failures} == {RefusedUpdateError}
        assert "got version 2, but expected version 3" in str(update.failures[0])
    finally:
        update.close()


def test_senders_that_do_not_go_on_alike_end_the_update_with_a_sentence() -> None:
    """Receivers on three nodes share some senders and not others, and one of them has refused."""
    receiver = PartsReceiver([], name="rollout rank 2", wanted={}, device=CPU)
    told = {"actor rank 0": "end", "actor rank 1": "again"}
    receiver._ends = [  # type: ignore[assignment]
        (SimpleNamespace(peer=peer, tell=lambda *words: None, hear=lambda deadline, step=step: {"step": step}), None)
        for peer, step in told.items()
    ]
    with pytest.raises(
        WeightUpdateError, match=r"rollout rank 2 .* another .* refused .* rank 0: end, actor rank 1: again"
    ):
        receiver._answer(None, Wait(1.0))


def test_parts_that_do_not_fit_are_refused_by_name() -> None:
    update, _ = update_of("qwen2-tied", (1, 2, 1), receivers={"near": True})
    (receiver,) = update.receivers.values()
    headers = [{"version": 1, "parts": one.about, "layout": one.layout.text} for one in update.sent]
    receiver._fit(headers)
    with pytest.raises(WeightUpdateError, match=r"has 1280 of the 2560 elements of 'model\.embed_tokens\.weight'"):
        receiver._fit(headers[:1])
    receiver._wanted = {**receiver._wanted, "model.norm.weight": (3,)}
    with pytest.raises(
        WeightUpdateError, match=r"'model\.norm\.weight' has shape \[64\] in the update and \[3\] in the receiver"
    ):
        receiver._fit(headers)
    del receiver._wanted["model.norm.weight"]
    with pytest.raises(WeightUpdateError, match=r"has a tensor 'model\.norm\.weight' that this receiver does not have"):
        receiver._fit(headers)
    update.close()


def test_a_receiver_that_goes_away_in_the_middle_is_named_to_every_sender() -> None:
    update, _ = update_of("qwen2-tied", (1, 2, 1), receivers={"near": True})

    def fail(name: str, tensors: Iterator[Any]) -> None:
        next(tensors)
        raise ConnectionError("no room")

    update._take = fail  # type: ignore[method-assign]
    update.run(1)
    update.close()
    assert sorted(type(error).__name__ for error in update.failures) == ["ConnectionError"] + ["MissingPeerError"] * 2
    assert all("near disconnected" in str(error) for error in update.failures if isinstance(error, MissingPeerError))


def test_buckets_in_order_never_put_a_small_tensor_behind_a_large_one() -> None:
    sizes = {"a": 10, "b": 5000, "c": 20, "d": 30, "e": 2000}
    layout = Layout.of({name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()})
    spans = [[layout.entries[span.entry].name for span in bucket] for bucket in layout.buckets(SMALL)]
    assert spans == [["a"], ["b"], ["b", "c", "d"], ["e"]]


# Processes of a cluster


class Recorder(VllmEngine):
    """vLLM, as far as a process of ours sees it."""

    def __init__(self) -> None:
        self.version, self.num_preemptions = -1, 0
        self.weights: dict[str, Tensor] = {}

    def settle(self) -> None:
        """Nothing is under way."""

    def load_weights(self, version: int, tensors: Any) -> None:
        self.version = version
        self.weights = {name: tensor.detach().clone() for name, tensor in tensors}


def sit(gang: Gang, config: Config, path: str) -> dict[str, Any]:
    """Actors with parts of a model; vLLM beside the second, and a rollout process that is a thread of the first."""
    engines: list[Recorder] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")

        def build(rollout: Any, model: Any, tokenizer: Any, **how: Any) -> Recorder:
            assert all(parameter.is_meta for parameter in model.parameters()), "no copy beside vLLM"
            engines.append(Recorder())
            return engines[-1]

        patch.setattr(worker_module, "build_engine", build)
        actor = RoleWorker(config, path, in_parts=frozenset({Role.ACTOR}))
        actor._join = lambda ranks, meeting: gang  # type: ignore[method-assign]
        roles = [Role.ACTOR, Role.ROLLOUT] if gang.rank == 1 else [Role.ACTOR]
        actor.build(dict.fromkeys(roles, gang.rank), {})
        apart = RoleWorker(config, path, in_parts=frozenset({Role.ACTOR}))
        if gang.rank == 0:
            apart.build({Role.ROLLOUT: 0}, {})
    actor.update(make_samples(make_model()))
    invited = gang.gather({name: asdict(one) for name, one in actor.invite({"rollout": True}, "127.0.0.1").items()})
    invitations = [Invitation(**one["rollout"]) for one in invited]
    receiving = threading.Thread(target=lambda: gang.rank or apart.use_weights(1, "rollout", invitations))
    receiving.start()
    actor.send_weights(1)
    receiving.join(TIMEOUT_S)
    assert actor.learner is not None
    whole = dict(worker_module.in_modules(actor.learner.body).values)
    return {
        "equal": [
            list(engine.weights) == list(whole) and all(torch.equal(engine.weights[name], whole[name]) for name in whole)
            for engine in engines
        ],
        "versions": [engine.version for engine in engines],
        "held": sum(not one.is_meta for worker in (actor, apart) if hasattr(worker, "model") for one in worker.model.parameters()),
    }  # fmt: skip


def test_vllm_gets_the_policy_from_parts_and_no_process_holds_a_copy_beside_it(ranks: Ranks, tmp_path: Path) -> None:
    config = Config(
        run=RunSection(dir=tmp_path / "run"), actor=section(sharding="fsdp"), algorithm=Grpo(),
        rollout=RolloutSection(max_running=4, engine="vllm"),
    )  # fmt: skip
    found = ranks.run(sit, config, str(save_model(tmp_path / "model")), size=2)
    assert found == [{"equal": [True], "versions": [1], "held": 0}] * 2
