"""All roles in this process: the policy is loaded once, and engine and learner share its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollcall.checkpoint.training import export_learner, read_critic, read_learner, write_critic, write_learner
from rollcall.config import Config, ModelReward, Ppo
from rollcall.engine.native.engine import NativeEngine
from rollcall.learner.gang import Gang
from rollcall.learner.learner import Critic, Learner
from rollcall.loop.samples import ScoreSamples
from rollcall.model.load import load_causal_lm, resolve_device, resolve_dtype
from rollcall.model.stop_tokens import stop_token_ids
from rollcall.reward.scorer import ModelRewardFunction
from rollcall.roles.build import (
    Held,
    LocalEngine,
    build_critic,
    build_engine,
    build_learner,
    build_reference,
    build_scorers,
    check_engine,
    load_inputs,
    load_reward_model,
    set_threads,
)
from rollcall.wait import say


@dataclass(slots=True, kw_only=True)
class LocalWorkers(Held[LocalEngine]):
    learner: Learner
    critic: Critic | None
    reference: ScoreSamples | None  # log-probs of the frozen reference

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def repairs(self) -> None:
        return None  # all of it is this process

    @property
    def shares_policy(self) -> bool:
        return isinstance(self.engine, NativeEngine)

    @property
    def max_positions(self) -> int:
        return self.engine.max_positions

    def write_checkpoint(self, directory: Path) -> None:
        write_learner(self.learner, self.tokenizer, directory, stops=self.stop_token_ids)
        if self.critic:
            write_critic(self.critic, directory)

    def read_checkpoint(self, directory: Path) -> None:
        read_learner(self.learner, directory)
        if self.critic:
            read_critic(self.critic, directory)

    def export(self, directory: Path) -> None:
        export_learner(self.learner, self.tokenizer, directory, stops=self.stop_token_ids)

    def close(self) -> None:
        self.engine.close()
        Held.close(self)


def build_workers(config: Config) -> LocalWorkers:
    """Load everything the run file names."""
    set_threads(config.trainer.num_threads)
    check_engine(config.rollout)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    inputs = load_inputs(config)
    trust = config.model.trust_remote_code
    say(f"loading the model {config.model.path}")
    load = partial(load_causal_lm, inputs.model_path, device=device, dtype=dtype, trust_remote_code=trust)
    model = load()
    stops = stop_token_ids(inputs.tokenizer, model.config, model.generation_config, rollout=config.rollout)
    learner = build_learner(config, model, gang=Gang.alone(), mirror=True)
    engine = build_engine(config.rollout, model, inputs.tokenizer)

    def model_reward(index: int) -> ModelRewardFunction:
        reward = config.reward[index]
        assert isinstance(reward, ModelReward)
        return load_reward_model(reward, device=device, trust_remote_code=trust)

    say("starting the reward processes")
    scorer, eval_scorer = build_scorers(config.reward, score=learner.score, model_reward=model_reward)
    return LocalWorkers(
        tokenizer=inputs.tokenizer,
        engine=engine,
        learner=learner,
        critic=build_critic(config, load(), gang=Gang.alone()) if isinstance(config.algorithm, Ppo) else None,
        reference=build_reference(config, load()) if config.needs_reference else None,
        scorer=scorer,
        eval_scorer=eval_scorer,
        train=inputs.train,
        val=inputs.val,
        stop_token_ids=stops,
    )
