"""What `auto` comes to on a card, and sentences in place of tracebacks; with a cap on memory on a real card (gpu)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners import assert_same_gradient, gradients, make_engine, make_learner, make_samples, section, trainable
from runs import make_run
from tiny import make_model, make_tokenizer

from rollcall.base.errors import BatchTooLargeError, MemoryShortError
from rollcall.config import Grpo, Gspo, Ppo, parse_config
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.native.fill import run_halved
from rollcall.engine.native.runner import Fill
from rollcall.engine.protocol import Request, Sampling
from rollcall.learner.body import Whole
from rollcall.learner.fit import accumulate
from rollcall.learner.learner import Critic, Learner
from rollcall.learner.measure import Rows, measured
from rollcall.learner.packing import Packing
from rollcall.loop.attempts import loss_of
from rollcall.model.decoder import Decoder, fuse_parameters
from rollcall.plan.activations import Recompute
from rollcall.plan.choose import NO_KV, KvNeed, Line, choose
from rollcall.run import card
from rollcall.run.training import train

WHY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
ROWS = Rows(prompt=6, response=4, group=3)
CONFIG = parse_config({"data": {"prompts_per_step": 32, "max_prompt_tokens": 32}, "rollout": {"samples_per_prompt": 8}})


def test_the_measured_pass_corrects_the_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = make_learner(trainable(), activation_checkpointing=False)
    monkeypatch.setattr(card, "room_on", lambda device: 10_000_000)
    monkeypatch.setattr(card, "measured", lambda model, rows: Line(fixed=1_000_000, per_token=900.0))
    need = card._size(learner, config=CONFIG, kv=NO_KV, rows=ROWS)
    assert (learner.fit.tokens, learner.fit.recompute) == (10_000, False)
    assert need == 1_000_000 + 900 * 10_000
    told = capsys.readouterr().err
    assert (
        told
        == "actor: 10000 tokens in a micro-batch (measured: 1.00 MB plus 900 bytes per token; 10.00 MB were free)\n"
    )


def test_kv_is_set_aside_before_micro_batches_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "room_on", lambda device: 20_000_000)
    monkeypatch.setattr(card, "measured", lambda model, rows: Line(fixed=0, per_token=1000.0))
    learner = make_learner(trainable())
    card._size(learner, config=CONFIG, kv=KvNeed(least=1000, most=100_000_000), rows=ROWS)
    assert learner.fit.tokens == 14_000, "three tenths are for KV"
    card._size(learner, config=CONFIG, kv=KvNeed(least=1000, most=2_000_000), rows=ROWS)
    assert learner.fit.tokens == 18_000, "which takes no more than it can use"


def test_little_room_is_accepted_only_with_what_it_costs_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = 0
    monkeypatch.setattr(card, "room_on", lambda device: room)
    monkeypatch.setattr(card, "measured", lambda model, rows: Line(fixed=1_000_000, per_token=1000.0))
    engine = card.engine_needs(CONFIG, Decoder.of(trainable()))
    learner = make_learner(trainable())

    def told() -> str:
        caplog.clear()
        card._size(learner, config=CONFIG, kv=NO_KV, rows=ROWS)
        card._kv_tokens(engine, device=torch.device("cpu"), needs=[])
        return caplog.text

    assert (
        "actor: a micro-batch has room for 10 tokens, and even that needs an estimated 1.01 MB, while 0 bytes are free"
        in told()
    )
    assert (
        f"256 completions of up to {engine.longest} tokens in a step, but the KV cache has room for only 1 of them"
        in caplog.text
    )
    assert "256 times as long" in caplog.text and "model.lora.rank=16" in caplog.text
    room = 1_020_000
    assert "room for 20 tokens, so an update of 256 completions takes up to 128 passes" in told()
    room = 10**9
    assert told() == ""


def test_a_number_in_the_run_file_stays_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "room_on", lambda device: 1000)
    monkeypatch.setattr(card, "measured", lambda model, rows: pytest.fail("nothing is to be chosen"))
    learner = make_learner(trainable(), tokens_per_microbatch=777, activation_checkpointing=False)
    card._size(learner, config=CONFIG, kv=NO_KV, rows=ROWS)
    assert (learner.fit.tokens, learner.fit.recompute) == (777, False)


def test_layers_run_again_where_micro_batches_would_be_small() -> None:
    lines = {
        Recompute.NO: Line(fixed=0, per_token=1000.0),
        Recompute.YES: Line(fixed=0, per_token=100.0),
        Recompute.ON_HOST: Line(fixed=0, per_token=50.0),
    }
    small = choose(section(), room=1_000_000, passes=lines.__getitem__, longest=10, kv=NO_KV)
    assert (small.tokens, small.recompute) == (10_000, Recompute.YES)
    large = choose(section(), room=10_000_000, passes=lines.__getitem__, longest=10, kv=NO_KV)
    assert (large.tokens, large.recompute) == (10_000, False)
    fixed = choose(
        section(activation_checkpointing=False), room=1_000_000, passes=lines.__getitem__, longest=10, kv=NO_KV
    )
    assert (fixed.tokens, fixed.recompute) == (1000, False)
    long = choose(section(), room=1_000_000, passes=lines.__getitem__, longest=15_000, kv=NO_KV)
    assert (long.tokens, long.recompute) == (20_000, Recompute.ON_HOST), "a row that does not fit otherwise"
    given = choose(
        section(tokens_per_microbatch=15_000), room=1_000_000, passes=lines.__getitem__, longest=10, kv=NO_KV
    )
    assert (given.tokens, given.recompute) == (15_000, Recompute.ON_HOST)


def test_made_up_rows_fill_the_size_that_is_asked_for() -> None:
    for tokens in (40, 1000):
        samples = Rows(prompt=64, response=32, group=4).fill(tokens, vocab=40)
        packed = sum(len(each.response_ids) for each in samples) + sum(
            len(next(each.prompt_ids for each in samples if each.draw == draw))
            for draw in {each.draw for each in samples}
        )
        assert tokens <= packed < 1.5 * tokens and len(samples) > 2


@pytest.mark.parametrize("algorithm", [Grpo(kl_coef=0.1), Gspo(), Ppo()], ids=lambda each: each.name)
def test_a_made_up_pass_leaves_no_gradient(algorithm: Any) -> None:
    learner = make_learner(trainable(), algorithm)
    critic = Critic(trainable(), section(), algorithm=Ppo(), total_updates=1)
    samples = ROWS.fill(60, vocab=40)
    for model in (learner, critic):
        packing = Packing(samples=samples, weights=np.zeros(len(samples), dtype=np.float32), max_rows=4)
        assert len(accumulate(model.body, model.fit, packing, model._loss, model.optimizer)) > 1
        sums = model.optimizer._sums.values()
        assert sums and all(torch.equal(each, torch.zeros_like(each)) for each in sums)
        model.optimizer.discard()


def test_state_made_at_the_start_changes_no_update() -> None:
    samples = make_samples(trainable())
    plain, early = make_learner(trainable(), weight_decay=0.1), make_learner(trainable(), weight_decay=0.1)
    early.optimizer.allocate()
    assert all(entry["step"] == 0 for entry in early.optimizer.adamw.state.values()) and early.optimizer.adamw.state
    for _ in range(3):
        assert plain.update(samples) == early.update(samples)
    for name, tensor in plain.body.named.items():
        assert torch.equal(tensor, early.body.named[name])


def test_an_update_without_memory_ends_with_the_sum() -> None:
    learner = make_learner(trainable())

    def step() -> None:
        raise torch.OutOfMemoryError(WHY)

    learner.optimizer.adamw.step = step  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryShortError, match=r"no memory left to update .* optimizer state .* gradients"):
        learner.update(make_samples(trainable()))


def test_prompts_that_do_not_fit_at_once_are_computed_in_halves() -> None:
    fills = [Fill(token_ids=np.arange(count, dtype=np.int32), rows=(count,)) for count in (3, 4, 5, 6)]
    done: list[int] = []
    told: list[int] = []

    def run(some: list[Fill]) -> None:
        if sum(len(fill.token_ids) for fill in some) > 10:
            raise torch.OutOfMemoryError(WHY)
        done.extend(len(fill.token_ids) for fill in some)

    run_halved(fills, run, smaller=told.append)
    assert done == [3, 4, 5, 6] and told == [18, 11]
    with pytest.raises(torch.OutOfMemoryError):
        run_halved([Fill(token_ids=np.zeros(11, dtype=np.int32), rows=(0,))], run, smaller=told.append)


def test_an_engine_without_memory_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_model(), make_tokenizer())
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=3, stop_token_ids=(), stop_strings=())
    engine.submit(Request(id="one", prompt_ids=np.array([5, 6, 7], dtype=np.int32), seed=1, sampling=sampling))

    def admit(sequences: Any) -> int:
        raise torch.OutOfMemoryError(WHY)

    monkeypatch.setattr(engine.runner, "admit", admit)
    with pytest.raises(MemoryShortError, match=r"native engine is out of memory .* KV cache of \d+ tokens"):
        engine.step()


@pytest.mark.slow
def test_a_run_that_ends_for_lack_of_memory_goes_on_when_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, "trainer.steps=3", "trainer.save_every=1")
    stats, calls = Whole.stats, []

    def capped(self: Whole, batch: Any, **how: Any) -> Any:
        calls.append(batch.num_tokens)
        if len(calls) > 2:
            raise torch.OutOfMemoryError(WHY)
        return stats(self, batch, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Whole, "stats", capped)
        with pytest.raises(MemoryShortError, match="tokens does not fit in memory"):
            train(config, quiet=True)
    assert train(config, quiet=True)["steps"] == 3


@pytest.mark.slow
def test_a_micro_batch_that_all_ranks_run_is_smaller_in_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(tmp_path, "trainer.steps=2", "trainer.save_every=1")
    update, sizes = Learner.update, []

    def capped(self: Learner, samples: Any) -> Any:
        sizes.append(self.fit.tokens)
        if self.fit.tokens > 5000:
            raise BatchTooLargeError("too large", "actor", self.fit.tokens // 2)
        return update(self, samples)

    monkeypatch.setattr(Learner, "update", capped)
    train(config)
    assert sizes == [16384, 8192, 4096, 4096]
    assert loss_of(BatchTooLargeError("too large", "actor", 1)) is not None
    assert "too large; attempt 2 continues from the newest checkpoint" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("rollout", "tokens"),
    [
        ({"max_running": 4, "kv_memory_fraction": 0.3}, 4 * 256),
        ({"kv_tokens": 100}, 100),
        ({"kv_tokens": 100, "engine": "vllm", "vllm": {"tensor_parallel_size": 2}}, 50),
        ({"max_running": 4, "engine": "vllm", "vllm": {"tensor_parallel_size": 4}}, 4 * 256 / 2),
    ],
)
def test_kv_that_the_run_file_fixes_is_what_the_engine_takes(rollout: dict[str, Any], tokens: float) -> None:
    """Of a large card no more than all that can run at once; of two KV heads vLLM has half on each of two cards, or of four."""
    model = trainable()
    engine = card.engine_needs(parse_config({"rollout": rollout}), Decoder.of(model))
    weights = sum(each.nbytes for each in model.parameters()) // engine.tensor if "engine" in rollout else 0
    assert card._kv_of(engine, model, card=80 << 30).most == tokens * 2 * 2 * 2 * 16 * 4 + weights


# On a card


def on_card() -> Any:
    """Large enough that a step's activations are hundreds of megabytes."""
    wide: dict[str, Any] = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    model = make_model(**wide).to("cuda")
    fuse_parameters(model)
    return model


