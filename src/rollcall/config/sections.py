"""The sections of a run file: every field with its default, description and unit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rollcall.base.words import counted
from rollcall.config.base import LONGEST_S, KeyProblem, OptionalCount, Section, field
from rollcall.config.checks import check_directory, check_home, check_section, check_stops, check_variables, lift_kwargs
from rollcall.config.lora import LoraSection

SLOT_SYNTAX = "write all, a slot (5), a range (0-3), a list (0-3,8), or slots with process ranks (0-7:0-3)"
Share = Annotated[float, Field(ge=0, lt=1)]
WeightTransport = Literal["auto", "shared_memory", "broadcast", "delta", "file"]
MAX_SLOTS = 100_000  # in a cluster
Auto = Literal["auto"]
DEFAULT_TOKENS = 16384  # the value of `tokens_per_microbatch: auto` without a GPU
DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"}


class RunSection(Section):
    name: str = field("run", "Name shown in logs and on trackers.")
    dir: Annotated[Path, AfterValidator(check_directory)] = field(
        Path("runs/run"), "Run directory. The same command with the same directory resumes the run."
    )
    seed: int = field(0, "Seed for data order and sampling.", ge=0)


def _slots(value: Any) -> Any:
    """Check only that the value is a string or a number; plan/placement.py parses them."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        given = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{given} is not a set of slots; {SLOT_SYNTAX}")
    return value


class NodeSection(Section):
    gpus: int = Field(description="Slots (accelerators) on this node.", ge=1, le=MAX_SLOTS)


class ClusterSection(Section):
    num_nodes: int = field(1, "Number of nodes in the cluster.", ge=1, le=MAX_SLOTS)
    num_gpus_per_node: int = field(1, "Slots (accelerators) on each node.", ge=1, le=MAX_SLOTS)
    nodes: list[NodeSection] | None = field(
        None,
        "Nodes of different sizes, such as `[{gpus: 8}, {gpus: 4}]`. Replaces `num_nodes` and `num_gpus_per_node`.",
        min_length=1,
    )
    accelerator: Literal["gpu", "cpu"] = field(
        "gpu",
        "What a slot is: a GPU or, on a node without GPUs, a place for processes (`rollcall node --slots` sets how many).",
    )
    component_placement: dict[str, Annotated[str | int, BeforeValidator(_slots)]] = field(
        {"actor,rollout": "all"},
        "Which roles run on which slots, such as `{'actor,rollout': all}`. The slots of `environment` only select nodes, on "
        "which environments and programs run in addition to the other roles. Without that entry, they run on the controller's node.",
    )
    ray_address: str | None = field(
        None,
        "`HOST:PORT` of the head of an existing Ray cluster that `rollcall node` did not start. `null`: `RAY_ADDRESS` if it is set, "
        "otherwise this node's cluster.",
        min_length=1,
    )
    node_weights: list[float] | None = field(
        None, "Each node's share of the rollout work, such as `[2, 1, 1]`; `null`: in proportion to its measured speed."
    )
    env: Annotated[dict[str, str], AfterValidator(check_variables)] = field(
        {}, "Environment variables for every worker."
    )
    env_pass: list[str] = field(
        [], "Variables that every worker gets from the shell that submits the run: names, or patterns such as `NCCL_*`."
    )
    node_env: dict[int, Annotated[dict[str, str], AfterValidator(check_variables)]] = field(
        {}, "Variables for the workers of one node only, by node rank."
    )

    @model_validator(mode="after")
    def _nodes_agree(self) -> ClusterSection:
        """Derive the two numbers from `nodes`; a resolved run file contains all three keys."""
        sizes = [node.gpus for node in self.nodes or []]
        fixed = {"num_nodes": len(sizes), "num_gpus_per_node": max(sizes)} if sizes else {}
        for key, value in fixed.items():
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(
                    f"{key}={getattr(self, key)} contradicts nodes, which lists {len(sizes)} nodes with {sizes} slots; remove {key}"
                )
            object.__setattr__(self, key, value)  # the section is frozen, so plain assignment would fail
        if strangers := [rank for rank in self.node_env if not 0 <= rank < self.num_nodes]:
            raise ValueError(
                f"node_env names node {strangers[0]}, but the cluster's nodes are 0 to {self.num_nodes - 1}"
            )
        if (slots := self.num_nodes * self.num_gpus_per_node) > MAX_SLOTS:
            raise ValueError(
                f"num_nodes={self.num_nodes} x num_gpus_per_node={self.num_gpus_per_node} give {slots:,} slots, but a cluster can "
                f"have at most {MAX_SLOTS:,}"
            )
        weights = self.node_weights
        if weights is not None and len(weights) != self.num_nodes:
            raise ValueError(
                f"node_weights={weights} has {counted(len(weights), 'number')} for {counted(self.num_nodes, 'node')}; give one per node"
            )
        if weights is not None and (min(weights) < 0 or not any(weights)):
            raise ValueError(
                f"node_weights={weights} must not contain negative numbers, and needs at least one above 0"
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
    path: Annotated[str, AfterValidator(check_home)] = field(
        "builtin:arithmetic",
        "Model directory, hub name, run directory or checkpoint. Checkpoints of verl (FSDP) and PyTorch (DCP) work too (see "
        "docs/models.md). `builtin:arithmetic` is a small model that comes with Rollcall: it adds numbers below 50, can read "
        "and write only digits, + and =, and has no chat template.",
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], BeforeValidator(lambda given: DTYPE_ALIASES.get(str(given), given))
    ] = field(
        "auto",
        "Compute precision (`bf16` and `fp32` are accepted too). `auto`: bfloat16 on CUDA, float32 on a CPU. bfloat16 on a CPU "
        "needs hardware support for it.",
    )
    device: Literal["auto", "cpu", "cuda"] = field("auto", "Where to train. `auto`: on CUDA if it is available.")
    chat_template: str | None = field(None, "Jinja chat template, in place of the tokenizer's own.")
    trust_remote_code: bool = field(
        False,
        "Run Python code that comes with the model, its tokenizer or a reward model. false: refuse a model that needs it.",
    )
    lora: LoraSection | None = field(
        None,
        "Settings for training a low-rank adapter (LoRA) instead of the model's own weights, such as `{rank: 16}`. `null`: train all "
        "weights.",
    )


