"""Estimates each slot's memory from the model's sizes. This is pure arithmetic: it loads no weights and needs neither torch nor Ray.

Weights, optimizer state and KV cache stay in memory for the whole run, but gradients and activations only while a role works. Roles in
one process take turns, so a slot needs the sum of the former and the maximum of the latter.

Each tensor group has the learner's full state. With ``sharding``, each data rank has a part of it, and gathers the embeddings and
two layers at a time while it runs; a reference in the actor's processes does the same. Inference and the native engine have the
full model in each process, but in an unsharded actor's process they use the actor's weights. vLLM splits its own copy across the
slots of its process. It receives new weights one tensor at a time, unless `rollout.weights` needs a full copy to write into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.base.errors import ModelFilesError, SizesUnknown
from rollcall.config import Config, OptimizerSection
from rollcall.config.lora import LoraSection
from rollcall.config.sections import DEFAULT_TOKENS
from rollcall.model.files import MODEL_DIR, model_folder, read_model_config
from rollcall.model.hub import cached_folder
from rollcall.plan.activations import COMPILE_FROM, LOGITS_AT_ONCE, DecoderSizes, Passes, Recompute
from rollcall.plan.choose import NO_KV, SAFE, Choice, EngineNeeds, choose, kv_is_open
from rollcall.plan.placement import HOLDERS, TRAINED, Mesh, Plan, Role, RoleGroup, roles_in_parts

GIB = 1 << 30
KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Overhead per process on a GPU: the CUDA context, communication buffers, and memory that the allocator cannot reuse.
RUNTIME = 3 * GIB // 2
NO_ROOM = -1  # the KV cache is not counted
READ_AT_ONCE = 64 << 20  # bytes of stored weights that are read at once
VLLM_PARTS = 3 * (128 << 20)  # bytes: the pieces of a weight update, in memory that vLLM reads
REWARD_ROWS = 16  # completions that a reward model scores at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes(DecoderSizes):
    """A decoder's sizes, under short names."""

    model_type: str
    positions: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, where: str) -> ModelSizes:
        """Read the sizes from the fields of a transformers config.json."""
        kind = fields.get("model_type")
        if kind not in KNOWN_TYPES:
            raise SizesUnknown(
                f"{where} describes a model of type {kind}, whose memory cannot be estimated (the known types are {', '.join(KNOWN_TYPES)})"
            )
        try:
            hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
            return cls(
                model_type=kind,
                hidden=hidden,
                intermediate=int(fields["intermediate_size"]),
                layers=int(fields["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(fields.get("num_key_value_heads") or heads),
                head_dim=int(fields.get("head_dim") or hidden // heads),
                vocab=int(fields["vocab_size"]),
                positions=int(fields["max_position_embeddings"]),
                tied=bool(fields.get("tie_word_embeddings", False)),
                qkv_bias=kind == "qwen2" or bool(fields.get("attention_bias")),
                out_bias=kind in ("llama", "qwen3") and bool(fields.get("attention_bias")),
                mlp_bias=kind == "llama" and bool(fields.get("mlp_bias")),
                qk_norm=kind == "qwen3",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SizesUnknown(f"{where} does not contain a model's sizes: {type(error).__name__} {error}") from None

    @property
    def layer_parameters(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (q + 2 * kv) + q * self.hidden + 3 * self.hidden * self.intermediate
        biases = self.qkv_bias * (q + 2 * kv) + self.out_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return weights + biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim

    @property
    def body_parameters(self) -> int:
        """Parameters without the output head, as in a critic."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden + self.hidden

    @property
    def num_parameters(self) -> int:
        return self.body_parameters + (0 if self.tied else self.vocab * self.hidden)

    def adapter_parameters(self, lora: LoraSection) -> int:
        """Return the size of an adapter: the rank times the inputs plus outputs of each adapted module."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + q, "k_proj": self.hidden + kv, "v_proj": self.hidden + kv, "o_proj": q + self.hidden,
            "gate_proj": self.hidden + self.intermediate, "up_proj": self.hidden + self.intermediate,
            "down_proj": self.intermediate + self.hidden,
        }  # fmt: skip
        return self.layers * lora.rank * sum(sides[module] for module in lora.modules)


PARTS = ("weights", "gradients", "optimizer", "activations", "kv")  # the parts of a role's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Bytes that one role needs on one slot."""

    role: Role
    weights: int = 0
    optimizer: int = 0
    kv: int = 0
    gradients: int = 0
    activations: int = 0
    lent: int = 0  # the part of weights and kv that is free while another role works
    copied: bool = False  # several data ranks have full copies that could be sharded
    recompute: Recompute = Recompute.NO
    parked: int = 0  # activations offloaded to host memory
    tokens: int = 0  # tokens in a micro-batch, if this role trains
    longest: int = 0  # a rank's share of the longest row; a micro-batch has at least this many tokens
    kv_per_token: int = 0
    divides: bool = False  # vLLM could split these weights over more slots per process
    adapts: bool = False  # all weights are trained, but an adapter could be trained instead

    @property
    def held(self) -> int:
        return self.weights + self.optimizer + self.kv - self.lent

    @property
    def working(self) -> int:
        return self.gradients + self.activations + self.lent

    @property
    def lever(self) -> str:
        """Advice on what to change if this role does not fit into memory."""
        name = "critic" if self.role is Role.CRITIC else "actor"
        match max(PARTS, key=lambda part: getattr(self, part)):
            case "kv":
                return "lower rollout.kv_memory_fraction, or set rollout.kv_tokens"
            case "activations" if self.role is Role.ROLLOUT:
                return "lower rollout.max_running"
            case "activations" if self.role is Role.REWARD:
                return "lower the reward's max_tokens"
            case "activations" if self.role in TRAINED and self.recompute is Recompute.NO:
                return f"lower {name}.tokens_per_microbatch, or set {name}.activation_checkpointing=true"
            case "activations" if 0 < self.tokens <= self.longest:
                host = "" if self.recompute is Recompute.ON_HOST else f"set {name}.activation_checkpointing=offload, "
                return f"{host}split the longest rows with {name}.context_parallel_size, or lower rollout.max_response_tokens"
            case "activations":
                return f"lower {name}.tokens_per_microbatch"
        if self.copied:
            return f"set {name}.sharding=fsdp"
        if self.divides:
            return "raise rollout.vllm.tensor_parallel_size and the number of slots per rollout process"
        if self.role in HOLDERS:
            makes_room = "lower rollout.kv_memory_fraction, " if self.kv else ""
            divide = ", split it (rollout.engine=vllm)" if self.role is Role.ROLLOUT else ""
            return f"each of its processes has a copy of the whole model; {makes_room}give it slots without an actor{divide}, or use larger cards"
        return f"give {self.role} more slots" + (", or train an adapter (model.lora.rank=16)" if self.adapts else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """Bytes on each slot of one role group."""

    slots: str  # such as 0-19
    roles: tuple[RoleMemory, ...]
    runtime: int

    @property
    def total(self) -> int:
        return self.runtime + sum(role.held for role in self.roles) + max(role.working for role in self.roles)


def read_sizes(path: str, *, model_config: Path | None = None) -> ModelSizes:
    """Read the sizes of ``model.path`` (embedded model, directory, checkpoint or cached hub model) or of the given config.json."""
    place = Path(MODEL_DIR if path == "builtin:arithmetic" else path).expanduser()
    folder = (model_folder(str(place)) or place) if place.is_dir() else cached_folder(path)
    if model_config is not None:
        file = model_config / "config.json" if model_config.is_dir() else model_config
    elif folder is not None:
        file = folder / "config.json"
    else:
        raise SizesUnknown(
            f"model.path={path} is not on this machine, so its sizes are not known; download it, or pass its "
            "config.json with --model-config FILE"
        )
    try:
        return ModelSizes.of(read_model_config(file), where=str(file))
    except ModelFilesError as error:
        raise SizesUnknown(str(error)) from None


def slot_memory(
    plan: Plan, config: Config, sizes: ModelSizes, *, card: int | None, reward_sizes: ModelSizes | None
) -> tuple[SlotMemory, ...]:
    """Return one entry per group in the plan. ``card`` is the accelerator's memory in bytes; if None, slots are logical CPU slots."""
    runtime = RUNTIME if config.cluster is None or config.cluster.accelerator == "gpu" else 0
    job = _Job(config, plan, sizes, card=card, reward_sizes=reward_sizes)
    return tuple(
        SlotMemory(slots=group.slots, roles=job.roles(group, runtime=runtime), runtime=runtime) for group in plan.groups
    )


def host_memory(plan: Plan, config: Config, sizes: ModelSizes, memory: Sequence[SlotMemory]) -> dict[int, int]:
    """Return the bytes of host memory that the tensors of a GPU run take on each node, in addition to the processes themselves.
    ``memory`` is the slot memory of the plan's groups."""
    job = _Job(config, plan, sizes, card=None, reward_sizes=None)
    found: dict[int, int] = {}
    for group, on_slot in zip(plan.groups, memory, strict=True):
        of_process = sum(job.on_host(role, group) for role in group.roles)
        of_process += max(role.parked for role in on_slot.roles)  # learners take turns
        for process in group.processes:
            found[process.node_rank] = found.get(process.node_rank, 0) + of_process
        found[group.processes[0].node_rank] += sum(job.saved_whole(role) for role in group.roles)
    return found


def element_size(config: Config) -> int:
    on_cpu = config.model.device == "cpu" or (config.cluster is not None and config.cluster.accelerator == "cpu")
    dtype = config.model.dtype
    return 2 if dtype == "bfloat16" or (dtype == "auto" and not on_cpu) else 4


def state_width(section: OptimizerSection, *, width: int) -> int:
    """Return the bytes of optimizer state per trained parameter: AdamW's two moments, and the master weight if the section uses master
    weights."""
    masters = width == 2 and section.master_weights
    moment = 2 if section.optimizer.state == "bfloat16" else 4 if masters else width
    return (4 if masters else 0) + 2 * moment


class _Job:
    def __init__(
        self, config: Config, plan: Plan, sizes: ModelSizes, *, card: int | None, reward_sizes: ModelSizes | None
    ) -> None:
        self.config, self.sizes, self.card, self.reward_sizes = config, sizes, card, reward_sizes
        self.meshes = plan.meshes
        self.width = element_size(config)  # bytes per weight
        self.in_parts = roles_in_parts(config, plan)  # roles whose processes each have a part of one model

    def roles(self, group: RoleGroup, *, runtime: int) -> tuple[RoleMemory, ...]:
        """Return the memory of one process's roles, with ``auto`` resolved. Learners take turns on the device, so the KV cache gets the
        memory that the largest learner leaves free."""
        trained = [role for role in group.roles if role in TRAINED]
        if self.card is None:
            choices = {role: self._by_default(role) for role in trained}
            return tuple(self._role(role, group, choices=choices, room=None) for role in group.roles)
        nothing = dict.fromkeys(trained, Choice(tokens=1, recompute=Recompute.YES))
        bare = {role: self._role(role, group, choices=nothing, room=NO_ROOM) for role in group.roles}
        room = int(self.card * SAFE) - runtime - sum(each.held for each in bare.values())
        is_open = Role.ROLLOUT in bare and kv_is_open(self.config.rollout)
        kv = self._engine(self.meshes[Role.ROLLOUT]).open_kv if is_open else NO_KV
        choices = {
            role: choose(
                self._section(role),
                room=room - bare[role].gradients,
                passes=partial(self._passes, role, group),
                longest=self._longest(role),
                kv=kv,
            )
            for role in trained
        }
        room -= max(self._role(role, group, choices=choices, room=NO_ROOM).working for role in group.roles)
        return tuple(self._role(role, group, choices=choices, room=max(0, room)) for role in group.roles)

    def _section(self, role: Role) -> OptimizerSection:
        return self.config.critic if role is Role.CRITIC else self.config.actor

    def _by_default(self, role: Role) -> Choice:
        section = self._section(role)
        tokens, recompute = section.tokens_per_microbatch, Recompute.of(section.activation_checkpointing)
        return Choice(tokens=DEFAULT_TOKENS if tokens == "auto" else tokens, recompute=recompute)

    def _longest(self, role: Role) -> int:
        """Return a rank's share of the most tokens that a prompt and its completion can have."""
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens
        return -(-min(longest, self.sizes.positions) // self.meshes[role].context)

    def _role(self, role: Role, group: RoleGroup, *, choices: Mapping[Role, Choice], room: int | None) -> RoleMemory:
        """Return one role's memory. If the run file does not set the size of the KV cache, ``room`` limits it. NO_ROOM leaves out the KV
        cache, and None means that there is no GPU."""
        mesh = self.meshes[role]
        match role:
            case Role.ACTOR | Role.CRITIC:
                return self._trained(role, group, choices[role])
            case Role.REFERENCE if self.config.model.lora is not None and Role.ACTOR in group.roles:
                shared = self._frozen(role, shards=mesh.tensor, choices=choices)
                return replace(shared, weights=0)  # it uses the actor's weights
            case Role.REFERENCE | Role.INFERENCE:
                data = self._data_shards(self.config.actor, mesh, group) if role in self.in_parts else 1
                return self._frozen(role, shards=data * mesh.tensor, choices=choices)
            case Role.ROLLOUT:
                shares = Role.ACTOR in group.roles and Role.ACTOR not in self.in_parts
                return self._rollout(mesh, shares_weights=shares, room=room)
            case _:  # the reward; an environment uses its nodes' memory, not a slot's
                return self._reward(mesh)

    def on_host(self, role: Role, group: RoleGroup) -> int:
        """Return one process's host memory for this role: read buffers, its part of a checkpoint, state offloaded from the accelerator,
        and weights in transit to vLLM."""
        if role is Role.ROLLOUT and self.config.rollout.engine == "vllm":
            return VLLM_PARTS + self.sizes.vocab * self.sizes.hidden * self.width
        if role not in TRAINED or role not in self.in_parts:
            return READ_AT_ONCE
        section, trained = self._section(role), self._num_trained(role)
        mesh = self.meshes[role]
        shards = self._data_shards(section, mesh, group) * mesh.tensor
        state = trained * state_width(section, width=self.width)
        kept = 0
        if section.cpu_offload:  # if the weights themselves are trained, the masters replace them
            masters = self.width == 2 and section.master_weights and self.config.model.lora is None
            kept = state + (0 if masters else self._num_parameters(role) * self.width)
        return READ_AT_ONCE + (trained * self.width + state + kept) // shards

    def saved_whole(self, role: Role) -> int:
        """Return the bytes of host memory that the first process needs for its copy of a checkpoint, if every process has the full
        model."""
        if role not in TRAINED or role in self.in_parts:
            return 0
        return self._num_trained(role) * (self.width + state_width(self._section(role), width=self.width))

    def _data_shards(self, section: OptimizerSection, mesh: Mesh, group: RoleGroup) -> int:
        """Return the number of data ranks across which the state is sharded."""
        if section.sharding == "hsdp":
            on_node = sum(process.node_rank == group.processes[0].node_rank for process in group.processes)
            return min(section.sharding_group_size or max(1, on_node // mesh.tensor), mesh.lanes)
        return mesh.lanes if section.sharding == "fsdp" else 1

    def _passes(self, role: Role, group: RoleGroup, recompute: Recompute) -> Passes:
        section, mesh = self._section(role), self.meshes[role]
        # On a CPU, the hand-written derivatives keep as few activations as compiled ones.
        compiles = self.sizes.num_parameters >= COMPILE_FROM if section.compile is None else section.compile
        return Passes(
            sizes=self.sizes,
            width=self.width,
            num_parameters=self._num_trained(role) // (self._data_shards(section, mesh, group) * mesh.tensor),
            gradient_width=4 if role in self.in_parts else self.width,  # FSDP adds them up in float32
            has_head=role is Role.ACTOR,
            tensor=mesh.tensor,
            compiled=compiles and mesh.tensor == 1,
            recompute=recompute,
            frozen=self.config.model.lora is not None,
        )

    def _num_parameters(self, role: Role) -> int:
        return self.sizes.num_parameters if role is Role.ACTOR else self.sizes.body_parameters

    def _num_trained(self, role: Role) -> int:
        lora = self.config.model.lora
        return self._num_parameters(role) if lora is None else self.sizes.adapter_parameters(lora)

    def _trained(self, role: Role, group: RoleGroup, choice: Choice) -> RoleMemory:
        section, mesh, num_parameters = self._section(role), self.meshes[role], self._num_parameters(role)
        lora, trained = self.config.model.lora, self._num_trained(role)
        data = self._data_shards(section, mesh, group)
        in_parts = role in self.in_parts
        shards, width = data * mesh.tensor, self.width
        masters = width == 2 and section.master_weights
        # FSDP's own weights serve as the master weights, so the forward pass needs memory only for the gathered layers.
        optimizer = trained * state_width(section, width=self.width) // shards
        gathered = self._gathered(mesh) if in_parts else 0
        weights = gathered if in_parts and masters and lora is None else num_parameters * width // shards + gathered
        weights += trained * width // shards if lora is not None else 0
        gradients = trained * 4 // shards  # sums over micro-batches
        if in_parts and lora is None:  # one layer's gradient, before and during the reduction over the ranks
            gradients += self.sizes.layer_parameters * (4 + width) // mesh.tensor
        if section.cpu_offload:
            weights, optimizer = gathered, 0
        passes = self._passes(role, group, choice.recompute)
        tokens = max(choice.tokens, self._longest(role))  # a longer row gets its own micro-batch
        return RoleMemory(
            role=role,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=passes.peak(tokens),
            copied=data < mesh.lanes,
            adapts=lora is None and self.config.algorithm.name != "ppo",
            recompute=choice.recompute,
            parked=passes.on_host(tokens),
            tokens=choice.tokens,
            longest=self._longest(role),
        )

    def _frozen(self, role: Role, *, shards: int, choices: Mapping[Role, Choice]) -> RoleMemory:
        mesh = self.meshes[role]
        tokens = max(choices.get(Role.ACTOR, self._by_default(Role.ACTOR)).tokens, self._longest(role))
        weights = self.sizes.num_parameters * self.width // shards
        if shards > mesh.tensor:
            weights += self._gathered(mesh)
        working = tokens * self.sizes.working_elements(mesh.tensor) * self.width
        logits = min(tokens * self.sizes.vocab, LOGITS_AT_ONCE) * (4 + self.width) // mesh.tensor
        return RoleMemory(role=role, weights=weights, activations=working + logits)

    def _rollout(self, mesh: Mesh, *, shares_weights: bool, room: int | None) -> RoleMemory:
        rollout, sizes = self.config.rollout, self.sizes
        whole = sizes.num_parameters * self.width
        vllm = whole // mesh.tensor if rollout.engine == "vllm" else 0
        weights = (0 if shares_weights or not rollout.keeps_policy else whole) + vllm
        engine = self._engine(mesh)
        working = engine.filling + engine.graphs
        if vllm and not shares_weights:  # the largest tensor in transit to vLLM, while nothing is sampled
            working = max(working, sizes.vocab * sizes.hidden * self.width)
        kv = self._kv(engine, room)
        return RoleMemory(
            role=Role.ROLLOUT,
            weights=weights,
            kv=kv,
            activations=working,
            lent=vllm + kv if vllm and rollout.vllm.sleep else 0,
            longest=engine.longest,
            kv_per_token=engine.kv_per_token,
            divides=vllm > 0 and not rollout.keeps_policy,
        )

    def _engine(self, mesh: Mesh) -> EngineNeeds:
        config, sizes = self.config, self.sizes
        return EngineNeeds(config=config, sizes=sizes, positions=sizes.positions, width=self.width, tensor=mesh.tensor)

    def _kv(self, engine: EngineNeeds, room: int | None) -> int:
        rollout, data = self.config.rollout, self.config.data
        if rollout.kv_tokens is None and (self.card is None or room is None):
            return rollout.max_running * (data.max_prompt_tokens + rollout.max_response_tokens) * engine.kv_per_token
        if kv_is_open(rollout):
            return 0 if room == NO_ROOM else engine.open_kv.of(room or 0)
        return engine.fixed_kv(self.card or 0)

    def _reward(self, mesh: Mesh) -> RoleMemory:
        sizes = self.reward_sizes
        if sizes is None:
            return RoleMemory(role=Role.REWARD)
        longest = max((reward.max_tokens for reward in self.config.reward if reward.type == "model"), default=0)
        tokens = REWARD_ROWS * longest
        return RoleMemory(
            role=Role.REWARD,
            weights=sizes.body_parameters * self.width // mesh.tensor,
            activations=tokens * sizes.working_elements(mesh.tensor) * self.width,
        )

    def _gathered(self, mesh: Mesh) -> int:
        """Return the bytes of gathered layers that a sharded model has in memory while it runs."""
        embeddings = (1 if self.sizes.tied else 2) * self.sizes.vocab * self.sizes.hidden
        return (2 * self.sizes.layer_parameters + embeddings) * self.width // mesh.tensor
