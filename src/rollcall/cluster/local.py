"""All roles in this process: the policy is loaded once, and engine and learner share its parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollcall.checkpoint.export import export_model
from rollcall.config import Config, ExactReward, Ppo, RolloutSection
from rollcall.data.load import PromptSet, load_prompts
from rollcall.decoder import Decoder
from rollcall.engine.native.engine import NativeEngine
from rollcall.learner.learner import Critic, Learner, score_samples
from rollcall.learner.model import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    stop_token_ids,
)
from rollcall.reward.scorer import ModelRewardFunction, Scorer
from rollcall.samples import Score
from rollcall.tiny import resolve_model
from rollcall.types import Completion, Prompt, Sample

COMPILE_FROM = 50_000_000  # parameters; below, compiling costs more than it saves
NUM_REWARD_WORKERS = 2


@dataclass(slots=True, kw_only=True)
class Workers:
    """What the controller drives."""

    tokenizer: Any
    engine: NativeEngine
    learner: Learner
    critic: Critic | None
    reference: Score | None  # log-probs of the frozen reference
    scorer: Scorer
    eval_scorer: Scorer
    train: PromptSet
    val: PromptSet | None
    stop_token_ids: tuple[int, ...]
    _preemptions_seen: int = 0

    def take_preemptions(self) -> int:
        new = self.engine.num_preemptions - self._preemptions_seen
        self._preemptions_seen += new
        return new

    def write_checkpoint(self, directory: Path) -> None:
        export_model(self.learner.model, self.tokenizer, directory / "model", dtype=None)
        torch.save(self.learner.optimizer.state_dict(), directory / "actor.pt")
        if self.critic:
            state = {name: tensor.detach().contiguous() for name, tensor in self.critic.named_tensors().items()}
            save_file(state, directory / "critic.safetensors")
            torch.save(self.critic.optimizer.state_dict(), directory / "critic.pt")

    def read_checkpoint(self, directory: Path) -> None:
        """Into the tensors that are there: engine and graphs keep reading the same addresses."""
        _copy_into(dict(self.learner.model.named_parameters()), _load_weights(directory / "model"))
        self.learner.optimizer.load_state_dict(
            torch.load(directory / "actor.pt", map_location="cpu", weights_only=True)
        )
        if self.critic:
            _copy_into(self.critic.named_tensors(), load_file(directory / "critic.safetensors"))
            state = torch.load(directory / "critic.pt", map_location="cpu", weights_only=True)
            self.critic.optimizer.load_state_dict(state)

    def close(self) -> None:
        self.scorer.close()
        if self.eval_scorer is not self.scorer:
            self.eval_scorer.close()


def build_workers(config: Config, *, say: Callable[[str], None]) -> Workers:
    """Load everything the run file names. ``say`` tells the user what is being done."""
    torch.set_num_threads(config.trainer.num_threads or os.cpu_count() or 1)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    path = resolve_model(config.model.path, say=say)
    tokenizer = load_tokenizer(path, chat_template=config.model.chat_template)
    train = load_prompts(config.data.train, data=config.data, tokenizer=tokenizer, split="train")
    val = None
    if config.data.val is not None:
        limit = config.eval.max_prompts
        val = load_prompts(config.data.val, data=config.data, tokenizer=tokenizer, split="val", limit=limit)
    for prompts in (train, val):
        if prompts is not None and prompts.num_overlong:
            say(
                f"{prompts.source}: left out {prompts.num_overlong} prompts longer than {config.data.max_prompt_tokens} tokens"
            )

    load = partial(load_causal_lm, path, device=device, dtype=dtype)
    model = load()
    learner = Learner(
        model,
        config.actor,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
        total_updates=config.trainer.steps * config.actor.minibatches * config.actor.epochs,
    )
    engine = build_engine(config.rollout, model, tokenizer)
    _maybe_compile(learner, config, device)
    scorer = Scorer(
        config.reward, num_workers=NUM_REWARD_WORKERS, model_rewards=_model_rewards(config, learner, device)
    )
    return Workers(
        tokenizer=tokenizer,
        engine=engine,
        learner=learner,
        critic=_build_critic(config, load()) if isinstance(config.algorithm, Ppo) else None,
        reference=_build_reference(config, load()) if config.needs_reference else None,
        scorer=scorer,
        eval_scorer=_eval_scorer(config, scorer),
        train=train,
        val=val,
        stop_token_ids=stop_token_ids(tokenizer, model.config, model.generation_config),
    )


def build_engine(rollout: RolloutSection, model: Any, tokenizer: Any) -> NativeEngine:
    return NativeEngine(
        model,
        tokenizer,
        max_running=rollout.max_running,
        kv_tokens=rollout.kv_tokens,
        kv_fraction=rollout.kv_memory_fraction,
    )


def _maybe_compile(learner: Learner, config: Config, device: torch.device) -> None:
    num_parameters = sum(tensor.numel() for tensor in learner.decoder.named_tensors().values())
    pays = device.type == "cuda" and num_parameters >= COMPILE_FROM
    if config.actor.compile if config.actor.compile is not None else pays:
        learner.decoder.compile()


def _build_critic(config: Config, model: Any) -> Critic:
    assert isinstance(config.algorithm, Ppo)
    updates = config.trainer.steps * config.critic.minibatches * config.critic.epochs
    return Critic(model, config.critic, algorithm=config.algorithm, total_updates=updates)


def _build_reference(config: Config, model: Any) -> Score:
    return partial(
        score_samples,
        Decoder.of(model),
        temperature=config.rollout.temperature,
        tokens_per_microbatch=config.actor.tokens_per_microbatch,
    )


def _eval_scorer(config: Config, scorer: Scorer) -> Scorer:
    """The run's own rewards; where those come from a model alone, whether the answer is right."""
    if any(reward.type not in ("self_certainty", "model") for reward in config.reward):
        return scorer
    return Scorer([ExactReward()], num_workers=NUM_REWARD_WORKERS, model_rewards={})


def _model_rewards(config: Config, learner: Learner, device: torch.device) -> dict[int, ModelRewardFunction]:
    functions: dict[int, ModelRewardFunction] = {}
    for index, reward in enumerate(config.reward):
        if reward.type == "self_certainty":
            functions[index] = partial(_self_certainty, learner)
        elif reward.type == "model":
            from rollcall.reward.model import RewardModel

            functions[index] = RewardModel(reward.path, device=device, max_tokens=reward.max_tokens)
    return functions


def _self_certainty(learner: Learner, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
    samples = [Sample.of(completion, draw=0, prompt_ids=prompt.token_ids) for completion in completions]
    scores = learner.score(samples)
    return [float(row.certainty[sample.mask].mean()) for row, sample in zip(scores, samples, strict=True)]


def _load_weights(directory: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


@torch.no_grad()
def _copy_into(tensors: Mapping[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(weights[name])