class DataSection(Section):
    train: str = field(
        "builtin:arithmetic",
        "JSONL or Parquet file with the training rows; or `hub:NAME`, a dataset on the hub or a folder with the same layout; or "
        "`builtin:environment`: no data, because the environment decides how an episode begins.",
    )
    val: str | None = field(
        "builtin:arithmetic",
        "Held-out rows for evaluation; `null`: no evaluation, which is the default if `train` is a file or a dataset. With `train: "
        "builtin:environment`, the default is `builtin:environment` too.",
    )
    split: str = field("train", "Split to use if `train` is a `hub:` dataset, such as `train` or `train[:1000]`.")
    val_split: str = field("test", "Split to use if `val` is a `hub:` dataset.")
    subset: str | None = field(None, "Subset (configuration) of a `hub:` dataset, such as `main` for gsm8k.")
    columns: dict[str, str] = field(
        {},
        "New names for columns in the data, such as `{question: prompt}`. Columns that only rewards read can be renamed too.",
    )
    prompt_key: str = field("prompt", "Column with the prompt: text, or chat messages.")
    answer_key: str = field("answer", "Column with the correct answer.")
    system: str | None = field(None, "System message before each chat prompt.")
    template: str | None = field(None, "Text around each prompt, containing `{prompt}`. Only for text prompts.")
    chat: bool | None = field(
        None,
        "Format text prompts with the chat template, as one user message. `null`: do so if the tokenizer has a template.",
    )
    prompts_per_step: int = field(48, "Prompts (groups) in one training step.", ge=1)
    max_prompt_tokens: int = field(
        512, "Maximum length of a prompt, in tokens. Longer prompts are left out and counted.", ge=1
    )
    shuffle: bool = field(True, "Shuffle the rows in each epoch, using the seed.")

    @model_validator(mode="before")
    @classmethod
    def _same_task(cls, given: Any) -> Any:
        """Choose a default for ``val`` that fits ``train``. If ``train`` is a file or a dataset, the default is no evaluation, because
        the built-in rows are from a different task. An environment that begins its own episodes is used for both."""
        if not isinstance(given, dict) or given.get("train", "builtin:arithmetic") == "builtin:arithmetic":
            return given
        return {"val": "builtin:environment" if given["train"] == "builtin:environment" else None, **given}

    @model_validator(mode="after")
    def _asks_and_answers_with_two_columns(self) -> DataSection:
        if self.prompt_key == self.answer_key:
            raise KeyProblem(
                f"answer_key={self.answer_key} is also data.prompt_key, so every prompt would be its own answer; name a different column"
            )
        return self


