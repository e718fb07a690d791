"""Turns ``auto`` into sizes that fit this process's GPU: first the learners' micro-batches, then the native engine's KV cache.

At this point, everything that stays for the whole run is on the GPU, including the optimizer state. ``plan/choose.py`` divides the free
memory, first by the plan's estimate and then by a measured pass. All ranks of a gang use the smallest size that any rank found. On a CPU,
``auto`` means a fixed number, so nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollcall.base.errors import short_of_memory
from rollcall.base.wait import say, warn
from rollcall.base.words import size
from rollcall.config import Config
from rollcall.learner.fit import passes_of, sizes_of
from rollcall.learner.learner import Critic, Learner
from rollcall.learner.measure import Rows, measured
from rollcall.model.decoder import Decoder
from rollcall.plan.activations import Recompute
from rollcall.plan.choose import (
    KV_BLOCK,
    NO_KV,
    SAFE,
    EngineNeeds,
    KvNeed,
    Line,
    Needs,
    choose,
    kv_is_open,
    on_kv,
    on_microbatch,
)
from rollcall.plan.placement import Role, plan_for


def settle(config: Config, model: Any, *, learners: Sequence[Learner | Critic], samples: bool) -> int | None:
    """Choose and print the micro-batch sizes of the learners in this process. If a native engine in this process samples from ``model``
    (``samples``), returns its number of KV tokens, or None if the run file sets it."""
    device = learners[0].body.device if learners else next(model.parameters()).device
    if device.type != "cuda":
        return None
    for learner in learners:
        with short_of_memory(lambda why, learner=learner: _state_sentence(learner, why)):
            learner.optimizer.allocate()
    data, rollout = config.data, config.rollout
    engine = engine_needs(config, Decoder.of(model)) if samples else None
    kv = NO_KV if engine is None else _kv_of(engine, model, card=torch.cuda.get_device_properties(device).total_memory)
    rows = Rows(prompt=data.max_prompt_tokens, response=rollout.max_response_tokens, group=rollout.samples_per_prompt)
    needs = [_size(learner, config=config, kv=kv, rows=rows) for learner in learners]
    if engine is None or not kv_is_open(rollout):
        return None
    return _kv_tokens(engine, device=device, needs=needs)


def room_on(device: torch.device) -> int:
    """Return the bytes that this process can still allocate, minus an allowance for fragmentation."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    usable = int(total * torch.cuda.get_per_process_memory_fraction(device))
    room = min(free + torch.cuda.memory_reserved(device) - held, usable - held)
    return max(0, room - int((1 - SAFE) * usable))


def engine_needs(config: Config, decoder: Decoder) -> EngineNeeds:
    """Return how much memory the engine will need. Call it before the engine is built."""
    rollout = config.rollout
    shapes = {name: tensor.shape for name, tensor in decoder.named_tensors().items()}
    return EngineNeeds(
        config=config,
        sizes=sizes_of(shapes, head_dim=decoder.shape.head_dim),
        positions=decoder.max_positions,
        width=decoder.dtype.itemsize,
        tensor=rollout.vllm.tensor_parallel_size if rollout.engine == "vllm" else 1,
    )


def _kv_of(engine: EngineNeeds, model: Any, *, card: int) -> KvNeed:
    """Return how much of the free memory to keep for the engine. The engine needs it for its KV cache and, with vLLM, also for its
    weights. If vLLM sleeps while the learners work, it needs none."""
    rollout = engine.config.rollout
    if kv_is_open(rollout):
        return engine.open_kv
    fixed = engine.fixed_kv(card)
    if rollout.engine == "vllm":
        whole = sum(parameter.nbytes for parameter in model.parameters())
        fixed = 0 if rollout.vllm.sleep else fixed + whole // engine.tensor
    return KvNeed(least=fixed, most=fixed)


