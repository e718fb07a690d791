"""Reads and writes the full run file.

``load_config`` reads YAML, applies ``dotted.key=value`` overrides and validates. The error for an unknown key
suggests the most similar name. Variants (algorithms, rewards) are unions keyed on ``name`` / ``type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from rollcall.base.errors import ConfigError
from rollcall.base.redact import redact_run, remember, secrets_of_run
from rollcall.base.words import counted
from rollcall.config.algorithms import Algorithm, GroupAlgorithm, Grpo, Intuitor
from rollcall.config.base import Section, field
from rollcall.config.checks import check_batches, check_ruin
from rollcall.config.environments import EnvironmentSection
from rollcall.config.errors import explain_all, shown
from rollcall.config.launch import FinishSection, LaunchSection, PrepareSection
from rollcall.config.lora import check_lora
from rollcall.config.overrides import add_key, apply_override, refuse_secret, set_key
from rollcall.config.rewards import ExactReward, Reward
from rollcall.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvalSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from rollcall.config.yaml import read_yaml, refuse_deep


class Config(Section):
    run: RunSection = field(RunSection(), "Name, directory and seed.")
    cluster: ClusterSection | None = field(
        None, "Nodes, slots and placement. Without this section, the run is one process on this machine."
    )
    model: ModelSection = field(ModelSection(), "The model to train.")
    data: DataSection = field(DataSection(), "The prompts.")
    rollout: RolloutSection = field(RolloutSection(), "How completions are sampled.")
    environment: EnvironmentSection | None = field(
        None, "The environment that the model acts in, turn by turn. Without one, a completion is a single turn."
    )
    reward: list[Reward] = field(
        [ExactReward()],
        "The rewards; a completion's reward is their weighted sum. With an `environment`, the default is the environment's own reward.",
    )
    algorithm: Algorithm = field(Grpo(), "Advantage and loss.")
    actor: OptimizerSection = field(OptimizerSection(), "The policy's optimizer.")
    critic: OptimizerSection = field(OptimizerSection(lr=1e-5), "The critic's optimizer (PPO only).")
    trainer: TrainerSection = field(
        TrainerSection(),
        "How long to train, when to evaluate and save, and what to do when a process or a node is lost.",
    )
    checkpoint: CheckpointSection = field(CheckpointSection(), "Where checkpoints are written.")
    eval: EvalSection = field(EvalSection(), "How to evaluate.")
    prepare: PrepareSection = field(PrepareSection(), "What nodes do before the run.")
    launch: LaunchSection | None = field(None, "Where `rollcall launch` gets the nodes.")
    finish: FinishSection = field(FinishSection(), "What `rollcall finish` does with the last checkpoint.")

    @model_validator(mode="before")
    @classmethod
    def _an_environment_rewards(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("environment") is not None and "reward" not in data:
            return {**data, "reward": [{"type": "environment"}]}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for name in ("actor", "critic") if self.algorithm.name == "ppo" else ("actor",):
            parts = getattr(self, name).minibatches
            if self.data.prompts_per_step % parts:
                raise ValueError(
                    f"data.prompts_per_step={self.data.prompts_per_step} cannot be split into {name}.minibatches={parts}; "
                    f"use a divisor of {self.data.prompts_per_step}"
                )
            check_batches(self, name=name)
        if isinstance(self.algorithm, GroupAlgorithm | Intuitor) and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"algorithm {self.algorithm.name} compares the completions of a prompt with each other, "
                f"but rollout.samples_per_prompt={self.rollout.samples_per_prompt} leaves nothing to compare; use 2 or more"
            )
        if self.algorithm.name == "intuitor" and [reward.type for reward in self.reward] != ["self_certainty"]:
            raise ValueError(
                "algorithm intuitor learns only from self-certainty; write reward: [{type: self_certainty}] "
                "(evaluation then measures accuracy against `data.answer_key` with the `exact` reward)"
            )
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncated and self.algorithm.old_logprobs == "engine":
            raise ValueError(
                "rollout.top_p/top_k change the sampling distribution, so behaviour log-probs cannot replace the "
                "policy's; set algorithm.old_logprobs=learner, or top_p=1 and top_k=0"
            )
        if truncated and self.algorithm.kl_in == "reward" and self.algorithm.kl_coef > 0:
            raise ValueError(
                "algorithm.kl_in=reward measures the KL on the behaviour log-probs, which rollout.top_p/top_k shift; use "
                "algorithm.kl_in=loss, or top_p=1 and top_k=0"
            )
        if not self.reward:
            raise ValueError("reward is empty; list at least one, such as [{type: exact}]")
        if self.environment is None and any(reward.type == "environment" for reward in self.reward):
            raise ValueError(
                "reward {type: environment} needs an environment; add an environment section, or choose another reward"
            )
        if self.environment is None and "builtin:environment" in (self.data.train, self.data.val):
            raise ValueError(
                "data builtin:environment has no prompts of its own, so it needs an environment; add an environment section"
            )
        self._check_algorithm()
        cluster, elastic = self.cluster, self.trainer.elastic
        if cluster is not None and elastic is not None and elastic.min_nodes > cluster.num_nodes:
            raise ValueError(
                f"trainer.elastic.min_nodes={elastic.min_nodes}, but the whole cluster has only "
                f"{counted(cluster.num_nodes, 'node')}; use at most {cluster.num_nodes}"
            )
        check_lora(self)
        return self

    def _check_algorithm(self) -> None:
        algorithm, longest = self.algorithm, self.rollout.max_response_tokens
        if algorithm.name == "cispo" and algorithm.dual_clip is not None:
            raise ValueError(
                f"algorithm.dual_clip={algorithm.dual_clip} limits a ratio through which the gradient flows, but in cispo no gradient "
                "flows through the ratio; remove dual_clip, or lower algorithm.clip_high"
            )
        if isinstance(algorithm, GroupAlgorithm):
            if algorithm.advantage == "turn" and not any(reward.type == "environment" for reward in self.reward):
                raise ValueError(
                    "algorithm.advantage=turn compares the environment's rewards for turns, but this run has no reward "
                    "{type: environment}; add an environment and that reward, or use advantage: episode"
                )
            if algorithm.advantage == "episode" and algorithm.gamma != 1:
                raise ValueError(
                    f"algorithm.gamma={algorithm.gamma:g} discounts the rewards of turns, but algorithm.advantage=episode compares "
                    "whole attempts; add advantage: turn, or remove gamma"
                )
        if algorithm.overlong_buffer > longest:
            raise ValueError(
                f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than rollout.max_response_tokens={longest}, "
                f"so every completion would be penalised; use at most {longest}"
            )

    @property
    def completions_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.samples_per_prompt


def load_config(
    path: Path | str | Mapping[str, Any] | None = None,
    overrides: list[str] | None = None,
    *,
    defaults: dict[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Config:
    """Load and validate a run file (or its sections, or the embedded default) with ``a.b=value`` overrides.

    ``defaults`` and ``changes`` map dotted keys to Python values rather than text. Overrides take precedence over ``defaults``, and
    ``changes`` over both. A dict in ``changes`` is merged into the section.
    """
    refuse_deep([path, changes])
    if path is None:
        raw = default_run()
    else:
        raw = deepcopy(dict(path)) if isinstance(path, Mapping) else _read_sections(path, what="run file")
    for key, value in (defaults or {}).items():
        set_key(raw, key, value)
    for override in overrides or []:
        refuse_secret(override)
        apply_override(raw, override, root=Config)
    for key, value in (changes or {}).items():
        add_key(raw, key, value, root=Config)
    try:
        config = parse_config(raw)
        check_ruin(config)
    except ConfigError as error:
        if path is None or isinstance(path, Mapping):
            raise
        rest = " with the command line's overrides" if overrides else " with the call's changes" if changes else ""
        raise ConfigError(f"run file {path}{rest}: {error}") from None
    return config


def load_saved_run(path: Path) -> Config:
    """Load the run file that was saved in a run directory when the run was last started."""
    return parse_config(_read_sections(path, what="saved run file"))


def parse_config(raw: dict[str, Any]) -> Config:
    remember(secrets_of_run(raw).values())  # an error may show the given values
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain_all(error, Config)) from None


_UNSPLIT = {
    "sharding": "replicate",
    "sharding_group_size": None,
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "cpu_offload": False,
    "compile": False,
}


def in_one_process(config: Config, *, keeps_dir: bool = True) -> Config:
    """Return the same run without its cluster: nothing is split across processes or compiled, and the native engine samples.
    Episodes run one at a time, so that a breakpoint stops only one. Model, data, rewards, algorithm and sizes stay the same. Unless
    ``keeps_dir`` is true, the run gets a directory of its own, so that the real run's checkpoints and journal do not change."""
    environment, run_dir = config.environment, config.run.dir
    if not keeps_dir:
        run_dir = run_dir.with_name(f"{run_dir.name}-local-debug")
    sections = {
        "run": config.run.model_copy(update={"dir": run_dir}),
        "cluster": None,
        "launch": None,
        "actor": config.actor.model_copy(update=_UNSPLIT),
        **({"critic": config.critic.model_copy(update=_UNSPLIT)} if config.algorithm.name == "ppo" else {}),
        "rollout": config.rollout.model_copy(update={"engine": "native", "compile": False}),
        **({"environment": environment.model_copy(update={"max_running": 1})} if environment is not None else {}),
        "trainer": config.trainer.model_copy(update={"elastic": None}),
        "checkpoint": config.checkpoint.model_copy(update={"place": "shared"}),
    }
    return load_config(config.model_copy(update=sections).model_dump(warnings=False))