class VllmSection(Section):
    python: str | None = field(
        None,
        "Python of vLLM's environment. `null`: `$ROLLCALL_VLLM_PYTHON` if it is set, otherwise the Python that runs Rollcall.",
    )
    tensor_parallel_size: int = field(1, "Number of GPUs across which one engine splits the model.", ge=1)
    enforce_eager: bool = field(False, "Do not compile or capture graphs: vLLM starts sooner and decodes more slowly.")
    sleep: bool = field(False, "Release GPU memory while nothing is sampled, for roles that share a GPU.")


class RolloutSection(Section):
    engine: Literal["native", "vllm"] = field("native", "Which engine samples.")
    vllm: VllmSection = field(VllmSection(), "Settings for `engine: vllm`.")
    samples_per_prompt: int = field(8, "Completions per prompt (group size).", ge=1)
    max_response_tokens: int = field(8, "Maximum length of a completion, in tokens.", ge=1)
    temperature: float = field(1.0, "Sampling temperature.", ge=0.001, le=100)
    top_p: float = field(
        1.0, "Sample from the smallest set of tokens whose total probability is at least this.", gt=0, le=1
    )
    top_k: int = field(0, "Sample from this many of the most likely tokens; 0: from all.", ge=0)
    stop: Annotated[list[str], AfterValidator(check_stops)] = field(
        [],
        "Strings that end a completion. The completion keeps the string at its end. A special token (`</s>`) is matched as a token.",
    )
    stop_token_ids: list[int] = field(
        [],
        "Ids of additional tokens that end a completion, besides the model's own. The exported model stops at them too.",
    )
    max_running: int = field(512, "Maximum number of completions that an engine decodes at once.", ge=1)
    kv_tokens: OptionalCount = field(
        None,
        "Size of the KV cache, in tokens. It must have room for the longest prompt plus the longest completion. `null`: on CUDA, "
        "determined by `kv_memory_fraction`; on a CPU, enough for `max_running` completions and for twice as many conversations that are "
        "between two turns (with vLLM, at most 1 GiB).",
    )
    kv_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | Auto = field(
        "auto",
        "Share of GPU memory for the KV cache, above 0 and below 1. `auto`: as much as `max_running` completions can use, but no "
        "more than a learner in the same process leaves free. With vLLM, and in `eval` and `serve`, `auto` is 0.3.",
    )
    compile: bool = field(
        False,
        "Compile decoding on a CPU. Compiling takes half a minute once and needs a C++ compiler. CUDA always uses CUDA graphs.",
    )
    weights: WeightTransport = field(
        "auto",
        "How new weights reach engines outside the actor's processes. `auto`: shared memory on the actor's node and a broadcast to other "
        "nodes; on GPUs, a broadcast to all. `delta`: like `auto`, but only the weights that changed. `file`: a file in `run.dir`.",
    )

    @property
    def keeps_policy(self) -> bool:
        """Whether a rollout process other than the actor's keeps a full copy of the policy. The native engine samples from it. vLLM has
        its own copy and needs a second one only with `delta`, `file` and `shared_memory`, which write into persistent tensors."""
        return self.engine == "native" or self.weights not in ("auto", "broadcast")


