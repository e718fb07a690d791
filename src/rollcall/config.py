"""The run file: one pydantic model per section, every default beside its field with its meaning and unit.

``load_config`` reads YAML, applies ``dotted.key=value`` overrides and validates. An unknown key is refused with the
nearest name. Variants (algorithms, rewards) are unions keyed on ``name`` / ``type``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollcall.config_errors import explain
from rollcall.redact import redact_run, redact_source, remember, secrets_of_run

DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"}


class ConfigError(ValueError):
    """The run file is wrong; the message says where and what to write instead."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)


def _field(default: Any, meaning: str, **kwargs: Any) -> Any:
    return Field(default, description=meaning, **kwargs)


class RunSection(Section):
    name: str = _field("run", "Name shown in logs and on trackers.")
    dir: Path = _field(Path("runs/run"), "Run directory; the same command in the same directory resumes.")
    seed: int = _field(0, "Seed of data order and sampling.", ge=0)


class NodeSection(Section):
    gpus: int = Field(description="Slots (accelerators) on this node.", ge=1)


class ClusterSection(Section):
    num_nodes: int = _field(1, "Nodes in the cluster.", ge=1)
    num_gpus_per_node: int = _field(1, "Slots (accelerators) on each node.", ge=1)
    nodes: list[NodeSection] | None = _field(
        None,
        "Nodes that differ, such as `[{gpus: 8}, {gpus: 4}]`; in place of `num_nodes` and `num_gpus_per_node`.",
        min_length=1,
    )
    accelerator: Literal["gpu", "cpu"] = _field(
        "gpu", "What a slot is: a GPU, or a logical seat on a node without one (`rollcall node --slots`)."
    )
    component_placement: dict[str, str | int] = _field(
        {"actor,rollout": "all"}, "Roles to slots, such as `{'actor,rollout': all}`."
    )
    env: dict[str, str] = _field({}, "Environment variables of every worker.")
    env_pass: list[str] = _field(
        [], "Names (or patterns such as `NCCL_*`) of variables copied from whoever submits to every worker."
    )
    node_env: dict[int, dict[str, str]] = _field({}, "Variables of the workers of one node alone, by node rank.")

    @model_validator(mode="after")
    def _nodes_agree(self) -> ClusterSection:
        """`nodes` fixes the two numbers; a resolved run file has all three."""
        sizes = [node.gpus for node in self.nodes or []]
        fixed = {"num_nodes": len(sizes), "num_gpus_per_node": max(sizes)} if sizes else {}
        for key, value in fixed.items():
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(
                    f"{key}={getattr(self, key)} contradicts nodes, which lists {len(sizes)} of {sizes} slots; leave {key} out"
                )
        for key, value in fixed.items():
            object.__setattr__(self, key, value)  # frozen for everyone else
        if strangers := [rank for rank in self.node_env if not 0 <= rank < self.num_nodes]:
            raise ValueError(
                f"node_env has node {strangers[0]}; the {self.num_nodes} nodes are 0 to {self.num_nodes - 1}"
            )
        return self

    @property
    def slots_per_node(self) -> list[int]:
        if self.nodes is not None:
            return [node.gpus for node in self.nodes]
        return [self.num_gpus_per_node] * self.num_nodes

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_node)


