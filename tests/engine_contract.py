"""What the core of every engine must do, as tests. A test module of a core imports all of it and gives one fixture, ``kind``.

    pytest.register_assert_rewrite("engine_contract")
    from engine_contract import *

    @pytest.fixture(params=[...])
    def kind(request) -> EngineKind: ...

``generate_contract.py`` has what the awaitable engine around it must do. A core is used until the next one is made, not beside it. Models are tiny and float32. The reference is transformers' own forward over the whole sequence, without a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ARCHITECTURES, make_model, make_tokenizer, random_prompts, reference_logprobs

from rollcall.base.types import Completion, FinishReason
from rollcall.engine.protocol import Core, Refused, Request, Sampling

EOS = 0
TOLERANCE = 1e-4
MOST_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tight:
    """A load that does not fit the KV room at once, though each request alone does."""

    kv_tokens: int
    prompt_lengths: tuple[int, int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One implementation on one device."""

    device: str
    make: Callable[..., Any]  # (model, tokenizer, *, max_running, kv_tokens) -> Core
    push_weights: Callable[[Any, Any, int], None]  # (engine, model, version): the model's parameters were changed
    num_preemptions: Callable[[Any], int]
    tight: Tight
    in_order: bool = True  # requests begin by their order, not as they arrive
    shape: Mapping[str, Any] = field(default_factory=dict)  # of the models, where it must differ from tiny.SHAPE

    def model(self, architecture: str = "qwen2-tied", **shape: Any) -> Any:
        return make_model(architecture, **{**self.shape, **shape}).to(self.device)


def sampling(**changes: Any) -> Sampling:
    plain: dict[str, Any] = dict(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=20, stop_token_ids=(EOS,), stop_strings=()
    )
    return Sampling(**{**plain, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt, and a request for each of the seeds: a group, unless there is a session."""

    id: str
    prompt_ids: np.ndarray
    seeds: tuple[int, ...]
    sampling: Sampling
    session: str | None = None
    adapter: str | None = None
    order: tuple[int, int, int] = (0, 0, 0)

    @property
    def requests(self) -> list[Request]:
        return [
            Request(
                id=f"{self.id}/{place}",
                prompt_ids=self.prompt_ids,
                seed=seed,
                sampling=self.sampling,
                order=self.order,
                group=self.id if self.session is None else None,
                session=self.session,
                adapter=self.adapter,
            )
            for place, seed in enumerate(self.seeds)
        ]


Results = dict[str, tuple[Completion, ...]]
"""Completions by the id of what was asked for, in the order of its seeds."""


def request(
    prompt: np.ndarray,
    *,
    seeds: Sequence[int] = (1,),
    name: str = "r",
    session: str | None = None,
    order: tuple[int, int, int] = (0, 0, 0),
    **changes: Any,
) -> Ask:
    return Ask(
        id=name, prompt_ids=prompt, seeds=tuple(seeds), sampling=sampling(**changes), session=session, order=order
    )


def requests_for(prompts: list[np.ndarray], *, num_seeds: int = 2, **changes: Any) -> list[Ask]:
    """Two completions each of the prompts; every seed is different."""
    return [
        request(prompt, name=f"r{index}", seeds=range(100 * index, 100 * index + num_seeds), **changes)
        for index, prompt in enumerate(prompts)
    ]


def submit(engine: Core, *asked: Ask) -> None:
    for one in asked:
        for each in one.requests:
            engine.submit(each)


def abort(engine: Core, asked: Ask) -> None:
    for each in asked.requests:
        engine.abort(each.id)


def step(engine: Core, found: dict[str, Completion]) -> None:
    """``found`` gets what has ended, by request."""
    for name, completion in engine.step().items():
        assert name not in found, "a completion came back twice"
        found[name] = completion


def grouped(found: Mapping[str, Completion]) -> Results:
    groups: dict[str, dict[int, Completion]] = {}
    for name, completion in found.items():
        group, _, place = name.rpartition("/")
        groups.setdefault(group, {})[int(place)] = completion
    return {name: tuple(group[place] for place in sorted(group)) for name, group in groups.items()}


def finish(engine: Core, found: dict[str, Completion] | None = None) -> Results:
    """Step until nothing is left."""
    found = {} if found is None else found
    for _ in range(MOST_STEPS):
        step(engine, found)
        if not engine.num_unfinished:
            return grouped(found)
    raise AssertionError(f"{engine.num_unfinished} requests are unfinished after {MOST_STEPS} steps")


def run(engine: Core, asked: list[Ask]) -> Results:
    submit(engine, *asked)
    return finish(engine)


def run_one(engine: Core, one: Ask) -> Completion:
    return run(engine, [one])[one.id][0]


def ids_of(results: Results) -> dict[str, list[list[int]]]:
    return {name: [completion.token_ids.tolist() for completion in group] for name, group in results.items()}


def off_by(model: Any, requests: list[Ask], results: Results) -> float:
    """Largest difference of the engine's log-probs to transformers'."""
    worst = 0.0
    for one in requests:
        assert len(results[one.id]) == len(one.seeds)
        for completion in results[one.id]:
            expected = reference_logprobs(
                model, one.prompt_ids, completion.token_ids, temperature=one.sampling.temperature or 1.0
            )
            worst = max(worst, float(np.abs(expected.numpy() - completion.logprobs).max()))
    return worst


def perturb(model: Any, *, seed: int) -> None:
    """Other weights in the same tensors, as an optimizer step leaves them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.device))


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def model(kind: EngineKind) -> Any:
    return kind.model()