class OptimizerChoice(Section):
    name: str = field("torch.optim.AdamW", "Import path of the optimizer's class.")
    kwargs: dict[str, Any] = field(
        {}, "Its arguments, such as `{foreach: false}`. lr, betas, eps and weight_decay may be given here too."
    )
    state: Literal["float32", "bfloat16"] = field(
        "float32",
        "Precision of AdamW's two moments. `bfloat16`: half the memory, with stochastic rounding so that small changes are not lost. It "
        "works only for torch.optim.AdamW with float32 weights or float32 master weights.",
    )


class OptimizerSection(Section):
    lr: float = field(1e-6, "Peak learning rate.", gt=0, le=100)
    betas: tuple[Share, Share] = field((0.9, 0.999), "AdamW's betas; each is at least 0 and below 1.")
    eps: float = field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = field(0.0, "AdamW's weight decay. It does not apply to norms and biases.", ge=0)
    optimizer: OptimizerChoice = field(
        OptimizerChoice(),
        "The optimizer to use, such as `{name: torch.optim.AdamW, kwargs: {foreach: false}, state: bfloat16}`.",
    )
    warmup_steps: int = field(0, "Number of updates over which the learning rate rises from 0.", ge=0)
    decay: Literal["constant", "linear", "cosine"] = field("constant", "How the learning rate falls after warm-up.")
    min_lr_ratio: float = field(0.0, "Final learning rate after the decay, as a share of the peak rate.", ge=0, le=1)
    grad_clip: float = field(1.0, "Largest global gradient norm; 0: no clipping.", ge=0)
    tokens_per_microbatch: Annotated[int, Field(ge=1)] | Auto = field(
        "auto",
        "Number of packed tokens that one process runs in one forward pass. `auto`: as many as fit on the GPU beside everything else, "
        "which the run measures at the start; 16384 on a CPU. If a micro-batch does not fit after all, it is split, and the smaller "
        "size is used from then on.",
    )
    train_micro_batch_size: OptionalCount = field(
        None,
        "Maximum number of completions in one forward pass of an update; `null`: as many as `tokens_per_microbatch` allows.",
    )
    logprob_batch_size: OptionalCount = field(
        None,
        "Maximum number of completions in one forward pass without gradients (log-probs, values); `null`: limited by tokens only.",
    )
    train_global_batch_size: OptionalCount = field(
        None,
        "Completions in one update. It must equal prompts_per_step x samples_per_prompt / minibatches, which is what `null` means.",
    )
    max_total_sequence_length: OptionalCount = field(
        None, "Maximum number of tokens in prompt and completion together; `null`: as many as data and rollout allow."
    )
    minibatches: int = field(1, "Optimizer updates per pass over a step's samples.", ge=1)
    epochs: int = field(1, "Passes over a step's samples.", ge=1)
    master_weights: bool = field(True, "Keep float32 master weights when the model is bfloat16.")
    activation_checkpointing: bool | Literal["auto", "offload"] = field(
        "auto",
        "Recompute activations in the backward pass to save memory. `offload`: also keep the layers' inputs, which the recomputation "
        "needs, in host memory until then; on a CPU, the same as `true`. `auto`: `true` if micro-batches would otherwise be too small, "
        "`offload` if a row would otherwise not fit; `false` on a CPU.",
    )
    compile: bool | None = field(None, "Compile the decoder layers. `null`: on CUDA, for models that gain from it.")
    sharding: Literal["replicate", "fsdp", "hsdp"] = field(
        "replicate",
        "`replicate`: every data rank has all weights, gradients and optimizer state. `fsdp`: they are split across the "
        "data ranks (FSDP2). `hsdp`: they are split within a group of ranks, and every group has a copy.",
    )
    sharding_group_size: OptionalCount = field(
        None,
        "Number of data ranks in one `hsdp` group; `null`: the data ranks on one node. Each rank of a context group counts as a "
        "data rank.",
    )
    tensor_parallel_size: int = field(
        1, "Number of processes across which the heads and MLP columns of a layer are split.", ge=1
    )
    sequence_parallel: bool = field(
        False,
        "Also split the tokens across the ranks of a tensor group, in the parts of the model that tensor parallelism does not split.",
    )
    context_parallel_size: int = field(
        1,
        "Number of processes across which the tokens of a micro-batch are split, for long sequences. A micro-batch then has up "
        "to this many times `tokens_per_microbatch` tokens. The actor's size also applies to reference and inference.",
        ge=1,
    )
    cpu_offload: bool = field(False, "Keep a sharded learner's weights and optimizer state in host memory.")

    _lift_kwargs = model_validator(mode="before")(lift_kwargs)
    _fits_together = model_validator(mode="after")(check_section)


