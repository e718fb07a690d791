"""Checks a run file for `rollcall plan`: its placement, the memory that it needs, and its faults. Needs neither Ray nor torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollcall.base.errors import PlacementError, SizesUnknown
from rollcall.base.words import counted, ranges
from rollcall.config import ClusterSection, Config, RolloutSection
from rollcall.config.checks import unused
from rollcall.config.environments import AgentEnvironment, VerifiersEnvironment
from rollcall.plan.choose import kv_is_open, on_kv, on_microbatch
from rollcall.plan.memory import GIB, PARTS, ModelSizes, SlotMemory, element_size, host_memory, read_sizes, slot_memory
from rollcall.plan.mesh import indivisible_heads, split_of
from rollcall.plan.placement import HOLDERS, SCORERS, TRAINED, Plan, PlannedProcess, Role, plan_for, roles_together

DEFAULT_CARD_GIB = 80.0
WORTH_SAYING = 16 * GIB  # bytes of host memory; less is not worth a note, because nodes with accelerators have more
TIGHT = 0.92  # a plan that needs more of the GPU than this is called tight, because the estimate is not exact


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    config: Config
    cluster: ClusterSection
    plan: Plan
    sizes: ModelSizes | None
    memory: tuple[SlotMemory, ...]  # one entry per group of the plan; empty if memory cannot be estimated
    card: int | None  # bytes
    host: dict[int, int]  # bytes of host memory for tensors, by node; empty if not estimated
    notes: tuple[str, ...]
    problems: tuple[str, ...]  # why the run cannot work; empty if it can

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.problems,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "run": self.config.run.name,
            "accelerator": self.cluster.accelerator,
            "nodes": [{"rank": rank, "slots": size} for rank, size in enumerate(self.plan.slots_per_node)],
            "slots": [
                {"slot": slot.index, "node": slot.node_rank, "local": slot.local, "roles": list(slot.roles)}
                for slot in self.plan.slots
            ],
            "processes": {role: _processes_json(processes) for role, processes in self.plan.processes.items()},
            "groups": [
                {"roles": list(group.roles), "slots": group.slots, "processes": len(group.processes)}
                for group in self.plan.groups
            ],
            "meshes": {role: asdict(mesh) for role, mesh in self.plan.meshes.items()},
            "parameters": self.sizes.num_parameters if self.sizes else None,
            "card_bytes": self.card,
            "memory": [
                {
                    "slots": entry.slots,
                    "roles": {role.role: {part: getattr(role, part) for part in PARTS} for role in entry.roles},
                    "runtime": entry.runtime,
                    "total": entry.total,
                }
                for entry in self.memory
            ],
            "host_bytes": {str(node): size for node, size in self.host.items()},
        }


def plan_run(config: Config, *, card_gib: float | None = None, model_config: Path | None = None) -> RunPlan:
    """Plan and check a run. Raises PlacementError if no plan is possible; ``problems`` lists other faults."""
    notes: list[str] = []
    problems: list[str] = []
    if config.cluster is None:
        notes.append("the run file has no cluster section, so everything runs in one process on one slot")
    # Without a cluster, everything is in one process, including the critic.
    together = "actor,rollout,critic" if config.algorithm.name == "ppo" else "actor,rollout"
    cluster = config.cluster or ClusterSection(component_placement={together: "all"})
    plan = plan_for(config, cluster)
    notes += plan.notes
    has_card = card_gib is not None or cluster.accelerator == "gpu"
    card = int((DEFAULT_CARD_GIB if card_gib is None else card_gib) * GIB) if has_card else None
    sizes, memory = None, ()
    host: dict[int, int] = {}
    try:
        sizes = read_sizes(config.model.path, model_config=model_config)
        memory = slot_memory(plan, config, sizes, card=card, reward_sizes=_reward_sizes(config, plan, notes))
        host = host_memory(plan, config, sizes, memory) if card is not None else {}
        problems += indivisible(plan, sizes)
        problems += _too_long(config, sizes)
    except SizesUnknown as error:
        if model_config is not None:
            raise
        notes.append(f"memory is not estimated: {error}")
    problems += role_problems(config, config.cluster, plan)
    _judge_memory(memory, card, notes=notes, problems=problems)
    if memory and card is not None and card_gib is None:
        notes.append(
            f"memory is compared with a card of {gib(card)}, whatever card this machine has; --gpu-memory sets a different size"
        )
    notes += _on_sizes(config, plan, memory, card)
    notes += _on_work(config, plan, host)
    notes += [*_on_environment(config, plan), *_on_elastic(config, plan), *unused(config)]
    return RunPlan(
        config=config,
        cluster=cluster,
        plan=plan,
        sizes=sizes,
        memory=memory,
        card=card,
        host=host,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _reward_sizes(config: Config, plan: Plan, notes: list[str]) -> ModelSizes | None:
    """Return the sizes of the largest reward model."""
    found: list[ModelSizes] = []
    for reward in config.reward if Role.REWARD in plan.processes else []:
        if reward.type == "model":
            try:
                found.append(read_sizes(reward.path))
            except SizesUnknown:
                notes.append(f"the reward model {reward.path} is not on this machine, so its memory is not counted")
    return max(found, key=lambda sizes: sizes.num_parameters, default=None)


def workable_plan(config: Config, cluster: ClusterSection) -> Plan:
    """Return the plan for this cluster. Raises PlacementError if there is none, or if a role cannot use its slots."""
    plan = plan_for(config, cluster)
    if problems := role_problems(config, cluster, plan):
        raise PlacementError("; ".join(problems))
    return plan


def role_problems(config: Config, cluster: ClusterSection | None, plan: Plan) -> list[str]:
    """Return the reasons why roles cannot use their processes and slots. ``cluster`` is None for a run in one process."""
    trained = [role for role in TRAINED if role in plan.processes]
    problems: list[str] = []
    for role in trained:
        nodes = [process.node_rank for process in plan.processes[role]]
        try:
            split_of(config.critic if role is Role.CRITIC else config.actor, rank=0, nodes=nodes, name=role)
        except ValueError as error:
            problems.append(str(error))
    on_gpus = cluster is not None and cluster.accelerator == "gpu"
    for role in plan.meshes:
        width = len(plan.processes[role][0].slots)
        if role in trained and width > 1:
            problems.append(
                f"{role} has {width} slots per process, but a learner uses one slot per process; give it one process per slot "
                f"and set {role}.tensor_parallel_size={width}"
            )
        if role not in trained and on_gpus:
            problems += _width_problems(role, width, config.rollout)
    weights = cluster.node_weights if cluster else None
    return [*problems, *_apart(config, plan), *_unreachable(config, plan), *_weightless(weights, plan)]


def _apart(config: Config, plan: Plan) -> Iterator[str]:
    """Report actor and inference slots that overlap only in part, because inference would need all of the actor's processes."""
    actor, inference = set(plan.role_slots(Role.ACTOR)), set(plan.role_slots(Role.INFERENCE))
    if actor & inference and actor != inference and Role.ACTOR in roles_together(config, plan):
        yield (
            f"inference has slots {ranges(plan.role_slots(Role.INFERENCE))} and the actor has slots {ranges(plan.role_slots(Role.ACTOR))}, but "
            "all of the actor's processes compute together; give both the same slots, or separate ones"
        )


