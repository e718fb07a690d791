"""The roles of a run in processes of the cluster, driven as if they were here.

``build_remote_workers`` places one process per seat of the plan and gives the controller the same handles that local
mode has: an engine, a learner, a critic, a reference. Each handle calls the processes that hold its role. Calls to one
process run one after the other, so an update never meets a half-decoded step.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rollcall.checkpoint.saving import Saving, saving_of
from rollcall.config import ClusterSection, Config
from rollcall.durable.atomic import staging, swap_in
from rollcall.engine.tokenizers import refuse_other_tokenizers, tokenizer_mark
from rollcall.environments.protocol import Environments
from rollcall.errors import PlacementError, SizesUnknown, WorkerDiedError, WorkerLostError
from rollcall.groups.backend import Backend, Seat
from rollcall.groups.cluster import VirtualCluster
from rollcall.groups.group import WorkerBuilder, WorkerGroup
from rollcall.learner.learner import TokenScores
from rollcall.learner.optimizer import optimizer_class
from rollcall.loop.attempts import Budget, headline
from rollcall.nodes.which import Cluster
from rollcall.observe.live import Look
from rollcall.on_ray.connect import connect
from rollcall.plan.elastic import shrink
from rollcall.plan.judge import indivisible, workable_plan
from rollcall.plan.memory import read_sizes
from rollcall.plan.placement import TRAINED, Plan, PlannedProcess, Role, roles_in_parts, roles_together
from rollcall.roles.build import Held, Inputs, build_environments, build_scorers, load_inputs
from rollcall.roles.engines import WAIT_S, Engines
from rollcall.roles.environment_hosts import EnvironmentHosts, start_hosts
from rollcall.roles.lookout import joined, look_at
from rollcall.roles.team import Team
from rollcall.roles.worker import PURPOSES, Facts
from rollcall.types import Completion, Floats, Prompt, Sample
from rollcall.wait import say, warn
from rollcall.words import counted
from rollcall.worker_env.declared import submitted_env, worker_env

REPLACE_S = 24 * 3600.0  # until a lost slot is back, while the others do the work


class RemoteLearner:
    def __init__(self, team: Team, *, rescores: bool) -> None:
        self.num_tokens_trained = 0
        self._team = team
        self._rescores = rescores

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        if self._rescores:
            scores = self.score(samples)
            samples = [sample.with_(old_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
        results = self._team.call_role(Role.ACTOR, "update", list(samples))
        metrics, self.num_tokens_trained = results[0]
        return metrics

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        role = Role.INFERENCE if Role.INFERENCE in self._team.members else Role.ACTOR
        return self._team.forward(role, "score", samples)


class RemoteCritic:
    def __init__(self, team: Team) -> None:
        self._team = team

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return self._team.forward(Role.CRITIC, "values", samples)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self._team.call_role(Role.CRITIC, "update_critic", list(samples))[0]


@dataclass(slots=True, kw_only=True)
class RemoteWorkers(Held[Engines]):
    learner: RemoteLearner
    critic: RemoteCritic | None
    reference: Callable[[Sequence[Sample]], list[TokenScores]] | None
    max_positions: int
    team: Team
    cluster: VirtualCluster
    processes: Sequence[PlannedProcess]  # by rank in the group
    saving: Saving
    missing_nodes: frozenset[int]  # ranks that this attempt goes without
    on_ray: bool  # else the nodes share only a folder
    plan: Plan
    hosts: EnvironmentHosts | None  # None: environments run here, or there are none
    is_remote: bool = field(default=True, init=False)

    @property
    def repairs(self) -> RemoteWorkers:
        return self

    @property
    def is_due(self) -> bool:
        return self.engine.is_due

    @property
    def regrow(self) -> str | None:
        if not self.missing_nodes:
            return None
        from rollcall.on_ray.members import ranked_nodes

        back = sorted(self.missing_nodes & {node.rank for node in ranked_nodes()})
        return f"node {', '.join(map(str, back))} is back" if back else None

    async def admit(self) -> None:
        if self.is_due:  # an update in the meantime may have brought the new ones in
            await self.engine.admit()

    @property
    def shares_policy(self) -> bool:
        return not set(self.team.members[Role.ROLLOUT]).isdisjoint(self.team.members[Role.ACTOR])

    def look(self, *, last: bool = False) -> Look:
        look = look_at(self.team.group, self.processes, missing_nodes=self.missing_nodes, last=last)
        if self.hosts is not None:
            look = joined(look, look_at(self.hosts.group, self.plan.environments, last=last))
        return replace(look, on_ray=self.on_ray)

    def export(self, directory: Path) -> None:
        self.team.call_role(Role.ACTOR, "export", directory.resolve())

    def close(self) -> None:
        Held.close(self)
        if self.hosts is not None:
            self.hosts.close()
        self.cluster.shutdown()


def build_remote_workers(config: Config, *, backend: Backend | None = None) -> RemoteWorkers:
    """Place the plan's processes and load every role; ``backend`` None: on the cluster that this node belongs to."""
    assert config.cluster is not None
    plan = workable_plan(config, config.cluster)
    on_ray, joined_cluster = backend is None, None
    if backend is None:
        # Before anything slow, so that a node outside any cluster is refused at once.
        joined_cluster = connect(ray_address=config.cluster.ray_address)
        from rollcall.on_ray.reserve import RayBackend  # here: nodes that share only a folder need no Ray

        backend = RayBackend(joined_cluster)
    plan, section, kept = _fit_nodes(config, plan, joined_cluster)
    inputs = load_inputs(config)
    in_parts = roles_in_parts(config, plan)
    _refuse_impossible(config, plan, in_parts, model_path=inputs.model_path)
    processes = plan.all_processes
    say(f"placing {counted(len(processes), 'process')} on {counted(plan.num_nodes, 'node')}")
    cluster = VirtualCluster(
        list(plan.slots_per_node),
        num_gpus_per_node=max(plan.slots_per_node),
        name=config.run.name,
        node_ranks=None if len(kept) == config.cluster.num_nodes else kept,
        backend=backend,
    )
    try:
        group = _start(config, plan, cluster, inputs=inputs, section=section, kept=kept, in_parts=in_parts)
        place = {process.slots: number for number, process in enumerate(processes)}
        members = {role: [place[process.slots] for process in plan.processes[role]] for role in plan.meshes}
        team = Team(group=group, members=members, together=roles_together(config, plan))
        facts = _load(team, processes, inputs=inputs)
        engine = _engine(config, team, processes)
        hosts, environments = _environments(config, plan, cluster, inputs=inputs, section=section, kept=kept)
    except BaseException:  # an interrupt too: slots must not stay taken
        cluster.shutdown()
        raise
    learner = RemoteLearner(team, rescores=config.rescores)
    models = {index: partial(_reward, team, index) for index, one in enumerate(config.reward) if one.type == "model"}
    scorer, eval_scorer = build_scorers(config.reward, score=learner.score, models=models)
    return RemoteWorkers(
        tokenizer=inputs.tokenizer,
        engine=engine,
        learner=learner,
        critic=RemoteCritic(team) if Role.CRITIC in members else None,
        reference=partial(team.forward, Role.REFERENCE, "score_reference") if Role.REFERENCE in members else None,
        scorer=scorer,
        eval_scorer=eval_scorer,
        environments=environments,
        train=inputs.train,
        val=inputs.val,
        stop_token_ids=facts.stop_token_ids,
        max_positions=facts.max_positions,
        team=team,
        cluster=cluster,
        processes=processes,
        saving=saving_of(
            config,
            team.call,
            processes=sorted({worker for role in TRAINED for worker in members.get(role, ())}),
            in_parts=config.model.lora is None and not in_parts.isdisjoint(TRAINED),
        ),
        on_ray=on_ray,
        plan=plan,
        hosts=hosts,
        missing_nodes=frozenset(range(config.cluster.num_nodes)) - frozenset(kept),
    )