@pytest.fixture
def cap() -> Any:
    """Lets this process have so many bytes more than it has."""

    def limit(extra: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_cap_on_the_card_splits_micro_batches_and_changes_no_gradient(cap: Any) -> None:
    samples = make_samples(on_card(), num_prompts=64, group_size=8)
    whole = gradients(make_learner(on_card()), samples)
    learner = make_learner(on_card())
    cap(160 << 20)
    assert_same_gradient(gradients(learner, samples), whole, tolerance=1e-3)
    assert learner.fit.tokens < 16384


@pytest.mark.gpu
def test_a_card_too_small_for_one_row_ends_with_the_sum(cap: Any) -> None:
    samples = make_samples(on_card(), num_prompts=4)
    learner = make_learner(on_card())
    cap(1 << 20)
    with pytest.raises(MemoryShortError, match="weights .* optimizer state .* gradients .* activations .* KV cache"):
        learner.update(samples)


@pytest.mark.gpu
def test_what_is_measured_is_what_a_pass_takes(cap: Any) -> None:
    learner = make_learner(on_card())
    learner.optimizer.allocate()
    line = measured(learner, Rows(prompt=128, response=256, group=4))
    assert line is not None
    before = torch.cuda.memory_allocated()
    samples = Rows(prompt=128, response=256, group=4).fill(16384, vocab=learner.model.config.vocab_size)
    torch.cuda.reset_peak_memory_stats()
    learner.update([sample.with_(advantages=sample.advantages + 1) for sample in samples])
    assert torch.cuda.max_memory_allocated() - before < 1.2 * line.peak(16384)


@pytest.mark.gpu
def test_sizes_on_a_card_leave_room_for_kv(cap: Any) -> None:
    model = on_card()
    learner = make_learner(model)
    cap(400 << 20)
    config = parse_config(
        {"data": {"max_prompt_tokens": 16}, "rollout": {"max_response_tokens": 12, "max_running": 64}}
    )
    tokens = card.settle(config, model, learners=[learner], samples=True)
    assert tokens is not None and 64 <= tokens <= 64 * 64
    assert learner.fit.tokens > 28
    NativeEngine(model, make_tokenizer(), max_running=64, kv_tokens=tokens)
    learner.update(make_samples(on_card()))


def test_on_a_cpu_nothing_is_settled() -> None:
    learner = make_learner(trainable())
    assert card.settle(parse_config({}), learner.model, learners=[learner], samples=True) is None
    assert (learner.fit.tokens, learner.fit.recompute) == (16384, False)