@pytest.fixture
def engine(kind: EngineKind, model: Any, tokenizer: Any) -> Iterator[Any]:
    yield kind.make(model, tokenizer, max_running=16, kv_tokens=None)


# Which architecture it is changes the forward; `test_greedy_equals_generate` has all of them.
SOME = ["qwen2-sliding", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-untied", "llama3-rope"))]


@pytest.mark.parametrize("architecture", SOME)
def test_logprobs_and_draws_do_not_depend_on_the_batch(kind: EngineKind, tokenizer: Any, architecture: str) -> None:
    model = kind.model(architecture)
    requests = requests_for(random_prompts(5))
    together = run(kind.make(model, tokenizer, max_running=16, kv_tokens=None), requests)
    assert off_by(model, requests, together) < TOLERANCE
    few_rows = run(kind.make(model, tokenizer, max_running=3, kv_tokens=None), requests[::-1])
    assert off_by(model, requests, few_rows) < TOLERANCE
    alone = kind.make(model, tokenizer, max_running=1, kv_tokens=None)
    one_by_one = {one.id: run(alone, [one])[one.id] for one in requests}
    assert off_by(model, requests, one_by_one) < TOLERANCE
    assert ids_of(together) == ids_of(few_rows) == ids_of(one_by_one)


@pytest.mark.parametrize("architecture", SOME)
def test_logprobs_and_draws_survive_preemption(kind: EngineKind, tokenizer: Any, architecture: str) -> None:
    model, tight = kind.model(architecture), kind.tight
    requests = requests_for(
        random_prompts(4, lengths=tight.prompt_lengths), max_tokens=tight.max_tokens, stop_token_ids=()
    )
    roomy = kind.make(model, tokenizer, max_running=16, kv_tokens=None)
    expected = run(roomy, requests)
    cramped = kind.make(model, tokenizer, max_running=16, kv_tokens=tight.kv_tokens)
    results = run(cramped, requests)
    assert kind.num_preemptions(cramped) > 0 and kind.num_preemptions(roomy) == 0
    assert off_by(model, requests, results) < TOLERANCE
    assert ids_of(results) == ids_of(expected)


@pytest.mark.parametrize("architecture", SOME)
def test_a_weight_swap_in_the_middle_of_completions_is_recorded_and_exact(
    kind: EngineKind, tokenizer: Any, architecture: str
) -> None:
    model = kind.model(architecture)
    engine = kind.make(model, tokenizer, max_running=16, kv_tokens=None)
    requests = requests_for(random_prompts(3), max_tokens=40, stop_token_ids=())
    submit(engine, *requests)
    assert engine.step() == {}
    before = kind.model(architecture)
    perturb(model, seed=1)
    kind.push_weights(engine, model, 7)
    assert engine.version == 7
    results = finish(engine)
    for one in requests:
        for completion in results[one.id]:
            assert [segment.version for segment in completion.segments] == [0, 7]
            num_old = completion.segments[0].num_tokens
            assert 0 < num_old < len(completion.token_ids) == 40
            old = reference_logprobs(before, one.prompt_ids, completion.token_ids).numpy()
            new = reference_logprobs(model, one.prompt_ids, completion.token_ids).numpy()
            assert np.abs(old - completion.logprobs)[:num_old].max() < TOLERANCE
            assert np.abs(new - completion.logprobs)[num_old:].max() < TOLERANCE
            assert np.abs(old - new).max() > 10 * TOLERANCE, "the swap must be visible"


def test_a_weight_swap_between_requests_is_exact(kind: EngineKind, engine: Any, model: Any) -> None:
    first = requests_for(random_prompts(3))
    assert off_by(model, first, run(engine, first)) < TOLERANCE
    perturb(model, seed=2)
    kind.push_weights(engine, model, 1)
    again = requests_for(random_prompts(3))
    results = run(engine, again)
    assert off_by(model, again, results) < TOLERANCE
    assert {segment.version for group in results.values() for one in group for segment in one.segments} == {1}


def test_a_weight_swap_while_requests_wait_for_room_is_exact(kind: EngineKind, model: Any, tokenizer: Any) -> None:
    engine = kind.make(model, tokenizer, max_running=2, kv_tokens=None)
    requests = requests_for(random_prompts(4), max_tokens=24, stop_token_ids=())
    submit(engine, *requests)
    engine.step()
    perturb(model, seed=3)
    kind.push_weights(engine, model, 5)
    results = finish(engine)
    assert [segment.version for segment in results["r3"][1].segments] == [5]
    assert off_by(model, requests[1:], results) < TOLERANCE


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_any_schedule_of_requests_aborts_and_swaps_is_exact(kind: EngineKind, tokenizer: Any, seed: int) -> None:
    """Rows come, grow, go and are preempted in a random order; what each token was sampled from stays right."""
    rng = np.random.default_rng(seed)
    model, tight = kind.model(), kind.tight
    engine = kind.make(model, tokenizer, max_running=int(rng.integers(5, 9)), kv_tokens=tight.kv_tokens)
    versions = [copy.deepcopy(model)]
    found: dict[str, Completion] = {}
    requests: list[Ask] = []
    aborted: set[str] = set()
    for turn in range(40):
        for _ in range(rng.integers(0, 3)):
            (prompt,) = random_prompts(1, lengths=(1, tight.prompt_lengths[1]), seed=int(rng.integers(1 << 30)))
            seeds = [int(number) for number in rng.integers(1 << 40, size=rng.integers(1, 4))]
            longest = int(rng.integers(1, 3 * tight.max_tokens))
            requests.append(request(prompt, name=f"r{len(requests)}", seeds=seeds, max_tokens=longest))
            submit(engine, requests[-1])
        if turn % 13 == 12:
            perturb(model, seed=turn)
            versions.append(copy.deepcopy(model))
            kind.push_weights(engine, model, len(versions) - 1)
        if rng.random() < 0.2 and requests:
            one = requests[rng.integers(len(requests))]
            aborted |= {each.id for each in one.requests} - found.keys()
            abort(engine, one)
        step(engine, found)
    results = finish(engine, found)
    assert found.keys() == {each.id for one in requests for each in one.requests} - aborted
    # Blocks of 64 tokens make room coarse on CUDA: whether a random schedule runs out there is chance.
    assert kind.num_preemptions(engine) > 0 or kind.device == "cuda"
    for one in requests:
        for completion in results.get(one.id, ()):
            start = 0
            for segment in completion.segments:
                expected = reference_logprobs(versions[segment.version], one.prompt_ids, completion.token_ids).numpy()
                end = start + segment.num_tokens
                assert np.abs(expected - completion.logprobs)[start:end].max() < TOLERANCE
                start = end


def test_rows_keep_their_context_when_one_joins_after_longer_ones_have_ended(
    kind: EngineKind, model: Any, tokenizer: Any
) -> None:
    """The cache has the shape of the longest rows so far, and is cut anew for more, shorter ones."""
    engine = kind.make(model, tokenizer, max_running=16, kv_tokens=128)
    prompts = random_prompts(5, lengths=(5, 5))
    run(engine, requests_for(prompts[:2], num_seeds=1, max_tokens=57, stop_token_ids=()))
    requests = requests_for(prompts[2:], num_seeds=1, max_tokens=40, stop_token_ids=())
    submit(engine, *requests[:2])
    for _ in range(2):
        engine.step()
    submit(engine, requests[2])
    assert off_by(model, requests, finish(engine)) < TOLERANCE


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_logprobs_are_those_of_the_temperature(engine: Any, model: Any, temperature: float) -> None:
    requests = requests_for(random_prompts(4), temperature=temperature)
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


def test_requests_with_different_sampling_share_a_batch(kind: EngineKind, model: Any, tokenizer: Any) -> None:
    prompts = random_prompts(4)
    # The first ones end early, so that later ones take their rows.
    requests = [
        request(prompts[0], name="greedy", temperature=0.0, max_tokens=3, stop_token_ids=()),
        request(prompts[1], name="warm", temperature=1.4, max_tokens=7, stop_token_ids=()),
        request(prompts[2], name="top-k", top_k=3, max_tokens=40, stop_token_ids=()),
        request(prompts[3], name="top-p", top_p=0.6, temperature=0.8, max_tokens=40, stop_token_ids=()),
    ]
    together = run(kind.make(model, tokenizer, max_running=4, kv_tokens=None), requests)
    alone = kind.make(model, tokenizer, max_running=1, kv_tokens=None)
    apart = {one.id: run(alone, [one])[one.id] for one in requests}
    assert ids_of(together) == ids_of(apart)
    for name, group in together.items():
        np.testing.assert_allclose(group[0].logprobs, apart[name][0].logprobs, atol=TOLERANCE)
    assert off_by(model, requests[:2], together) < TOLERANCE


def test_equal_seeds_draw_equal_tokens_and_others_do_not(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    group = run(engine, [request(prompt, seeds=(5, 6, 5, -(2**63), 2**63 - 1), stop_token_ids=())])["r"]
    assert [completion.seed for completion in group] == [5, 6, 5, -(2**63), 2**63 - 1]
    drawn = [tuple(completion.token_ids.tolist()) for completion in group]
    assert drawn[0] == drawn[2]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate(kind: EngineKind, tokenizer: Any, architecture: str) -> None:
    model = kind.model(architecture)
    prompts = random_prompts(3, seed=4)
    requests = requests_for(prompts, num_seeds=1, temperature=0.0, max_tokens=16)
    results = run(kind.make(model, tokenizer, max_running=8, kv_tokens=None), requests)
    for prompt, one in zip(prompts, requests, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(kind.device)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=EOS,
            pad_token_id=1,
        )
        assert results[one.id][0].token_ids.tolist() == generated[0, len(prompt) :].tolist()
    assert off_by(model, requests, results) < TOLERANCE


@torch.no_grad()
def next_logprobs(model: Any, prompt: np.ndarray, response: np.ndarray, *, temperature: float) -> torch.Tensor:
    """Log-probs [T, V] of every token at each place of the response."""
    ids = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))[None].to(model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().cpu()
    return torch.log_softmax(logits / temperature, dim=-1)


def nucleus(logprobs: torch.Tensor, *, top_k: int, top_p: float) -> set[int]:
    """The kept tokens of one distribution: the likeliest k, then the fewest of them with this much probability."""
    order = logprobs.argsort(descending=True).tolist()[: top_k or None]
    probs = logprobs[order].exp() / logprobs[order].exp().sum()
    kept: set[int] = set()
    mass = 0.0
    for token, prob in zip(order, probs.tolist(), strict=True):
        if kept and mass >= top_p:
            break
        kept.add(token)
        mass += prob
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (1, 1.0), (0, 0.5), (0, 1e-6), (6, 0.7)])
def test_truncated_sampling_stays_in_the_set_and_renormalises(
    engine: Any, model: Any, top_k: int, top_p: float
) -> None:
    requests = requests_for(
        random_prompts(3), num_seeds=4, top_k=top_k, top_p=top_p, temperature=1.3, stop_token_ids=()
    )
    results = run(engine, requests)
    num_cut = 0
    for one in requests:
        for completion in results[one.id]:
            rows = next_logprobs(model, one.prompt_ids, completion.token_ids, temperature=1.3)
            for token, logprob, row in zip(completion.token_ids, completion.logprobs, rows, strict=True):
                kept = nucleus(row, top_k=top_k, top_p=top_p)
                assert int(token) in kept
                assert abs(float(row[token] - torch.logsumexp(row[list(kept)], 0)) - logprob) < TOLERANCE
                num_cut += len(kept) < len(row)
    assert num_cut > 0


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (2.0, 0), (1.0, 4)])
def test_tokens_are_drawn_as_often_as_their_probability_says(
    kind: EngineKind, tokenizer: Any, temperature: float, top_k: int
) -> None:
    model = kind.model(vocab_size=10)
    prompt, draws = np.array([4, 7, 5], dtype=np.int32), 4000
    engine = kind.make(model, tokenizer, max_running=512, kv_tokens=None)
    one = request(prompt, seeds=range(draws), max_tokens=1, temperature=temperature, top_k=top_k)
    tokens = [int(completion.token_ids[0]) for completion in run(engine, [one])["r"]]
    probs = next_logprobs(model, prompt, np.array([0]), temperature=temperature)[0].exp().numpy()
    if top_k:
        probs[np.argsort(probs)[:-top_k]] = 0
        probs /= probs.sum()
    counts = np.bincount(tokens, minlength=10)
    assert counts[probs == 0].sum() == 0
    possible = probs > 0
    expected = probs[possible] * draws
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (counts, probs * draws)