def _environments(
    config: Config,
    plan: Plan,
    cluster: VirtualCluster,
    *,
    inputs: Inputs,
    section: ClusterSection,
    kept: Sequence[int],
) -> tuple[EnvironmentHosts | None, Environments | None]:
    """On the nodes that they are placed on, else here."""
    hosts: list[EnvironmentHosts] = []

    def make(chat_template: str | None) -> Environments:
        started, environments = start_hosts(
            config, plan, cluster, section=section, kept=kept, chat_template=chat_template
        )
        hosts.append(started)
        return environments

    found = build_environments(
        config.environment, inputs.tokenizer, inputs.train, inputs.val, make=make if plan.environments else None
    )
    return next(iter(hosts), None), found


def _fit_nodes(config: Config, plan: Plan, cluster: Cluster | None) -> tuple[Plan, ClusterSection, list[int]]:
    """The plan on the nodes that have joined, where the run may use fewer than it asks for; its section; the nodes' ranks."""
    assert config.cluster is not None
    section, elastic, everyone = config.cluster, config.trainer.elastic, list(range(plan.num_nodes))
    if elastic is None:
        return plan, section, everyone
    from rollcall.on_ray.reserve import wait_for_nodes

    kept = wait_for_nodes(cluster, plan.num_nodes, fewest=elastic.min_nodes, wait_s=elastic.wait_s)
    if kept == everyone:
        return plan, section, everyone
    section = shrink(section, plan, kept=kept)
    return workable_plan(config, section), section, kept


