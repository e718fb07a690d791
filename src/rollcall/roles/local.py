"""All roles in this process: the policy is loaded once, and engine and learner share its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollcall.checkpoint.saving import Saving, saving_of
from rollcall.config import Config, Ppo
from rollcall.engine.native.engine import NativeEngine
from rollcall.engine.ticker import Ticker
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner, Reference
from rollcall.loop.samples import ScoreSamples
from rollcall.model.load import resolve_device, resolve_dtype
from rollcall.model.stop_tokens import stop_token_ids
from rollcall.model.unread import load_onto
from rollcall.observe.live import Look
from rollcall.reward.model import load_reward_models
from rollcall.roles.build import (
    NUM_REWARD_WORKERS,
    Held,
    LocalEngine,
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
from rollcall.roles.card import settle
from rollcall.roles.trained import Trained
from rollcall.wait import say


@dataclass(slots=True, kw_only=True)
class LocalWorkers(Trained, Held[Ticker]):
    learner: Learner
    critic: Critic | None
    reference: ScoreSamples | None  # log-probs of the frozen reference
    core: LocalEngine
    is_remote: bool = field(default=False, init=False)
    repairs: None = field(default=None, init=False)  # all of it is this process
    saving: Saving = field(init=False)

    def _call(self, processes: Sequence[int], method: str, *args: Any) -> list[Any]:
        return [getattr(self, method)(*args)]

    @property
    def shares_policy(self) -> bool:
        return isinstance(self.core, NativeEngine)

    @property
    def max_positions(self) -> int:
        return self.core.max_positions

    def look(self, *, last: bool = False) -> Look:
        return Look()  # there is only this process, which the controller knows

    def close(self) -> None:
        self.core.close()
        Held.close(self)


def build_workers(config: Config, *, is_bare: bool = False) -> LocalWorkers:
    """Load everything the run file names. ``is_bare``, for a debugger: one reward process, no CUDA graphs."""
    set_threads(config.trainer.num_threads)
    check_engine(config.rollout)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    inputs = load_inputs(config)
    trust = config.model.trust_remote_code
    say(f"loading the model {config.model.path}")
    load = partial(load_onto, inputs.model_path, device=device, dtype=dtype, trust_remote_code=trust)
    model = load()
    stops = stop_token_ids(inputs.tokenizer, model.config, model.generation_config, rollout=config.rollout)
    adapter = build_adapter(config, model, device=device)
    learner = build_learner(config, model, gang=Gang.alone(), mirror=True, adapter=adapter)
    critic = build_critic(config, load(), gang=Gang.alone()) if isinstance(config.algorithm, Ppo) else None
    reference = _reference(config, learner, load) if config.needs_reference else None
    models = load_reward_models(config.reward, device=device, trust_remote_code=trust)
    # What is held for the whole run is there; the engine gets what is left.
    kv_tokens = settle(config, model, learners=[each for each in (learner, critic) if each is not None], samples=True)
    core = build_engine(
        config.rollout, model, inputs.tokenizer, graphs=not is_bare, adapter=adapter, kv_tokens=kv_tokens
    )
    say("starting the reward processes")
    scorer, eval_scorer = build_scorers(
        config.reward, score=learner.score, models=models, num_workers=1 if is_bare else NUM_REWARD_WORKERS
    )
    workers = LocalWorkers(
        tokenizer=inputs.tokenizer,
        engine=Ticker(core, max_running=config.rollout.max_running),
        core=core,
        learner=learner,
        critic=critic,
        reference=reference,
        scorer=scorer,
        eval_scorer=eval_scorer,
        environments=build_environments(config.environment, inputs.tokenizer, inputs.train, inputs.val),
        train=inputs.train,
        val=inputs.val,
        stop_token_ids=stops,
    )
    workers.saving = saving_of(config, workers._call, processes=[0], in_parts=workers.saves_in_parts)
    return workers


def _reference(config: Config, learner: Learner, load: Callable[[], Any]) -> Reference:
    """A second copy of the model, unless the learner leaves the one that is here as it is."""
    return build_reference(config, load()) if learner.adapter is None else reference_of(config, learner)