class ElasticSection(Section):
    min_nodes: int = Field(description="Smallest number of nodes with which the run continues.", ge=1)
    wait_s: float = field(
        60.0, "Seconds to wait for a missing node before the run continues without it.", ge=0, le=LONGEST_S
    )


class TrainerSection(Section):
    steps: int = field(100, "Number of training steps.", ge=1)
    eval_every: int = field(20, "Steps between evaluations; 0: only at the start and the end.", ge=0)
    save_every: int = field(20, "Steps between checkpoints; 0: only at the end.", ge=0)
    keep_last: int = field(2, "Number of newest checkpoints to keep.", ge=1)
    keep_best: int = field(
        1,
        "Number of best checkpoints to keep in addition, ranked by held-out accuracy, or by held-out reward if rewards are not only 0 "
        "and 1.",
        ge=0,
    )
    staleness: int = field(
        0, "How many policy versions old a token may be when it is trained on; 0: synchronous.", ge=0
    )
    order: Literal["in_order", "as_completed"] = field(
        "in_order",
        "Which groups a step trains on. `in_order`: those drawn for it. `as_completed`: the first groups to finish; later steps "
        "train on the rest. This matters only with `staleness: 2` or more.",
    )
    in_flight: bool = field(
        True,
        "true: unfinished completions continue with new weights. false: engines finish their completions first, then take the "
        "new weights.",
    )
    loggers: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = field(
        ["console", "tensorboard"], "Where metrics go. `metrics.jsonl` is always written."
    )
    page: bool = field(
        False,
        "Serve this run's page (`rollcall view`) on the loopback interface of the controller's node while it trains. The log shows its "
        "address.",
    )
    num_threads: int | None = field(
        None, "CPU threads for torch; `null`: all cores, shared by the processes of a node.", ge=1, le=1024
    )
    max_restarts: int = field(
        10,
        "How many times within `restart_window_s` a run on a cluster restarts after losing a process or a node.",
        ge=0,
    )
    restart_window_s: float = field(3600.0, "The window for `max_restarts`, in seconds.", gt=0, le=LONGEST_S)
    stop_grace_s: float = field(
        10.0,
        "Seconds that the current step has to finish after SIGTERM, SIGUSR1 or SIGHUP. After that, the run saves without finishing the "
        "step. Slurm and Kubernetes kill the run 30 s after SIGTERM, so leave time for a checkpoint.",
        ge=0,
        le=LONGEST_S,
    )
    elastic: ElasticSection | None = field(
        None,
        "Continue with fewer nodes when one is lost, such as `{min_nodes: 2}`. A node that returns is used again after the next "
        "checkpoint. `null`: wait for the node.",
    )


class CheckpointSection(Section):
    place: Literal["shared", "local"] = field(
        "shared",
        "Where processes write their parts of a split model. `shared`: to `run.dir`. `local`: to their node's temporary folder "
        "(`TMPDIR`). This is faster if the shared folder is slow, but if a node is lost, its parts of every checkpoint are lost too.",
    )


class EvalSection(Section):
    temperature: float = field(0.0, "Sampling temperature; 0: greedy.", ge=0, le=100)
    samples_per_prompt: int = field(
        1, "Completions per prompt. More than one gives pass@k and needs a temperature above 0.", ge=1
    )
    max_prompts: OptionalCount = field(None, "Evaluate on the first N rows only; `null`: on all.")
    threshold: float = field(1.0, "A completion is correct if its first reward is at least this.")
