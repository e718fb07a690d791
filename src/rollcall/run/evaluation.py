"""`rollcall eval`: finds the model, builds its engine and the rewards without an optimizer, and answers every prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.base.errors import ConfigError
from rollcall.base.process_table import refuse_few_files
from rollcall.base.types import Group, Prompt
from rollcall.base.wait import say
from rollcall.base.words import counted
from rollcall.checkpoint.exported import exported_model
from rollcall.checkpoint.run_dir import RUN_FILE, run_file_of
from rollcall.checkpoint.store import store_of
from rollcall.config import Config, DataSection, load_config
from rollcall.config.lora import LoraSection
from rollcall.engine.ticker import Ticker
from rollcall.loop.data.load import PromptSet, load_prompts
from rollcall.loop.evaluate import Evaluation, evaluate
from rollcall.loop.group_maker import sampling_of
from rollcall.loop.rollout import Rewards, Rollouts, player_of
from rollcall.loop.tasks import every, together
from rollcall.model.files import model_folder
from rollcall.model.load import resolve_device
from rollcall.observe.headline import Headline, headline_of
from rollcall.observe.samples import sample_rows
from rollcall.reward.model import load_reward_models
from rollcall.reward.scorer import Failure, Scorer, columns_needed
from rollcall.run.build import NUM_REWARD_WORKERS, build_environments, judges_of, load_sampler, open_model

GIVEN = "given by model.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A model to evaluate or serve."""

    config: Config
    model_path: str
    origin: str  # which of the run's models this is, in words
    lora: LoraSection | None  # an adapter to add to it


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    plan: ModelPlan
    prompts: PromptSet
    evaluation: Evaluation
    failures: list[Failure]
    seconds: float
    max_response_tokens: int

    @property
    def headline(self) -> Headline:
        return headline_of([self.evaluation.metrics()])

    @property
    def samples(self) -> list[tuple[str, str, str, float]]:
        return sample_rows(self.evaluation.groups, limit=6)

    def as_json(self) -> dict[str, Any]:
        evaluation, section = self.evaluation, self.plan.config.eval
        names = ("prompt", "completion", "answer", "reward")
        return {
            "model": self.plan.model_path,
            "origin": self.plan.origin,
            "data": self.prompts.source,
            "prompts": len(evaluation.groups),
            "overlong_prompts": self.prompts.num_overlong,
            "samples_per_prompt": section.samples_per_prompt,
            "temperature": section.temperature,
            "max_response_tokens": self.max_response_tokens,
            "headline": self.headline.key,
            "accuracy": evaluation.accuracy,
            "pass_at": {str(k): value for k, value in evaluation.pass_at.items()},
            "reward_mean": evaluation.reward_mean,
            "response_length_mean": evaluation.response_length_mean,
            "truncated_fraction": evaluation.truncated_fraction,
            "reward_errors": evaluation.num_unscored,
            "seconds": round(self.seconds, 3),
            "samples": [dict(zip(names, row, strict=True)) for row in self.samples],
        }


def plan_evaluation(
    target: Path,
    *,
    overrides: list[str],
    changes: Mapping[str, Any] | None = None,
    data: str | None,
    samples: int | None,
    temperature: float | None,
    max_prompts: int | None,
) -> ModelPlan:
    """Decide which model to evaluate, on which data and how. Refuses impossible requests before anything is loaded."""
    given = {
        "data.val": data,
        "eval.max_prompts": max_prompts,
        "eval.samples_per_prompt": samples,
        "eval.temperature": temperature,
    }
    values = {**(changes or {}), **{key: value for key, value in given.items() if value is not None}}
    # A model directory, or a checkpoint with a config, from Rollcall or another system.
    if target.is_dir() and not (target / RUN_FILE).exists() and model_folder(str(target)) is not None:
        if data is None:
            raise ConfigError(
                f"{target} is a model directory or a checkpoint, which does not name any data; add --data FILE"
            )
        # Replace the keys of the embedded run file that do not fit another model, other rows and longer answers.
        file = None
        defaults: dict[str, Any] = {
            "run.name": target.name,
            "model.path": str(target),
            "data.train": data,
            "data.max_prompt_tokens": DataSection.model_fields["max_prompt_tokens"].default,
            "rollout.max_response_tokens": 512,
        }
    else:
        file, defaults = run_file_of(target, what="a run file, or the directory of a run or of a model")
    load = partial(load_config, file, overrides, defaults=defaults)
    if samples is not None and temperature is None:
        # Several greedy completions would all be identical: without a temperature, use the run's sampling temperature.
        run = load(changes=values | {"eval.samples_per_prompt": 1})
        if samples > 1 and run.eval.temperature == 0:
            values["eval.temperature"] = run.rollout.temperature
    config = load(changes=values)
    if config.data.val is None:
        raise ConfigError("data.val is null, so there is nothing to evaluate on; add --data FILE")
    if file is None:
        return plan_model(config, origin="model directory")
    return plan_model(config, origin=GIVEN if sets_model(overrides, changes or {}) else None)