def _width_problems(role: Role, width: int, rollout: RolloutSection) -> Iterator[str]:
    """Check a role that samples or scores with ``width`` GPUs per process. Logical slots have no such limit."""
    has = f"{role} has {counted(width, 'slot')} per process"
    if role is Role.ROLLOUT and rollout.engine == "vllm":
        size = rollout.vllm.tensor_parallel_size
        if size != width:
            yield (
                f"{has}, but rollout.vllm.tensor_parallel_size={size} splits an engine across {counted(size, 'slot')}; make the two equal "
                f'(a placement of "0-{4 * size - 1}:0-3" gives {size} to each of 4 processes)'
            )
    elif width > 1 and role is Role.ROLLOUT:
        yield (
            f"{has}, but the native engine uses one slot per process; give it one process per slot, or set rollout.engine=vllm "
            f"and rollout.vllm.tensor_parallel_size={width}"
        )
    elif width > 1:
        yield f"{has}, but it uses one slot per process; give it one process per slot"


def _unreachable(config: Config, plan: Plan) -> Iterator[str]:
    """Report the first process that cannot receive weights in the way that ``rollout.weights`` sets."""
    if config.rollout.weights != "shared_memory":
        return
    actors = plan.processes[Role.ACTOR]
    own, home = {actor.slots for actor in actors}, actors[0].node_rank
    for role in HOLDERS:
        for process in plan.processes.get(role, ()):
            if process.slots not in own and process.node_rank != home:
                yield (
                    f"rollout.weights=shared_memory reaches only processes on the actor's node (node {home}), but {role} rank "
                    f"{process.ranks[role]} is on node {process.node_rank}; use auto, broadcast, delta or file"
                )
                return