def test_a_stop_token_ends_a_completion_and_is_its_last_token(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    free = run_one(engine, request(prompt, stop_token_ids=(), max_tokens=30)).token_ids.tolist()
    for place in (0, 3, 9, 20):
        cut = free[: free.index(free[place]) + 1]
        stopped = run_one(engine, request(prompt, stop_token_ids=(free[place],), max_tokens=30))
        assert stopped.token_ids.tolist() == cut
        assert stopped.finish is FinishReason.STOP
        assert len(stopped.logprobs) == len(stopped.mask) == len(cut) and stopped.mask.all()
    first, _, third = list(dict.fromkeys(free))[:3]  # both may be sampled before the engine looks
    either = run_one(engine, request(prompt, stop_token_ids=(third, first), max_tokens=30))
    assert either.token_ids.tolist() == free[: free.index(first) + 1]


def test_a_completion_without_a_stop_ends_at_its_length(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    free = run_one(engine, request(prompt, stop_token_ids=(), max_tokens=30))
    for max_tokens in (1, 2, 7, 8, 9, 16, 17, 29):
        completion = run_one(engine, request(prompt, stop_token_ids=(), max_tokens=max_tokens))
        assert completion.finish is FinishReason.LENGTH
        assert completion.token_ids.tolist() == free.token_ids.tolist()[:max_tokens]


def test_a_stop_token_at_the_last_place_counts_as_a_stop(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    free = run_one(engine, request(prompt, stop_token_ids=(), max_tokens=30)).token_ids.tolist()
    place = next(place for place in range(5, 30) if free.index(free[place]) == place)
    completion = run_one(engine, request(prompt, stop_token_ids=(free[place],), max_tokens=place + 1))
    assert completion.finish is FinishReason.STOP and len(completion.token_ids) == place + 1


def test_a_stop_string_ends_the_text_wherever_it_falls(engine: Any, tokenizer: Any) -> None:
    """Engines decode several tokens between two looks: the string may end before, at or across such a border."""
    (prompt,) = random_prompts(1, seed=3)
    free = run_one(engine, request(prompt, stop_token_ids=(), max_tokens=40)).token_ids.tolist()

    def text(count: int) -> str:
        return tokenizer.decode(free[:count], skip_special_tokens=True)

    stops = {end: text(end)[-3:] for end in range(3, 40) if len(text(end)) >= 3}
    requests = [
        request(prompt, name=str(end), stop_strings=("never", stop), stop_token_ids=(), max_tokens=40)
        for end, stop in stops.items()
    ]
    for name, (completion,) in run(engine, requests).items():
        stop = stops[int(name)]
        count = next(count for count in range(1, 41) if stop in text(count))
        assert completion.finish is FinishReason.STOP
        assert completion.token_ids.tolist() == free[:count]
        assert completion.text == text(count) and completion.text.endswith(stop)
        assert len(completion.logprobs) == sum(segment.num_tokens for segment in completion.segments) == count


def test_a_text_without_the_stop_string_runs_to_its_length(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    completion = run_one(engine, request(prompt, stop_strings=("zzz",), stop_token_ids=(), max_tokens=12))
    assert completion.finish is FinishReason.LENGTH and len(completion.token_ids) == 12


def test_the_text_is_the_decoded_tokens_without_special_ones(engine: Any, tokenizer: Any) -> None:
    requests = requests_for(random_prompts(4), num_seeds=4, max_tokens=40)
    completions = [completion for group in run(engine, requests).values() for completion in group]
    assert any(EOS in completion.token_ids for completion in completions)
    for completion in completions:
        assert completion.text == tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)


def test_a_prompt_of_one_token_is_enough(engine: Any, model: Any) -> None:
    requests = requests_for([np.array([7], dtype=np.int32), np.array([9], dtype=np.int32)])
    assert off_by(model, requests, run(engine, requests)) < TOLERANCE


@pytest.mark.parametrize("has_begun", [True, False])
def test_what_is_aborted_does_not_come_back_and_its_neighbour_goes_on(
    kind: EngineKind, engine: Any, model: Any, has_begun: bool
) -> None:
    prompts = random_prompts(2)
    long = request(prompts[0], name="long", seeds=(1, 2), max_tokens=100, stop_token_ids=())
    other = request(prompts[1], name="other", seeds=(3, 4), max_tokens=100, stop_token_ids=())
    free = run(engine, [long, other])
    submit(engine, long, other)
    if has_begun:
        assert engine.step() == {} and engine.num_unfinished == 4
    engine.abort("long/0")
    results = finish(engine)
    assert ids_of({"other": results["other"]}) == ids_of({"other": free["other"]})
    (left,) = results["long"]
    assert left.seed == 2 and left.token_ids.tolist() == free["long"][1].token_ids.tolist()
    assert ids_of(run(engine, [long])) == ids_of({"long": free["long"]}), "its id is free again"


def test_an_engine_serves_again_after_abort_and_after_the_end(engine: Any, model: Any) -> None:
    requests = requests_for(random_prompts(3), stop_token_ids=())
    first = run(engine, requests)
    assert engine.num_unfinished == 0 and engine.step() == {}
    submit(engine, requests[0])
    engine.step()
    abort(engine, requests[0])
    assert engine.step() == {} and engine.num_unfinished == 0
    assert ids_of(run(engine, requests)) == ids_of(first)


def test_a_completion_comes_back_when_it_has_ended_and_counts_until_then(engine: Any) -> None:
    assert engine.num_unfinished == 0 and engine.step() == {}
    prompts = random_prompts(2)
    submit(engine, request(prompts[0], name="short", seeds=(1, 2, 3), max_tokens=1))
    submit(engine, request(prompts[1], name="long", max_tokens=60, stop_token_ids=()))
    assert engine.num_unfinished == 4
    assert set(engine.step()) == {"short/0", "short/1", "short/2"} and engine.num_unfinished == 1
    assert set(finish(engine)) == {"long"} and engine.num_unfinished == 0


def test_requests_wait_in_their_order(kind: EngineKind, model: Any, tokenizer: Any) -> None:
    engine = kind.make(model, tokenizer, max_running=1, kv_tokens=None)
    (prompt,) = random_prompts(1)
    for place in (3, 1, 2):
        submit(engine, request(prompt, name=str(place), order=(1, place, 0), max_tokens=2, stop_token_ids=()))
    found: dict[str, Completion] = {}
    while engine.num_unfinished:
        step(engine, found)
    expected = ["1/0", "2/0", "3/0"] if kind.in_order else ["3/0", "1/0", "2/0"]
    assert list(found) == expected and engine.num_waiting == 0


def test_nothing_is_computed_ahead_of_what_is_settled(engine: Any, model: Any) -> None:
    """So the parameters may change right behind it; then ``update_weights`` says so."""
    asked = requests_for(random_prompts(3), max_tokens=40, stop_token_ids=())
    submit(engine, *asked)
    assert engine.step() == {}
    engine.settle()
    engine.settle()
    assert off_by(model, asked, finish(engine)) < TOLERANCE


def test_requests_join_while_others_are_decoded(engine: Any, model: Any) -> None:
    first, second = (requests_for(random_prompts(2, seed=seed), max_tokens=30, stop_token_ids=()) for seed in (1, 2))
    second = [request(one.prompt_ids, name=f"late-{one.id}", seeds=one.seeds, max_tokens=12) for one in second]
    submit(engine, *first)
    engine.step()
    submit(engine, *second)
    assert off_by(model, [*first, *second], finish(engine)) < TOLERANCE


def test_a_request_longer_than_the_kv_room_is_refused_with_the_sum(
    kind: EngineKind, model: Any, tokenizer: Any
) -> None:
    engine = kind.make(model, tokenizer, max_running=4, kv_tokens=128)
    with pytest.raises(Refused, match=r"20 prompt \+ 109 new = 129 tokens.*128.*kv_tokens"):
        submit(engine, request(np.full(20, 5, dtype=np.int32), max_tokens=109))
    assert engine.num_unfinished == 0
    assert (
        len(run_one(engine, request(np.full(20, 5, dtype=np.int32), max_tokens=108, stop_token_ids=())).token_ids)
        == 108
    )


def test_a_request_past_the_models_positions_is_refused_with_the_sum(engine: Any) -> None:
    with pytest.raises(Refused, match=r"10 prompt \+ 247 new = 257 positions.*256"):
        submit(engine, request(np.full(10, 5, dtype=np.int32), max_tokens=247))
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("ids", "why"), [([], "an empty prompt"), ([5, 4000], "has token 4000"), ([5, -1, 6], "has token -1")]
)
def test_a_prompt_that_cannot_be_computed_is_refused_and_others_go_on(engine: Any, ids: list[int], why: str) -> None:
    good = request(random_prompts(1)[0], max_tokens=20, stop_token_ids=())
    submit(engine, good)
    engine.step()
    with pytest.raises(Refused, match=why):
        submit(engine, request(np.array(ids, dtype=np.int32), name="bad"))
    (completion,) = finish(engine)["r"]
    assert len(completion.token_ids) == 20 and engine.num_unfinished == 0


def test_an_id_under_way_is_refused_and_free_again_afterwards(engine: Any) -> None:
    (prompt,) = random_prompts(1)
    submit(engine, request(prompt, name="twice"))
    with pytest.raises(Refused, match="'twice/0' is already running"):
        submit(engine, request(prompt, name="twice"))
    assert set(finish(engine)) == {"twice"}
    assert set(run(engine, [request(prompt, name="twice")])) == {"twice"}


# Sessions


class Talk:
    """Episodes of several turns, each with a session of its own or without: sampled tokens, then observation tokens."""

    def __init__(
        self, engine: Core, prompts: list[np.ndarray], *, turns: int = 3, sessions: bool = True, **changes: Any
    ):
        self.engine, self.turns, self.sessions, self.changes = engine, turns, sessions, changes
        self.ids = list(prompts)
        self.requests: dict[str, Ask] = {}
        self.results: Results = {}

    def begin(self, episode: int, turn: int) -> None:
        changes = {"max_tokens": 3 + (5 * episode + 3 * turn) % 11, "stop_token_ids": (EOS, 7), **self.changes}
        self.requests[f"e{episode}-{turn}"] = one = request(
            self.ids[episode],
            name=f"e{episode}-{turn}",
            seeds=(1000 * episode + turn,),
            session=f"s{episode}" if self.sessions else None,
            order=(0, episode, 0),
            **changes,
        )
        submit(self.engine, one)

    def step(self) -> None:
        """Every episode that got an answer goes on with the next turn at once."""
        for name, completions in grouped(self.engine.step()).items():
            self.results[name] = completions
            episode, turn = map(int, name[1:].split("-"))
            (observed,) = random_prompts(1, lengths=(1, 9), seed=100 * episode + turn)
            self.ids[episode] = np.concatenate((self.ids[episode], completions[0].token_ids, observed))
            if turn + 1 < self.turns:
                self.begin(episode, turn + 1)

    def finish(self) -> Results:
        for _ in range(MOST_STEPS):
            if not self.engine.num_unfinished:
                return self.results
            self.step()
        raise AssertionError(f"{self.engine.num_unfinished} requests are unfinished after {MOST_STEPS} steps")

    def off_by(self, model: Any) -> float:
        return off_by(model, list(self.requests.values()), self.results)


def talk(engine: Core, prompts: list[np.ndarray], **changes: Any) -> Talk:
    """All episodes to their end."""
    one = Talk(engine, prompts, **changes)
    for episode in range(len(prompts)):
        one.begin(episode, 0)
    one.finish()
    return one


@pytest.mark.parametrize("architecture", ["qwen3-tied", "qwen2-sliding"])
def test_turns_of_sessions_are_exact_and_as_without(kind: EngineKind, tokenizer: Any, architecture: str) -> None:
    """Many at once, of different lengths, that end turns at different times; more of them than rows."""
    model, prompts = kind.model(architecture), random_prompts(7, lengths=(1, 20))
    for max_running in (16, 4):
        kept = talk(kind.make(model, tokenizer, max_running=max_running, kv_tokens=None), prompts)
        assert kept.off_by(model) < TOLERANCE and len(kept.results) == 7 * 3
    plain = talk(kind.make(model, tokenizer, max_running=16, kv_tokens=None), prompts, sessions=False)
    assert ids_of(kept.results) == ids_of(plain.results)


def test_greedy_turns_of_sessions_are_as_without(engine: Any, model: Any) -> None:
    prompts = random_prompts(5)
    kept = talk(engine, prompts, temperature=0.0)
    assert kept.off_by(model) < TOLERANCE
    assert ids_of(kept.results) == ids_of(talk(engine, prompts, sessions=False, temperature=0.0).results)


@pytest.mark.parametrize("share", [1.0, 1.6])
def test_sessions_give_way_to_running_completions(kind: EngineKind, tokenizer: Any, share: float) -> None:
    """A cache with hardly more room than one episode needs."""
    model, tight = kind.model(), kind.tight
    room = int(tight.kv_tokens * share)
    engine = kind.make(model, tokenizer, max_running=6, kv_tokens=room)
    talked = talk(engine, random_prompts(8, lengths=tight.prompt_lengths), turns=3, max_tokens=tight.max_tokens // 3)
    assert talked.off_by(model) < TOLERANCE and len(talked.results) == 8 * 3
    whole = request(np.full(4, 5, dtype=np.int32), max_tokens=min(room, 250) - 4, stop_token_ids=())
    assert len(run_one(engine, whole).token_ids) == min(room, 250) - 4, "kept KV takes no room from it"


def test_a_weight_swap_between_and_within_turns_of_sessions_is_exact(
    kind: EngineKind, model: Any, tokenizer: Any
) -> None:
    engine = kind.make(model, tokenizer, max_running=4, kv_tokens=None)
    talked = Talk(engine, random_prompts(6), turns=4, max_tokens=24, stop_token_ids=())
    for episode in range(6):
        talked.begin(episode, 0)
    versions = [copy.deepcopy(model)]
    for number in (1, 2, 3):
        talked.step()
        talked.step()
        perturb(model, seed=number)
        versions.append(copy.deepcopy(model))
        kind.push_weights(engine, model, number)
    results = talked.finish()
    assert {segment.version for (one,) in results.values() for segment in one.segments} == {0, 1, 2, 3}
    for name, (completion,) in results.items():
        prompt, start = talked.requests[name].prompt_ids, 0
        for segment in completion.segments:
            expected = reference_logprobs(versions[segment.version], prompt, completion.token_ids).numpy()
            end = start + segment.num_tokens
            assert np.abs(expected - completion.logprobs)[start:end].max() < TOLERANCE
            start = end


def test_a_session_may_go_on_from_any_earlier_token(engine: Any, model: Any) -> None:
    """History that was rewritten: only the tokens that agree are used."""
    (prompt,) = random_prompts(1, lengths=(30, 30))
    first = request(prompt, session="s", stop_token_ids=())
    results = run(engine, [first])
    whole = np.concatenate((prompt, results["r"][0].token_ids))
    other = whole.copy()
    other[25] = 4 + (other[25] - 3) % 36
    requests = [first]
    for number, ids in enumerate((other, whole[:20], whole[:1], whole, np.flip(whole).copy(), prompt)):
        requests.append(request(ids, name=f"t{number}", seeds=(number,), session="s", stop_token_ids=()))
        results |= run(engine, requests[-1:])
    assert off_by(model, requests, results) < TOLERANCE


def test_a_session_that_goes_back_into_a_shared_prompt_leaves_the_others_as_they_are(engine: Any, model: Any) -> None:
    """Equal prompts share what is kept of them. One session goes back to the middle of it while others still read it."""
    (prompt,) = random_prompts(1, lengths=(100, 100))
    requests = [
        request(prompt, name="goes back", seeds=(1,), session="s", max_tokens=2, stop_token_ids=()),
        request(prompt, name="goes on", seeds=(2,), max_tokens=60, stop_token_ids=()),
        request(prompt, name="waits", seeds=(3,), session="t", max_tokens=2, stop_token_ids=()),
    ]
    submit(engine, *requests)
    found: dict[str, Completion] = {}
    while not {"goes back/0", "waits/0"} <= found.keys():
        step(engine, found)
    other = np.concatenate((prompt[:40], np.flip(prompt)[:20])).astype(prompt.dtype)
    whole = np.concatenate((prompt, found["waits/0"].token_ids))
    requests.append(request(other, name="back", seeds=(4,), session="s", max_tokens=20, stop_token_ids=()))
    submit(engine, requests[-1])
    results = finish(engine, found)
    requests.append(request(whole, name="after", seeds=(5,), session="t", max_tokens=20, stop_token_ids=()))
    results |= run(engine, requests[-1:])
    assert off_by(model, requests, results) < TOLERANCE


def test_a_session_that_starts_over_beside_an_equal_prompt(engine: Any, model: Any) -> None:
    """No token of what was kept serves it."""
    one, other = random_prompts(2, lengths=(70, 90))
    other[0] = 4 + (one[0] - 3) % 36
    first = request(one, name="first", seeds=(1,), session="s", max_tokens=3, stop_token_ids=())
    results = run(engine, [first])
    both = [
        request(other, name="again", seeds=(2,), session="s", max_tokens=9, stop_token_ids=()),
        request(other, name="beside", seeds=(3,), max_tokens=9, stop_token_ids=()),
    ]
    results |= run(engine, both)
    assert off_by(model, [first, *both], results) < TOLERANCE


def test_ended_and_aborted_sessions_can_be_used_again(engine: Any, model: Any) -> None:
    prompts = random_prompts(2, lengths=(10, 20))
    requests = [request(prompt, name=f"r{index}", session=f"s{index}") for index, prompt in enumerate(prompts)]
    first = run(engine, requests)
    engine.end_session("s0")
    engine.end_session("s0")
    engine.end_session("never seen")
    submit(engine, request(prompts[1], name="gone", session="s1", max_tokens=100, stop_token_ids=()))
    engine.step()
    engine.abort("gone/0")
    again = run(engine, requests)
    assert ids_of(again) == ids_of(first) and off_by(model, requests, again) < TOLERANCE