def run_evaluation(plan: ModelPlan, *, on_progress: Callable[[int, int], None]) -> EvalReport:
    """Evaluate the model. ``on_progress`` gets the number of finished prompts and of all prompts."""
    refuse_few_files()
    config = plan.config
    started = time.perf_counter()
    path, tokenizer = open_model(config, plan.model_path, origin=plan.origin)
    rewards = judges_of(config.reward)
    data, limit, needs = config.data, config.eval.max_prompts, columns_needed(rewards)
    assert data.val is not None, "plan_evaluation refuses a run without data"
    prompts = load_prompts(data.val, data=data, tokenizer=tokenizer, split="val", limit=limit, needs=needs)
    sampler = load_sampler(config.model, config.rollout, path, tokenizer, lora=plan.lora)
    room = sampler.engine.max_positions - max(len(prompt.token_ids) for prompt in prompts.prompts)
    # No completion can go past the model's last position. If there is no room for even one token, the engine refuses the prompt.
    longest = max(1, min(config.rollout.max_response_tokens, room))
    section = config.eval
    sampling = sampling_of(config.rollout, sampler.stop_token_ids, temperature=section.temperature, max_tokens=longest)
    say(
        f"answering {counted(len(prompts.prompts), 'prompt')}, {counted(section.samples_per_prompt, 'completion')} each, "
        f"of at most {sampling.max_tokens:,} tokens (rollout.max_response_tokens)"
    )
    device = resolve_device(config.model.device)
    models = load_reward_models(rewards, device=device, trust_remote_code=config.model.trust_remote_code)
    with closing(sampler.engine), Scorer(rewards, num_workers=NUM_REWARD_WORKERS, model_rewards=models) as scorer:
        environments = build_environments(config.environment, tokenizer, prompts)

        async def work() -> Evaluation:
            num_done = 0

            async def make_group(prompt: Prompt, **given: Any) -> Group:
                nonlocal num_done
                group = await rollouts.group(prompt, **given)
                num_done += 1
                return group

            async def show() -> None:
                on_progress(num_done, len(prompts.prompts))

            try:
                player = player_of(config, environments, tokenizer=tokenizer, scorer=scorer)
                engine = Ticker(sampler.engine, max_running=config.rollout.max_running)
                rollouts = Rollouts(engine=engine, rewards=Rewards(), player=player)
                found = evaluate(
                    prompts.prompts,
                    section=section,
                    make_group=make_group,
                    scorer=scorer,
                    sampling=sampling,
                    seed=config.run.seed,
                    step=0,
                )
                return await together(found, background=[every(0.5, show)])
            finally:
                if environments is not None:
                    await environments.aclose()

        return EvalReport(
            plan=plan,
            prompts=prompts,
            evaluation=asyncio.run(work()),
            failures=scorer.failures,
            seconds=time.perf_counter() - started,
            max_response_tokens=sampling.max_tokens,
        )


def sets_model(overrides: list[str], changes: Mapping[str, Any]) -> bool:
    section = changes.get("model")
    in_section = isinstance(section, Mapping) and "path" in section
    return in_section or "model.path" in changes or any(text.startswith("model.path=") for text in overrides)


def plan_model(config: Config, *, origin: str | None) -> ModelPlan:
    """Choose the model at ``model.path`` if the user set it, described by ``origin``; otherwise the run's newest model. An adapter in the
    run file is only added to the model that the run starts from, because a model that the run has trained already includes it."""
    path, words = (config.model.path, origin) if origin is not None else newest_model_of(config)
    lora = config.model.lora
    if lora is None or lora.path is None or path != config.model.path:
        lora = None
    elif origin == GIVEN:
        raise ConfigError(
            f"model.path={path} is given, but model.lora.path={lora.path} is an adapter for the run's own model; add model.lora=null to "
            "leave the adapter out, or evaluate the model in place of the run"
        )
    return ModelPlan(config=config, model_path=path, origin=words, lora=lora)


def newest_model_of(config: Config) -> tuple[str, str]:
    """Return a run's newest model and its origin. The exported model comes first, then the newest checkpoint's, then the model that the
    run starts from."""
    checkpoint = store_of(config.run.dir).latest()
    if (exported := exported_model(config.run.dir, last=checkpoint)) is not None:
        return str(exported), "trained model"
    if checkpoint is not None:
        return str(checkpoint.path), f"checkpoint of step {checkpoint.step}"
    return config.model.path, "not trained yet: the model the run starts from"
