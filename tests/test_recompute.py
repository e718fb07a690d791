"""Layers that run again in the backward, with their inputs on the card or in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learners import gradients, make_learner, make_samples, trainable
from tiny import make_model

from rollcall.learner.measure import Rows
from rollcall.model.decoder import fuse_parameters
from rollcall.model.recompute import IN_FLIGHT, HostStore
from rollcall.plan.activations import ON_CARD, DecoderSizes, Passes, Recompute

LAYERS, HIDDEN = 12, 256


def on_card() -> Any:
    model = make_model(hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=LAYERS).to("cuda")
    fuse_parameters(model)
    return model


def test_on_a_cpu_offload_is_the_same_as_true() -> None:
    samples = make_samples(trainable())
    kept, again, offloaded = (
        gradients(make_learner(trainable(), activation_checkpointing=setting), samples)
        for setting in (False, True, "offload")
    )
    for name, gradient in again.items():
        assert torch.equal(offloaded[name], gradient)
        torch.testing.assert_close(gradient, kept[name])


class HereStore:
    """As ``HostStore``, without a card."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.taken: list[int] = []

    def put(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor.detach().clone())
        return len(self.tensors) - 1

    def take(self, number: int) -> torch.Tensor:
        self.taken.append(number)
        return self.tensors[number]


def test_a_store_gets_the_input_of_each_layer_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples(trainable())
    expected = gradients(make_learner(trainable(), activation_checkpointing=True), samples)
    stores: list[HereStore] = []

    def store_of(recompute: Recompute, device: torch.device) -> Any:
        assert recompute is Recompute.ON_HOST
        stores.append(HereStore())
        return stores[-1]

    monkeypatch.setattr("rollcall.learner.body.store_of", store_of)
    learner = make_learner(trainable(), activation_checkpointing="offload", tokens_per_microbatch=60)
    found = gradients(learner, samples)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    config = learner.model.config
    used = [store for store in stores if store.tensors]
    assert len(used) > 1, "one for each micro-batch"
    for store in used:
        assert {tensor.shape[1:] for tensor in store.tensors} == {(config.hidden_size,)}
        assert store.taken == list(reversed(range(config.num_hidden_layers)))


def test_settings_of_the_run_file_and_back() -> None:
    assert [Recompute.of(setting).setting for setting in (False, True, "offload")] == ["false", "true", "offload"]
    assert Recompute.of("auto") is Recompute.NO
    assert "host memory" in Recompute.ON_HOST.sentence and "host memory" not in Recompute.YES.sentence
    assert Recompute.NO.sentence == ""


def test_inputs_in_host_memory_are_counted_there() -> None:
    sizes = DecoderSizes(hidden=64, intermediate=128, layers=10, heads=4, kv_heads=2, head_dim=16, vocab=100)

    def passes(recompute: Recompute) -> Passes:
        return Passes(
            sizes=sizes, width=2, num_parameters=0, gradient_width=2, has_head=True, frozen=True, recompute=recompute
        )

    tokens, of_layer = 1024, 1024 * 64 * 2
    peaks = [passes(each).peak(tokens) for each in Recompute]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[Recompute.YES] - peaks[Recompute.ON_HOST] == (10 - ON_CARD) * of_layer
    assert [passes(each).on_host(tokens) for each in Recompute] == [0, 0, 10 * of_layer]
    assert passes(Recompute.ON_HOST).on_host(tokens + 1) == 20 * of_layer, "as torch allocates pinned memory"
    assert ON_CARD == IN_FLIGHT + 1


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"sharding": "fsdp"}], ids=["whole", "fsdp"])
def test_inputs_in_host_memory_give_the_same_weights(changes: dict[str, Any]) -> None:
    import torch.distributed as dist

    samples = make_samples(trainable(), num_prompts=6)

    def learn(setting: bool | str) -> tuple[list[float], dict[str, torch.Tensor]]:
        learner = make_learner(on_card(), activation_checkpointing=setting, tokens_per_microbatch=60, **changes)
        losses = [learner.update(samples)["loss"] for _ in range(3)]
        return losses, {name: tensor.detach().clone() for name, tensor in learner.body.whole_tensors()}

    try:
        losses, weights = learn(True)
        found, others = learn("offload")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert found == losses
    for name, tensor in weights.items():
        assert torch.equal(others[name], tensor), name


@pytest.mark.gpu
def test_inputs_in_host_memory_are_not_on_the_card() -> None:
    tokens = 32768

    def peak(setting: bool | str) -> int:
        learner = make_learner(on_card(), activation_checkpointing=setting, tokens_per_microbatch=2 * tokens)
        rows = Rows(prompt=128, response=384, group=4).fill(tokens, vocab=learner.model.config.vocab_size)
        samples = [row.with_(advantages=row.advantages + 1) for row in rows]
        learner.update(samples)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        learner.update(samples)
        return torch.cuda.max_memory_allocated() - before

    of_layer = tokens * HIDDEN * 4
    saved = peak(True) - peak("offload")
    assert saved > 0.7 * (LAYERS - ON_CARD) * of_layer


@pytest.mark.gpu
def test_what_is_taken_back_is_what_was_put_whatever_is_computed_between() -> None:
    store = HostStore(torch.device("cuda", 0))
    tensors = [torch.randn(1 << 20, device="cuda") for _ in range(9)]
    expected = [tensor.cpu() for tensor in tensors]
    numbers = []
    while tensors:
        numbers.append(store.put(tensors.pop(0)))
        for _ in range(3):  # takes what has become free, and writes over it
            torch.full((1 << 20,), -1.0, device="cuda")
    on_card = [slot.on_card is not None for slot in store._slots]
    assert on_card == [False] * (9 - IN_FLIGHT) + [True] * IN_FLIGHT
    for number in reversed(numbers):
        taken = store.take(number)
        assert torch.equal(taken.cpu(), expected[number])
        taken.fill_(-1.0)
    for number in (0, 5):  # and once more, from the host
        assert torch.equal(store.take(number).cpu(), expected[number])
