"""The sections of a run file: every default beside its field, with its meaning and unit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rollcall.config.base import LONGEST_S, Section
from rollcall.config.base import field as _field
from rollcall.config.checks import check_directory, check_stops, check_variables
from rollcall.config.parallel import check_section, lift_kwargs
from rollcall.words import counted

SLOT_SYNTAX = "write all, a slot (5), a range (0-3), a list (0-3,8), or slots with process ranks (0-7:0-3)"
Share = Annotated[float, Field(ge=0, lt=1)]
WeightTransport = Literal["auto", "shared_memory", "broadcast", "delta", "file"]
MAX_SLOTS = 100_000  # of a cluster
DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"}


class RunSection(Section):
    name: str = _field("run", "Name shown in logs and on trackers.")
    dir: Annotated[Path, AfterValidator(check_directory)] = _field(
        Path("runs/run"), "Run directory; the same command in the same directory resumes."
    )
    seed: int = _field(0, "Seed of data order and sampling.", ge=0)


def _slots(value: Any) -> Any:
    """What stands for slots is read by plan/placement.py; here, that it is text or a number, and that YAML meant it."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        given = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{given} is not a set of slots; {SLOT_SYNTAX}")
    return value


class NodeSection(Section):
    gpus: int = Field(description="Slots (accelerators) on this node.", ge=1, le=MAX_SLOTS)


