"""Runs all roles in this process. The policy is loaded once, and the engine and the learner share its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rollcall.base.wait import say
from rollcall.checkpoint.saving import saving_of
from rollcall.config import Config
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.ticker import Ticker
from rollcall.learner.gang import Gang
from rollcall.loop.workers import Workers
from rollcall.model.load import resolve_device
from rollcall.plan.placement import needed_roles
from rollcall.run.build import (
    NUM_REWARD_WORKERS,
    build_environments,
    build_scorers,
    check_engine,
    load_inputs,
    set_threads,
)
from rollcall.run.worker import RoleWorker


def build_workers(config: Config, *, is_bare: bool = False) -> Workers:
    """Load everything that the run file names. ``is_bare`` is for debugging: one reward process, no CUDA graphs."""
    set_threads(config.trainer.num_threads)
    check_engine(config.rollout)
    resolve_device(config.model.device)  # refuse a wrong device before anything is read
    inputs = load_inputs(config)
    # The environment starts before any weights are read, because its code may be wrong.
    environments = build_environments(config.environment, inputs.tokenizer, inputs.train, inputs.val)
    with ExitStack() as owned, ExitStack() as undo:
        if environments is not None:
            undo.callback(lambda: asyncio.run(environments.aclose()))
        say(f"loading the model {config.model.path}")
        worker = RoleWorker(config, inputs.model_path, tokenizer=inputs.tokenizer)
        worker.load(needed_roles(config), gang=Gang.alone(), is_alone=True, graphs=not is_bare)
        learner, critic, core = worker.learner, worker.critic, worker.engine
        assert learner is not None and core is not None
        owned.callback(core.close)
        say("starting the reward processes")
        scorer, eval_scorer = build_scorers(
            config.reward,
            score=learner.score,
            models=worker.reward_models,
            owned=owned,
            num_workers=1 if is_bare else NUM_REWARD_WORKERS,
        )

        def call(processes: Sequence[int], method: str, *args: Any) -> list[Any]:
            return [getattr(worker, method)(*args)]

        # An adapter is small, so it is saved whole.
        in_parts = learner.adapter is None and any(each and each.body.in_parts for each in (learner, critic))
        workers = Workers(
            tokenizer=inputs.tokenizer,
            engine=Ticker(core, max_running=config.rollout.max_running),
            learner=learner,
            critic=critic,
            reference=worker.reference,
            scorer=scorer,
            eval_scorer=eval_scorer,
            environments=environments,
            train=inputs.train,
            val=inputs.val,
            stop_token_ids=worker.stop_token_ids,
            max_positions=core.max_positions,
            shares_policy=isinstance(core, NativeEngine),
            saving=saving_of(config, call, processes=[0], in_parts=in_parts),
            export=worker.export,
            owned=owned.pop_all(),
        )
        undo.pop_all()
        return workers