def dump_config(config: Config) -> str:
    """Return the resolved run file as YAML. Reading it back returns the same config, except for redacted secrets."""
    return _dumped(public_dump(config))


def dump_given(config: Config, *, without: set[str]) -> str:
    """Like ``dump_config``, but only with the keys that were set, because the reader adds defaults. ``without`` names sections to omit."""
    given = config.model_dump(mode="json", exclude_unset=True, exclude=without)
    return _dumped(_part(public_dump(config), given))


def _dumped(value: Any) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # many times faster, if PyYAML has it
    return yaml.dump(value, Dumper=dumper, sort_keys=False, width=110)


def _part(whole: Any, given: Any) -> Any:
    """Return the part of ``whole`` that has the same keys as ``given``."""
    if isinstance(given, dict):
        return {key: _part(whole[key], value) for key, value in given.items()}
    if isinstance(given, list):
        return [_part(*pair) for pair in zip(whole, given, strict=True)]
    return whole


def public_dump(config: Config) -> dict[str, Any]:
    """Return the sections as plain values for a file or a tracker, without the secrets in ``cluster.env``."""
    return redact_run(config.model_dump(mode="json"))


def default_run() -> dict[str, Any]:
    """Return the embedded default, the arithmetic demo."""
    from importlib.resources import files

    return yaml.safe_load((files("rollcall.config") / "default.yaml").read_text())


def _read_sections(path: Path | str, *, what: str) -> dict[str, Any]:
    raw = read_yaml(path, what=what)
    if not isinstance(raw, dict):
        raise ConfigError(f"{what} {path} must contain sections (run, model, data, ...), not {type(raw).__name__}")
    if strange := [key for key in raw if not isinstance(key, str)]:
        raise ConfigError(
            f"{what} {path}: {shown(strange[0])} is not the name of a section, because it is not a string"
        )
    return raw