class ClusterSection(Section):
    num_nodes: int = _field(1, "Nodes in the cluster.", ge=1, le=MAX_SLOTS)
    num_gpus_per_node: int = _field(1, "Slots (accelerators) on each node.", ge=1, le=MAX_SLOTS)
    nodes: list[NodeSection] | None = _field(
        None,
        "Nodes that differ, such as `[{gpus: 8}, {gpus: 4}]`; in place of `num_nodes` and `num_gpus_per_node`.",
        min_length=1,
    )
    accelerator: Literal["gpu", "cpu"] = _field(
        "gpu", "What a slot is: a GPU, or a logical seat on a node without one (`rollcall node --slots`)."
    )
    component_placement: dict[str, Annotated[str | int, BeforeValidator(_slots)]] = _field(
        {"actor,rollout": "all"}, "Roles to slots, such as `{'actor,rollout': all}`."
    )
    node_weights: list[float] | None = _field(
        None,
        "Share of the rollout tasks for each node, such as `[2, 1, 1]`; `null`: by measured speed.",
    )
    env: Annotated[dict[str, str], AfterValidator(check_variables)] = _field(
        {}, "Environment variables of every worker."
    )
    env_pass: list[str] = _field(
        [], "Names (or patterns such as `NCCL_*`) of variables copied from whoever submits to every worker."
    )
    node_env: dict[int, Annotated[dict[str, str], AfterValidator(check_variables)]] = _field(
        {}, "Variables of the workers of one node alone, by node rank."
    )

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
            raise ValueError(f"node_env has node {strangers[0]}; nodes are 0 to {self.num_nodes - 1}")
        if (slots := self.num_nodes * self.num_gpus_per_node) > MAX_SLOTS:
            raise ValueError(
                f"num_nodes={self.num_nodes} x num_gpus_per_node={self.num_gpus_per_node} are {slots:,} slots; a cluster has at "
                f"most {MAX_SLOTS:,}"
            )
        self._check_weights()
        return self

    def _check_weights(self) -> None:
        weights = self.node_weights
        if weights is None:
            return
        if len(weights) != self.num_nodes:
            raise ValueError(
                f"node_weights={weights} has {counted(len(weights), 'number')} for "
                f"{counted(self.num_nodes, 'node')}; give one each"
            )
        if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise ValueError(f"node_weights={weights} are no shares; use numbers from 0 on, not all of them 0")

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
        "Model directory or hub name; `builtin:arithmetic` is the small embedded model that comes with Rollcall.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _field(
        "auto",
        "Compute precision (`bf16`, `fp32` are accepted); `auto`: bfloat16 on CUDA, float32 on CPU. bfloat16 on a CPU needs one "
        "that computes in it.",
    )
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "Where to train; `auto` takes CUDA when there is one.")
    chat_template: str | None = _field(None, "Jinja chat template that replaces the tokenizer's own.")
    trust_remote_code: bool = _field(
        False, "Run Python code that comes with the model, its tokenizer or a reward model; false: it is refused."
    )

    @model_validator(mode="before")
    @classmethod
    def _alias_dtype(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(given := data.get("dtype"), str):
            data = {**data, "dtype": DTYPE_ALIASES.get(given, given)}
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


class VllmSection(Section):
    python: str | None = _field(
        None, "Python of the environment that vLLM is in; `null`: `$ROLLCALL_VLLM_PYTHON`, else the one that runs this."
    )
    tensor_parallel_size: int = _field(1, "GPUs that one engine divides the model between.", ge=1)
    enforce_eager: bool = _field(False, "Neither compile nor capture graphs: starts sooner, decodes slower.")
    sleep: bool = _field(False, "Give its GPU memory back while nothing is sampled, for roles that share a GPU.")


class RolloutSection(Section):
    engine: Literal["native", "vllm"] = _field("native", "Which engine samples.")
    vllm: VllmSection = _field(VllmSection(), "Where and how vLLM runs, with `engine: vllm`.")
    samples_per_prompt: int = _field(8, "Completions per prompt (group size).", ge=1)
    max_response_tokens: int = _field(8, "Longest completion, in tokens.", ge=1)
    temperature: float = _field(1.0, "Sampling temperature.", ge=0.001, le=100)
    top_p: float = _field(1.0, "Keep the smallest set of tokens with this much probability.", gt=0, le=1)
    top_k: int = _field(0, "Keep this many likeliest tokens; 0: all.", ge=0)
    stop: Annotated[list[str], AfterValidator(check_stops)] = _field(
        [],
        "Strings that end a completion; the text up to and with them is kept. One that is a special token (`</s>`) ends it "
        "at that token.",
    )
    stop_token_ids: list[int] = _field(
        [], "Tokens that end a completion, by id, beside the model's own; the exported model stops at them too."
    )
    max_running: int = _field(512, "Most completions decoded at once.", ge=1)
    kv_tokens: int | None = _field(
        None,
        "Room of the KV cache, in tokens, at least the longest prompt and completion; `null`: from `kv_memory_fraction` on CUDA, "
        "enough for `max_running` on CPU (vLLM: at most 1 GiB).",
        ge=1,
    )
    kv_memory_fraction: float = _field(0.3, "Share of the CUDA card's memory for the KV cache.", gt=0, lt=1)
    compile: bool = _field(
        False, "Compile decoding on a CPU too, which takes half a minute once and a C++ compiler; on CUDA it always is."
    )
    weights: WeightTransport = _field(
        "auto",
        "How new weights reach engines outside of the actor's processes: shared memory on its node and a broadcast to "
        "others (`auto`), one of these for all, only what changed (`delta`), or a file in `run.dir` (`file`).",
    )


class OptimizerChoice(Section):
    name: str = _field("torch.optim.AdamW", "Class of the optimizer, by its import path.")
    kwargs: dict[str, Any] = _field(
        {}, "Its arguments, such as `{foreach: false}`; lr, betas, eps and weight_decay too."
    )


class OptimizerSection(Section):
    lr: float = _field(1e-6, "Peak learning rate.", gt=0)
    betas: tuple[Share, Share] = _field((0.9, 0.999), "AdamW's betas, each from 0 to below 1.")
    eps: float = _field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = _field(0.0, "AdamW's weight decay; norms and biases are exempt.", ge=0)
    optimizer: OptimizerChoice = _field(
        OptimizerChoice(), "Which optimizer, such as `{name: torch.optim.AdamW, kwargs: {foreach: false}}`."
    )
    warmup_steps: int = _field(0, "Updates over which the rate rises from 0.", ge=0)
    decay: Literal["constant", "linear", "cosine"] = _field("constant", "How the rate falls after warm-up.")
    min_lr_ratio: float = _field(0.0, "Where the fall ends, as a share of the peak.", ge=0, le=1)
    grad_clip: float = _field(1.0, "Largest global gradient norm; 0: no clipping.", ge=0)
    tokens_per_microbatch: int = _field(16384, "Packed tokens of one forward.", ge=1)
    train_micro_batch_size: int | None = _field(
        None, "Most completions in one forward of an update; `null`: as many as `tokens_per_microbatch` takes.", ge=1
    )
    logprob_batch_size: int | None = _field(
        None, "Most completions in one forward without gradients (log-probs, values); `null`: by tokens alone.", ge=1
    )
    train_global_batch_size: int | None = _field(
        None,
        "Completions of one update; `null`: prompts_per_step x samples_per_prompt / minibatches, which it has to equal.",
        ge=1,
    )
    max_total_sequence_length: int | None = _field(
        None, "Longest prompt and completion together, in tokens; `null`: what data and rollout allow.", ge=1
    )
    minibatches: int = _field(1, "Optimizer updates a step's samples are split into.", ge=1)
    epochs: int = _field(1, "Passes over a step's samples.", ge=1)
    master_weights: bool = _field(True, "Keep float32 master weights when the model is bfloat16.")
    activation_checkpointing: bool = _field(False, "Recompute activations in the backward pass to save memory.")
    compile: bool | None = _field(None, "Compile the decoder layers; `null`: on CUDA, for models where it pays.")
    sharding: Literal["replicate", "fsdp", "hsdp"] = _field(
        "replicate",
        "Over data ranks: a whole copy on each; weights, gradients and optimizer state in parts (FSDP2); or in parts within "
        "a group of ranks and copied between groups.",
    )
    sharding_group_size: int | None = _field(
        None, "Data ranks of one group of `hsdp`; `null`: those of one node.", ge=1
    )
    tensor_parallel_size: int = _field(1, "Processes that a layer's heads and MLP columns are divided between.", ge=1)
    sequence_parallel: bool = _field(
        False, "Divide the tokens, too, between the ranks of a tensor group, where layers are not divided."
    )
    context_parallel_size: int = _field(1, "Only 1.", ge=1)
    cpu_offload: bool = _field(False, "Keep a sharded learner's weights and optimizer state in host memory.")

    @model_validator(mode="before")
    @classmethod
    def _lift_kwargs(cls, data: Any) -> Any:
        return lift_kwargs(data)

    @model_validator(mode="after")
    def _fits_together(self) -> OptimizerSection:
        check_section(self)
        return self


class ElasticSection(Section):
    min_nodes: int = Field(description="Fewest nodes to go on with.", ge=1)
    wait_s: float = _field(60.0, "Seconds to wait for a missing node before going on without it.", ge=0, le=LONGEST_S)


class TrainerSection(Section):
    steps: int = _field(100, "Training steps.", ge=1)
    eval_every: int = _field(20, "Steps between evaluations; 0: only first and last.", ge=0)
    save_every: int = _field(20, "Steps between checkpoints; 0: only the last.", ge=0)
    keep_last: int = _field(2, "Newest checkpoints to keep.", ge=1)
    keep_best: int = _field(
        1,
        "Best checkpoints to keep beside them: by held-out accuracy, or by held-out reward where rewards are not 0 or 1.",
        ge=0,
    )
    staleness: int = _field(
        0, "Versions that a token trained on may be older than the policy it trains; 0: synchronous.", ge=0
    )
    order: Literal["in_order", "as_completed"] = _field(
        "in_order",
        "Which groups a step trains on: those drawn for it, or the first to finish; with `as_completed` the others count for "
        "a later step, which takes `staleness` 2 or more to make a difference.",
    )
    in_flight: bool = _field(
        True,
        "Completions under way go on with new weights; false: they end with the weights they began with, and the engines "
        "take the new ones when they have.",
    )
    loggers: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = _field(
        ["console", "tensorboard"], "Where metrics go; `metrics.jsonl` is always written."
    )
    num_threads: int | None = _field(None, "CPU threads for torch; `null`: all cores.", ge=1, le=1024)
    max_restarts: int = _field(
        10, "On a cluster, losses of processes or nodes that a run goes on after, within `restart_window_s`.", ge=0
    )
    restart_window_s: float = _field(3600.0, "Seconds in which `max_restarts` losses are too many.", gt=0, le=LONGEST_S)
    stop_grace_s: float = _field(
        10.0,
        "Seconds that SIGTERM, SIGUSR1 or SIGHUP leaves the step under way to end; then the run saves without its end. Slurm and "
        "Kubernetes kill 30 s after SIGTERM: leave room for a checkpoint.",
        ge=0,
        le=LONGEST_S,
    )
    elastic: ElasticSection | None = _field(
        None,
        "Go on with the nodes that are left when one stays away, such as `{min_nodes: 2}`; it is used again after the first "
        "checkpoint that follows its return. `null`: wait for it.",
    )


class EvalSection(Section):
    temperature: float = _field(0.0, "Sampling temperature; 0: greedy.", ge=0, le=100)
    samples_per_prompt: int = _field(
        1, "Completions per prompt; more than one gives pass@k, and needs a temperature above 0.", ge=1
    )
    max_prompts: int | None = _field(None, "Evaluate on the first rows only, this many; `null`: all.", ge=1)
    threshold: float = _field(1.0, "A completion counts as correct from this reward (of the first reward) on.")