def _engine(config: Config, team: Team, processes: Sequence[PlannedProcess]) -> Engines:
    """All rollout processes. A lost one with no other role is replaced, as often as restarts are allowed."""
    assert config.cluster is not None
    trainer = config.trainer
    only = [worker for worker, process in enumerate(processes) if set(process.ranks) == {Role.ROLLOUT}]
    budget = Budget(most=trainer.max_restarts, window_s=trainer.restart_window_s)
    one = threading.Lock()

    def replace(worker: int) -> None:
        where = team.group.specs[worker].where
        loss: WorkerLostError = WorkerDiedError(f"{where} is lost", role="rollout", ranks=[worker], node_ranks=[])
        while True:
            with one:
                budget.spend(loss)
            try:
                team.group.replace(worker, timeout_s=REPLACE_S)
                team.call([worker], "build", processes[worker].ranks, {})
                return
            except WorkerLostError as error:
                loss = error
                warn(f"{where} is lost; the others do its work until it is replaced: {headline(loss)}")

    team.group.tolerate(only)
    return Engines(
        team,
        room=config.rollout.max_running,
        node_weights=config.cluster.node_weights,
        replaceable=only,
        replace=replace,
        wait_s=trainer.elastic.wait_s if trainer.elastic else WAIT_S,
    )


def _refuse_impossible(config: Config, plan: Plan, in_parts: Collection[Role], *, model_path: str) -> None:
    """Refuse what this model and its optimizers cannot do, before any process is started."""
    problems: list[str] = []
    with suppress(SizesUnknown):  # an architecture that the processes themselves refuse by name
        problems = indivisible(plan, read_sizes(model_path))
    if problems:
        raise PlacementError("; ".join(problems))
    for role in TRAINED:
        if role in plan.processes:
            optimizer_class(getattr(config, role.value), name=role.value, in_parts=role in in_parts)


def _seen_by_all(path: str, name: str, *, run_dir: Path) -> str:
    """The embedded model is in this node's own package: a copy goes beside the run directory, which all nodes share."""
    if not name.startswith("builtin:"):
        return path
    copy = (run_dir.parent / f".{run_dir.name}.start").resolve()
    with staging(copy) as tmp:
        shutil.copytree(path, tmp, dirs_exist_ok=True)
        swap_in(tmp, copy)
    return str(copy)


def _start(
    config: Config,
    plan: Plan,
    cluster: VirtualCluster,
    *,
    inputs: Inputs,
    section: ClusterSection,
    kept: Sequence[int],
    in_parts: frozenset[Role],
) -> WorkerGroup:
    """The plan's processes, on nodes with the ``kept`` ranks."""
    starts = [sum(plan.slots_per_node[:rank]) for rank in range(plan.num_nodes)]
    builder = WorkerBuilder(
        "rollcall.roles.worker.RoleWorker",
        config,
        _seen_by_all(inputs.model_path, config.model.path, run_dir=config.run.dir),
        in_parts=in_parts,
    )
    submitted = submitted_env(section)
    group = WorkerGroup(
        cluster=cluster,
        remote_worker_builder=builder,
        name_prefix=config.run.name,
        seats=[
            Seat(
                node_rank=kept[process.node_rank],
                slots=tuple(slot - starts[process.node_rank] for slot in process.slots),
            )
            for process in plan.all_processes
        ],
        titles=list(map(str, plan.all_processes)),
        kinds=[process.kind for process in plan.all_processes],
        purposes=PURPOSES,
        node_env_vars={
            kept[rank]: worker_env(section, submitted=submitted, node_rank=rank) for rank in range(plan.num_nodes)
        },
    )
    group.tolerate([])
    return group


def _load(team: Team, processes: Sequence[PlannedProcess], *, inputs: Inputs) -> Facts:
    """Every process meets its gang and loads its roles; all of them must have the controller's tokenizer."""
    group = team.group
    built = group.run_all_workers_multiple_data(
        "build", [process.ranks for process in processes], common_kwargs={"meeting": team.meetings()}
    )
    facts = group.get_all_worker_results(built)
    marks = {
        f"{'+'.join(process.ranks)} on node {one['node_rank']}": fact.tokenizer
        for process, one, fact in zip(processes, group.worker_metadata, facts, strict=True)
    }
    refuse_other_tokenizers(tokenizer_mark(inputs.tokenizer), marks, path=inputs.model_path)
    return facts[0]


def _reward(team: Team, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
    """Ask one reward process; prompts are spread over all of them."""
    workers = team.members[Role.REWARD]
    worker = workers[hash(prompt.id) % len(workers)]
    (scores,) = team.call([worker], "reward", index, prompt, completions)
    return scores