class ModelSection(Section):
    path: str = _field(
        "builtin:arithmetic",
        "Model directory or hub name; `builtin:arithmetic` is the small embedded model, warm-started once and cached.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _field(
        "auto", "Compute precision (`bf16`, `fp32` are accepted); `auto`: bfloat16 on CUDA, float32 on CPU."
    )
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "Where to train; `auto` takes CUDA when there is one.")
    chat_template: str | None = _field(None, "Jinja chat template that replaces the tokenizer's own.")

    @model_validator(mode="before")
    @classmethod
    def _alias_dtype(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("dtype") in DTYPE_ALIASES:
            data = {**data, "dtype": DTYPE_ALIASES[data["dtype"]]}
        return data


class DataSection(Section):
    train: str = _field("builtin:arithmetic", "JSONL or Parquet file with the training rows.")
    val: str | None = _field("builtin:arithmetic", "Held-out rows for evaluation; `null`: no evaluation.")
    prompt_key: str = _field("prompt", "Column with the prompt: text, or chat messages.")
    answer_key: str = _field("answer", "Column with the ground truth.")
    system: str | None = _field(None, "System message put before each chat prompt.")
    template: str | None = _field(None, "Text around each prompt, with `{prompt}` in it; applied to text prompts only.")
    chat: bool | None = _field(
        None, "Render text prompts as one user turn through the chat template; `null`: if the tokenizer has one."
    )
    prompts_per_step: int = _field(48, "Prompts (groups) that make one training step.", ge=1)
    max_prompt_tokens: int = _field(512, "Longer prompts are left out, and counted.", ge=1)
    shuffle: bool = _field(True, "Draw each epoch in a new seeded order.")


class RolloutSection(Section):
    engine: Literal["native"] = _field("native", "Which engine samples.")
    samples_per_prompt: int = _field(8, "Completions per prompt (group size).", ge=1)
    max_response_tokens: int = _field(8, "Longest completion, in tokens.", ge=1)
    temperature: float = _field(1.0, "Sampling temperature.", gt=0)
    top_p: float = _field(1.0, "Keep the smallest set of tokens with this much probability.", gt=0, le=1)
    top_k: int = _field(0, "Keep this many likeliest tokens; 0: all.", ge=0)
    stop: list[str] = _field([], "Strings that end a completion; the text up to and with them is kept.")
    max_running: int = _field(512, "Most completions decoded at once.", ge=1)
    kv_tokens: int | None = _field(
        None,
        "Room of the KV cache, in tokens; `null`: from `kv_memory_fraction` on CUDA, enough for `max_running` on CPU.",
    )
    kv_memory_fraction: float = _field(0.3, "Share of the CUDA card's memory for the KV cache.", gt=0, lt=1)


class RewardBase(Section):
    weight: float = _field(1.0, "Factor in the weighted sum.")
    timeout_s: float = _field(10.0, "Longest time for one completion, in seconds; past it the score is 0.", gt=0)


class ExactReward(RewardBase):
    """1 if the completion, stripped, equals the answer."""

    type: Literal["exact"] = "exact"


class NumberReward(RewardBase):
    """1 if the last number in the completion equals the answer's last number."""

    type: Literal["number"] = "number"


class MathReward(RewardBase):
    """1 if math-verify finds the completion's final expression equal to the answer's."""

    type: Literal["math"] = "math"


class RegexReward(RewardBase):
    """1 if the pattern is found in the completion (format rewards)."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(description="Python regular expression, searched with DOTALL.")


class CountdownReward(RewardBase):
    """1 if the expression in the completion uses the row's `numbers` once each and makes its `target`."""

    type: Literal["countdown"] = "countdown"
    format_score: float = _field(0.1, "Score of a well-formed expression with the wrong value.", ge=0, le=1)


class ReasoningGymReward(RewardBase):
    """The score of the reasoning-gym task that made the row."""

    type: Literal["reasoning_gym"] = "reasoning_gym"


class FunctionReward(RewardBase):
    """A function of yours: `f(prompt, completion, answer, metadata) -> float`."""

    type: Literal["function"] = "function"
    path: str = Field(description="`module:function`, importable from the working directory.")


class SelfCertaintyReward(RewardBase):
    """Mean over tokens of KL(uniform || policy): how sure the policy is of itself (Intuitor)."""

    type: Literal["self_certainty"] = "self_certainty"


class ModelReward(RewardBase):
    """The score of a reward model (`AutoModelForSequenceClassification` with one label)."""

    type: Literal["model"] = "model"
    path: str = Field(description="Directory or hub name of the reward model.")
    max_tokens: int = _field(2048, "Prompt and completion are cut to this many tokens, from the left.", ge=1)


Reward = Annotated[
    Union[
        ExactReward, NumberReward, MathReward, RegexReward, CountdownReward, ReasoningGymReward, FunctionReward,
        SelfCertaintyReward, ModelReward,
    ],
    Field(discriminator="type"),
]  # fmt: skip


class AlgorithmBase(Section):
    """What all algorithms share. Each variant below fixes its defaults and names its paper."""

    clip_low: float = _field(0.2, "The ratio is clipped below 1 - clip_low.", ge=0)
    clip_high: float = _field(0.2, "The ratio is clipped above 1 + clip_high.", ge=0)
    dual_clip: float | None = _field(
        None, "Bound on the loss of negative advantages (dual-clip PPO); `null`: off.", gt=1
    )
    kl_coef: float = _field(0.0, "Weight of the KL to the frozen reference; 0: no reference is loaded.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = _field("k3", "Per-token estimator of that KL.")
    kl_in: Literal["loss", "reward"] = _field("loss", "Add the KL to the loss, or take it off the token rewards.")
    entropy_coef: float = _field(0.0, "Weight of the entropy bonus.", ge=0)
    old_logprobs: Literal["learner", "engine"] = _field(
        "learner",
        "Base of the ratio: `learner` recomputes it (decoupled), `engine` takes the behaviour log-probs (bypass).",
    )
    tis_cap: float | None = _field(
        2.0, "Truncated importance sampling: the loss is weighted by min(old / behaviour, cap); `null`: off.", gt=0
    )
    mismatch_mask: tuple[float, float] | None = _field(
        None, "Tokens whose old / behaviour ratio is outside [low, high] are left out of the loss; `null`: none."
    )
    dynamic_sampling: bool = _field(
        False, "Leave out groups whose rewards are all equal and draw more prompts instead."
    )
    max_refills: int = _field(4, "Most times a step draws extra prompts for dynamic sampling.", ge=0)
    overlong_buffer: int = _field(
        0, "Tokens before the limit over which a length penalty grows to `overlong_penalty`.", ge=0
    )
    overlong_penalty: float = _field(1.0, "Penalty at the token limit (soft overlong punishment).", ge=0)


class Grpo(AlgorithmBase):
    """GRPO, arXiv:2402.03300: group-normalised rewards, clipped ratio, mean over each response, then over responses."""

    name: Literal["grpo"] = "grpo"


class DrGrpo(AlgorithmBase):
    """Dr. GRPO, arXiv:2503.20783: no division by the group's deviation or the response's length."""

    name: Literal["dr_grpo"] = "dr_grpo"


class Dapo(AlgorithmBase):
    """DAPO, arXiv:2503.14476: clip-higher, dynamic sampling, token-level loss, soft overlong punishment."""

    name: Literal["dapo"] = "dapo"
    clip_high: float = _field(0.28, "The ratio is clipped above 1 + clip_high.", ge=0)
    dynamic_sampling: bool = _field(True, "Leave out groups whose rewards are all equal and draw more prompts instead.")


class Gspo(AlgorithmBase):
    """GSPO, arXiv:2507.18071: one length-normalised ratio per sequence."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = _field(3e-4, "The sequence ratio is clipped below 1 - clip_low.", ge=0)
    clip_high: float = _field(4e-4, "The sequence ratio is clipped above 1 + clip_high.", ge=0)


class Cispo(AlgorithmBase):
    """CISPO, arXiv:2506.13585: the clipped ratio is a constant weight on the policy gradient; no token is dropped."""

    name: Literal["cispo"] = "cispo"
    clip_low: float = _field(1.0, "The weight is clipped below 1 - clip_low.", ge=0)
    clip_high: float = _field(4.0, "The weight is clipped above 1 + clip_high.", ge=0)


class Rloo(AlgorithmBase):
    """RLOO, arXiv:2402.14740: each reward against the mean of its group's others."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(AlgorithmBase):
    """REINFORCE++, arXiv:2501.03262: token returns (KL inside the reward), normalised over the whole batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    kl_in: Literal["loss", "reward"] = _field("reward", "Add the KL to the loss, or take it off the token rewards.")
    kl_estimator: Literal["k1", "k2", "k3"] = _field("k1", "Per-token estimator of that KL.")
    gamma: float = _field(1.0, "Discount of token rewards.", ge=0, le=1)


class Ppo(AlgorithmBase):
    """PPO, arXiv:1707.06347, with a critic and GAE (arXiv:1506.02438)."""

    name: Literal["ppo"] = "ppo"
    gamma: float = _field(1.0, "Discount of token rewards.", ge=0, le=1)
    lam: float = _field(0.95, "GAE lambda.", ge=0, le=1)
    value_clip: float | None = _field(
        0.2, "Values move at most this far from the old ones in the loss; `null`: off.", gt=0
    )


class Intuitor(AlgorithmBase):
    """Intuitor, arXiv:2505.19590: GRPO with self-certainty as the only reward."""

    name: Literal["intuitor"] = "intuitor"
    kl_coef: float = _field(0.005, "Weight of the KL to the frozen reference; 0: no reference is loaded.", ge=0)


Algorithm = Annotated[
    Union[Grpo, DrGrpo, Dapo, Gspo, Cispo, Rloo, ReinforcePlusPlus, Ppo, Intuitor], Field(discriminator="name")
]


class OptimizerSection(Section):
    lr: float = _field(1e-6, "Peak learning rate of AdamW.", gt=0)
    betas: tuple[float, float] = _field((0.9, 0.999), "AdamW's betas.")
    eps: float = _field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = _field(0.0, "AdamW's weight decay; norms and biases are exempt.", ge=0)
    warmup_steps: int = _field(0, "Updates over which the rate rises from 0.", ge=0)
    decay: Literal["constant", "linear", "cosine"] = _field("constant", "How the rate falls after warm-up.")
    min_lr_ratio: float = _field(0.0, "Where the fall ends, as a share of the peak.", ge=0, le=1)
    grad_clip: float = _field(1.0, "Largest global gradient norm; 0: no clipping.", ge=0)
    tokens_per_microbatch: int = _field(16384, "Packed tokens of one forward.", ge=1)
    minibatches: int = _field(1, "Optimizer updates a step's samples are split into.", ge=1)
    epochs: int = _field(1, "Passes over a step's samples.", ge=1)
    master_weights: bool = _field(True, "Keep float32 master weights when the model is bfloat16.")
    activation_checkpointing: bool = _field(False, "Recompute activations in the backward pass to save memory.")
    compile: bool | None = _field(None, "Compile the decoder layers; `null`: on CUDA, for models where it pays.")


class TrainerSection(Section):
    steps: int = _field(100, "Training steps.", ge=1)
    eval_every: int = _field(20, "Steps between evaluations; 0: only first and last.", ge=0)
    save_every: int = _field(20, "Steps between checkpoints; 0: only the last.", ge=0)
    keep_last: int = _field(2, "Newest checkpoints to keep.", ge=1)
    keep_best: int = _field(1, "Best checkpoints (by eval accuracy) to keep beside them.", ge=0)
    staleness: int = _field(0, "Versions that rollout may run ahead of training; 0: synchronous.", ge=0)
    loggers: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = _field(
        ["console", "tensorboard"], "Where metrics go; `metrics.jsonl` is always written."
    )
    num_threads: int | None = _field(None, "CPU threads for torch; `null`: all cores.", ge=1)


class EvalSection(Section):
    temperature: float = _field(0.0, "Sampling temperature; 0: greedy.", ge=0)
    samples_per_prompt: int = _field(1, "Completions per prompt; more than one gives pass@k.", ge=1)
    max_prompts: int | None = _field(None, "Evaluate on the first so many rows; `null`: all.", ge=1)
    threshold: float = _field(1.0, "A completion counts as correct from this reward (of the first reward) on.")


class Config(Section):
    run: RunSection = _field(RunSection(), "Name, directory, seed.")
    cluster: ClusterSection | None = _field(None, "Where to run; absent: this process.")
    model: ModelSection = _field(ModelSection(), "What is trained.")
    data: DataSection = _field(DataSection(), "Prompts in.")
    rollout: RolloutSection = _field(RolloutSection(), "How completions are sampled.")
    reward: list[Reward] = _field([ExactReward()], "Scores, summed by weight.")
    algorithm: Algorithm = _field(Grpo(), "Advantage and loss.")
    actor: OptimizerSection = _field(OptimizerSection(), "The policy's optimizer.")
    critic: OptimizerSection = _field(OptimizerSection(lr=1e-5), "The critic's optimizer (PPO only).")
    trainer: TrainerSection = _field(TrainerSection(), "Length and rhythm of the run.")
    eval: EvalSection = _field(EvalSection(), "How evaluation samples.")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for name in ("actor", "critic") if self.algorithm.name == "ppo" else ("actor",):
            parts = getattr(self, name).minibatches
            if self.data.prompts_per_step % parts:
                raise ValueError(
                    f"data.prompts_per_step={self.data.prompts_per_step} cannot be split into {name}.minibatches={parts}; "
                    f"use a divisor of {self.data.prompts_per_step}"
                )
        if self.algorithm.name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "intuitor"):
            if self.rollout.samples_per_prompt < 2:
                raise ValueError(
                    f"algorithm {self.algorithm.name} compares the completions of a prompt with each other; "
                    f"rollout.samples_per_prompt={self.rollout.samples_per_prompt} leaves nothing to compare; use 2 or more"
                )
        if self.algorithm.name == "intuitor" and [reward.type for reward in self.reward] != ["self_certainty"]:
            raise ValueError(
                "algorithm intuitor learns from self-certainty alone; write reward: [{type: self_certainty}] "
                "(and eval accuracy is then measured by `data.answer_key` with the `exact` reward)"
            )
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncated and self.algorithm.old_logprobs == "engine":
            raise ValueError(
                "rollout.top_p/top_k change the sampling distribution, so behaviour log-probs cannot stand in for the "
                "policy's; set algorithm.old_logprobs=learner, or top_p=1 and top_k=0"
            )
        if truncated and self.algorithm.kl_in == "reward" and self.algorithm.kl_coef > 0:
            raise ValueError(
                "algorithm.kl_in=reward measures the KL on the behaviour log-probs, which rollout.top_p/top_k shift; use "
                "algorithm.kl_in=loss, or top_p=1 and top_k=0"
            )
        if not self.reward:
            raise ValueError("reward is empty; give at least one, such as [{type: exact}]")
        self._check_algorithm()
        return self

    def _check_algorithm(self) -> None:
        algorithm, longest = self.algorithm, self.rollout.max_response_tokens
        if algorithm.name == "cispo" and algorithm.dual_clip is not None:
            raise ValueError(
                f"algorithm.dual_clip={algorithm.dual_clip} bounds a ratio that carries the gradient, and cispo's does not; "
                "leave dual_clip out, or lower algorithm.clip_high"
            )
        if algorithm.overlong_buffer > longest:
            raise ValueError(
                f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than rollout.max_response_tokens={longest}, "
                f"so every completion would be punished; use at most {longest}"
            )

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coef > 0

    @property
    def completions_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.samples_per_prompt


def load_config(path: Path | str | None = None, overrides: list[str] | None = None) -> Config:
    """Run file (or the embedded default) plus ``a.b=value`` overrides, validated."""
    raw = _read_yaml(path) if path is not None else default_run()
    for override in overrides or []:
        _refuse_secret(override)
        _apply_override(raw, override)
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    remember(secrets_of_run(raw).values())  # a refusal may show what was given
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(item, Config) for item in error.errors())) from None


def dump_config(config: Config) -> str:
    """The resolved run file as YAML; reading it back gives the same config, but for secrets: they are redacted."""
    return yaml.safe_dump(public_dump(config), sort_keys=False, width=110)


def public_dump(config: Config) -> dict[str, Any]:
    """The sections as plain values, for a file or a tracker: without the secrets of ``cluster.env``."""
    return redact_run(config.model_dump(mode="json"))


def default_run() -> dict[str, Any]:
    """The embedded default: the arithmetic demo."""
    from importlib.resources import files

    return yaml.safe_load((files("rollcall") / "default.yaml").read_text())


def _read_yaml(path: Path | str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist; `rollcall config` prints one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"run file {path} is not YAML: {redact_source(str(error))}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"run file {path} must hold sections (run, model, data, ...), not {type(raw).__name__}")
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not key=value; write for example actor.lr=1e-5")
    value = _parse_value(text)
    node: Any = raw
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(node, list):
            node = node[_list_index(node, parent, override)]
        else:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    else:
        node[last] = value


def _refuse_secret(override: str) -> None:
    """A command line is in the process list, in the shell's history and, of a driver, in Ray's records."""
    if not override.startswith("cluster."):
        return
    alone: dict[str, Any] = {}
    _apply_override(alone, override)
    for name in secrets_of_run(alone):
        raise ConfigError(
            f"{name} is a secret by its name, and others see a command line; export {name} and name it in cluster.env_pass"
        )


def _parse_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _list_index(node: list[Any], text: str, override: str) -> int:
    if not text.isdigit() or int(text) >= len(node):
        raise ConfigError(f"override {override!r}: {text} is not an index into a list of {len(node)}")
    return int(text)