def _weightless(weights: list[float] | None, plan: Plan) -> Iterator[str]:
    nodes = sorted({process.node_rank for process in plan.processes[Role.ROLLOUT]})
    if weights is not None and not any(weights[rank] for rank in nodes):
        yield (
            f"cluster.node_weights={weights} gives a weight of 0 to every node with a rollout process (node {', '.join(map(str, nodes))}); give "
            "one of them a weight above 0"
        )


def _too_long(config: Config, sizes: ModelSizes) -> Iterator[str]:
    """Refuse completions so long that no prompt fits. Only the data can show whether the longest prompt fits."""
    most = config.rollout.max_response_tokens
    if config.environment is None and most >= sizes.positions:
        yield (
            f"rollout.max_response_tokens={most} leaves no room for a prompt, because the model has only {sizes.positions} "
            "positions (max_position_embeddings); use a smaller value"
        )


def indivisible(plan: Plan, sizes: ModelSizes) -> list[str]:
    problems = [
        f"{role} splits the model over {mesh.tensor} slots, but the model has {count} {what}: {count} = {mesh.tensor} x "
        f"{count // mesh.tensor} + {count % mesh.tensor}; use a number of slots per process (or a tensor_parallel_size) that divides "
        f"{count}"
        for role, mesh in plan.meshes.items()
        for what, count in (
            ("attention heads", sizes.heads),
            ("key/value heads", sizes.kv_heads),
            ("MLP columns", sizes.intermediate),
        )
        # Neighbouring ranks may share a key/value head.
        if count % mesh.tensor and (what != "key/value heads" or mesh.tensor % count)
    ]
    for role, mesh in plan.meshes.items():
        counts = dict(heads=sizes.heads, kv_heads=sizes.kv_heads, tensor=mesh.tensor, context=mesh.context)
        problem = indivisible_heads(**counts, name="actor" if role in SCORERS else role)
        if problem and problem not in problems:
            problems.append(problem)
    return problems


def _judge_memory(memory: tuple[SlotMemory, ...], card: int | None, *, notes: list[str], problems: list[str]) -> None:
    if card is None:
        return
    for entry in memory:
        who = f"{'slots' if set(entry.slots) & set(',-') else 'slot'} {entry.slots} ({', '.join(role.role for role in entry.roles)})"
        if entry.total > card:
            largest = max(entry.roles, key=lambda role: role.held + role.working)
            problems.append(
                f"{who}: the roles need {gib(entry.total)}, {gib(entry.total - card)} more than the card's {gib(card)}; {largest.role} "
                f"needs the most: {largest.lever}"
            )
        elif entry.total > TIGHT * card:
            notes.append(
                f"{who}: {gib(entry.total)} of the card's {gib(card)} are needed, which is tight, since this is only an estimate"
            )


def _on_sizes(config: Config, plan: Plan, memory: tuple[SlotMemory, ...], card: int | None) -> Iterator[str]:
    """Yield notes on what ``auto`` chooses and what that costs. The run measures a pass first and may choose slightly differently."""
    for role in (role for entry in memory for role in entry.roles if role.tokens and card is not None):
        section = config.critic if role.role is Role.CRITIC else config.actor
        if section.tokens_per_microbatch == "auto" or (section.activation_checkpointing == "auto" and role.recompute):
            yield f"{role.role}: {role.tokens} tokens in a micro-batch{role.recompute.sentence} (auto, estimated)"
            num_ranks = plan.meshes[role.role].data
            if about := on_microbatch(config, role.role, tokens=role.tokens, longest=role.longest, num_ranks=num_ranks):
                yield about
    for role in (role for entry in memory for role in entry.roles if role.role is Role.ROLLOUT and card is not None):
        tokens, num_engines = role.kv // role.kv_per_token, len(plan.processes[Role.ROLLOUT])
        about = on_kv(config, tokens=tokens, longest=role.longest, per_token=role.kv_per_token, num_engines=num_engines)
        if about is not None and kv_is_open(config.rollout):
            yield about