def _size(learner: Learner | Critic, *, config: Config, kv: KvNeed, rows: Rows) -> int:
    """Set the learner's ``fit``. Returns the bytes that its passes need."""
    fit, body, section = learner.fit, learner.body, learner.section
    sums = 4 * sum(tensor.numel() for tensor in body.named.values())
    room = room_on(body.device)
    longest = -(-(rows.prompt + rows.response) // body.context.size)

    def estimate(recompute: Recompute) -> Needs:
        return replace(passes_of(body, fit, recompute=recompute), held=sums)

    if "auto" not in (section.tokens_per_microbatch, section.activation_checkpointing):
        return estimate(fit.recompute).peak(fit.tokens)

    def agree(passes: Callable[[Recompute], Needs]) -> None:
        """Set ``fit`` to a size that works on all ranks of the gang."""
        choice = choose(section, room=room, passes=passes, longest=longest, kv=kv)
        fit.agree(body.gang.gather([choice.tokens, choice.recompute]))

    agree(estimate)
    first = fit.recompute
    line = _together(learner, measured(learner, rows)) if section.tokens_per_microbatch == "auto" else None

    def known(recompute: Recompute) -> Needs:
        return line if line is not None and recompute == first else estimate(recompute)

    if line is not None:
        agree(known)
    needed = known(fit.recompute).peak(fit.tokens)
    if body.gang.rank == 0:
        by = f"measured: {size(line.fixed)} plus {size(int(line.per_token))} per token" if line else "by estimate"
        say(f"{fit.name}: {fit.tokens} tokens in a micro-batch{fit.recompute.sentence} ({by}; {size(room)} were free)")
        about = on_microbatch(
            config,
            fit.name,
            tokens=fit.tokens,
            longest=longest,
            num_ranks=body.gang.size // (body.context.size * body.num_tensor),
            needed=needed,
            room=room - kv.least,
        )
        if about is not None and section.tokens_per_microbatch == "auto":
            warn(about)
    return needed


def _together(learner: Learner | Critic, line: Line | None) -> Line | None:
    """Combine the ranks' measurements into the worst case. Returns None if a rank has no measurement; all ranks then use that rank's
    smaller size."""
    fit, gang = learner.fit, learner.body.gang
    own = None if line is None else [line.fixed, line.per_token]
    members = gang.gather([own, fit.tokens, fit.recompute])
    fit.agree([(tokens, recompute) for _, tokens, recompute in members])
    lines = [each for each, _, _ in members]
    if None in lines:
        return None
    return Line(fixed=max(fixed for fixed, _ in lines), per_token=max(per_token for _, per_token in lines))


def _kv_tokens(engine: EngineNeeds, *, device: torch.device, needs: Sequence[int]) -> int:
    """Return how many KV tokens fit next to the learners. The engine and the learners use their working memory in turn, but CUDA graphs
    keep theirs."""
    config = engine.config
    room = room_on(device) - engine.graphs - max([engine.filling, *needs])
    tokens = max(1, engine.open_kv.of(room) // (engine.kv_per_token * KV_BLOCK)) * KV_BLOCK
    say(f"KV cache: {tokens} tokens, {size(tokens * engine.kv_per_token)} (auto)")
    num_engines = 1 if config.cluster is None else len(plan_for(config, config.cluster).processes[Role.ROLLOUT])
    about = on_kv(config, tokens=tokens, longest=engine.longest, per_token=engine.kv_per_token, num_engines=num_engines)
    if about is not None:
        warn(about)
    return tokens


def _state_sentence(learner: Learner | Critic, why: str) -> str:
    weights = sum(tensor.numel() * tensor.element_size() for tensor in learner.body.named.values())
    name = learner.fit.name
    return (
        f"{name}: the optimizer state does not fit on the GPU ({why}). It needs {size(weights)} for weights, "
        f"{size(learner.optimizer.num_bytes)} for optimizer state and {size(4 * weights // learner.body.dtype.itemsize)} for gradients, "
        f"before any activations. Shard it over more GPUs with {name}.sharding=fsdp, or set {name}.master_weights=false"
    )
