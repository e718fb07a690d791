"""Runs all roles in this process: the policy is loaded once, and engine and learner share its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from rollcall.base.wait import say
from rollcall.checkpoint.saving import saving_of
from rollcall.config import Config, Ppo
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.ticker import Ticker
from rollcall.environments.protocol import Environments
from rollcall.learner.gang import Gang
from rollcall.loop.workers import Workers
from rollcall.model.load import load_causal_lm, resolve_device, resolve_dtype
from rollcall.model.tokenizers import stop_token_ids
from rollcall.reward.model import load_reward_models
from rollcall.run.build import (
    NUM_REWARD_WORKERS,
    Inputs,
    build_adapter,
    build_critic,
    build_engine,
    build_environments,
    build_learner,
    build_reference,
    build_scorers,
    check_engine,
    load_inputs,
    reference_of,
    set_threads,
)
from rollcall.run.card import settle
from rollcall.run.trained import Trained


def build_workers(config: Config, *, is_bare: bool = False) -> Workers:
    """Load everything that the run file names. ``is_bare``, for debugging: one reward process, no CUDA graphs."""
    set_threads(config.trainer.num_threads)
    check_engine(config.rollout)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    inputs = load_inputs(config)
    # Before any weights are read: its code may be wrong.
    environments = build_environments(config.environment, inputs.tokenizer, inputs.train, inputs.val)
    try:
        return _load(config, inputs, environments, device=device, dtype=dtype, is_bare=is_bare)
    except BaseException:
        if environments is not None:
            asyncio.run(environments.aclose())
        raise


def _load(
    config: Config,
    inputs: Inputs,
    environments: Environments | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_bare: bool,
) -> Workers:
    tokenizer, trust = inputs.tokenizer, config.model.trust_remote_code
    say(f"loading the model {config.model.path}")
    load = partial(load_causal_lm, inputs.model_path, device=device, dtype=dtype, trust_remote_code=trust)
    model = load()
    stops = stop_token_ids(tokenizer, model.config, model.generation_config, rollout=config.rollout)
    adapter = build_adapter(config, model, device=device)
    learner = build_learner(config, model, gang=Gang.alone(), mirror=True, adapter=adapter)
    critic = build_critic(config, load(), gang=Gang.alone()) if isinstance(config.algorithm, Ppo) else None
    reference = None
    if config.needs_reference:  # a second copy of the model, unless the learner leaves this one unchanged
        reference = build_reference(config, load()) if adapter is None else reference_of(config, learner)
    models = load_reward_models(config.reward, device=device, trust_remote_code=trust)
    # Everything that stays for the full run is loaded by now; the engine gets the remaining memory.
    learners = [learner] if critic is None else [learner, critic]
    kv_tokens = settle(config, model, learners=learners, samples=True)
    core = build_engine(config.rollout, model, tokenizer, graphs=not is_bare, adapter=adapter, kv_tokens=kv_tokens)
    in_parts = adapter is None and any(each.body.in_parts for each in learners)  # an adapter is small and saved whole
    trained = Trained(tokenizer=tokenizer, stop_token_ids=stops, learner=learner, critic=critic)

    def call(processes: Sequence[int], method: str, *args: Any) -> list[Any]:
        return [getattr(trained, method)(*args)]

    with ExitStack() as owned:
        owned.callback(core.close)
        say("starting the reward processes")
        num_workers = 1 if is_bare else NUM_REWARD_WORKERS
        scorer, eval_scorer = build_scorers(
            config.reward, score=learner.score, models=models, owned=owned, num_workers=num_workers
        )
        return Workers(
            tokenizer=tokenizer,
            engine=Ticker(core, max_running=config.rollout.max_running),
            learner=learner,
            critic=critic,
            reference=reference,
            scorer=scorer,
            eval_scorer=eval_scorer,
            environments=environments,
            train=inputs.train,
            val=inputs.val,
            stop_token_ids=stops,
            max_positions=core.max_positions,
            shares_policy=isinstance(core, NativeEngine),
            saving=saving_of(config, call, processes=[0], in_parts=in_parts),
            export=trained.export,
            owned=owned.pop_all(),
        )