def _on_work(config: Config, plan: Plan, host: dict[int, int]) -> Iterator[str]:
    """Yield notes on host memory, and on processes that would have nothing to do."""
    if host and (most := max(host.values())) >= WORTH_SAYING:
        node = next(node for node, size in host.items() if size == most)
        yield f"the tensors of the processes on node {node} take up to {gib(most)} of host memory, in addition to the processes themselves"
    path = config.model.lora.path if config.model.lora is not None else None
    if path is not None and not os.path.isfile(Path(path).expanduser() / "adapter_config.json"):
        yield f"model.lora.path={path} is not an adapter on this machine, so it cannot be checked before the run starts"
    rows = config.completions_per_step // config.actor.minibatches
    data = plan.meshes[Role.ACTOR].data
    if rows < data:
        yield (
            f"an update has {config.completions_per_step} / {config.actor.minibatches} = {rows} completions for {data} actor "
            f"data ranks, so {data - rows} have nothing to do; raise data.prompts_per_step"
        )
    trains = {process.slots for process in plan.processes[Role.ACTOR]}
    shared = [process.slots in trains for process in plan.processes[Role.ROLLOUT]]
    staleness = config.trainer.staleness
    if staleness and all(shared):
        yield (
            f"trainer.staleness={staleness}, but every rollout process also trains, so sampling and training cannot overlap; give "
            "rollout its own slots, or leave staleness at 0"
        )
    if not staleness and not any(shared):
        yield (
            "with trainer.staleness=0, rollout's slots wait while the actor trains, and the actor's slots wait while rollout samples; "
            "staleness=1 lets both work at the same time"
        )
    has_work = config.algorithm.rescores(config.actor) or any(one.type == "self_certainty" for one in config.reward)
    if Role.INFERENCE in plan.processes and not has_work:
        yield (
            f"inference has slots {ranges(plan.role_slots(Role.INFERENCE))} but nothing to do: it computes log-probs only "
            "before updates with several minibatches or epochs, and only if algorithm.old_logprobs=learner; set actor.minibatches=2, or give "
            "the slots to rollout"
        )


def _on_environment(config: Config, plan: Plan) -> Iterator[str]:
    environment = config.environment
    if environment is None:
        return
    if plan.environments and isinstance(environment, AgentEnvironment | VerifiersEnvironment):
        nodes = [process.node_rank for process in plan.environments]
        yield (
            f"the programs of environment.type={environment.type} run on node {ranges(nodes)} and reach the model through an "
            "endpoint on the controller's node. It listens on that node's address in the cluster and requires an episode's key"
        )
    if not plan.environments and plan.num_nodes > 1:
        yield (
            "environment is not placed, so it runs on the controller's node; cluster.component_placement.environment=all spreads it "
            "over all nodes"
        )


def _on_elastic(config: Config, plan: Plan) -> Iterator[str]:
    elastic = config.trainer.elastic
    if elastic is None or config.cluster is None:
        return
    if elastic.min_nodes == plan.num_nodes:
        yield f"trainer.elastic.min_nodes={elastic.min_nodes} equals the number of nodes, so the run would wait until a lost node is back; use a smaller number"
        return
    for role, processes in plan.processes.items():
        nodes = {process.node_rank for process in processes}
        if len(nodes) == 1:
            yield f"trainer.elastic cannot continue without node {min(nodes)}, the only node with {role}; place {role} on several nodes"


def gib(count: int) -> str:
    """
    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"


def describe_model(run: RunPlan) -> str:
    if run.sizes is None:
        return run.config.model.path
    dtype = {2: "bfloat16", 4: "float32"}[element_size(run.config)]
    count = run.sizes.num_parameters
    shown = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return f"{run.config.model.path} ({run.sizes.model_type}, {shown} parameters, {dtype})"


def _processes_json(processes: Sequence[PlannedProcess]) -> list[dict[str, Any]]:
    """List the processes by rank. The local rank counts the role's processes on the same node."""
    on_node: Counter[int] = Counter()
    rows = []
    for rank, process in enumerate(processes):
        node = process.node_rank
        rows.append({"rank": rank, "slots": list(process.slots), "node": node, "local_rank": on_node[node]})
        on_node[node] += 1
    return rows
