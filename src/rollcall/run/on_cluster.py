"""Runs the roles in processes on a cluster, and lets the controller use them as if they were in its own process.

``build_workers_on_cluster`` starts the plan's processes. Each process is a ``worker.RoleWorker`` with the roles that the plan gives it.
The controller gets the same handles as from ``local.build_workers``: an engine, a learner, a critic and a reference. Each handle calls
the processes with its role. A process handles its calls one after the other, so an update never runs in the middle of a decoding step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from rollcall.base.errors import PlacementError, SizesUnknown
from rollcall.base.types import Completion, Floats, Prompt, Sample
from rollcall.base.wait import say
from rollcall.base.words import counted
from rollcall.checkpoint.saving import saving_of
from rollcall.config import Config
from rollcall.learner.learner import TokenScores
from rollcall.learner.optimizer import optimizer_class
from rollcall.loop.workers import Workers
from rollcall.model.tokenizers import refuse_other_tokenizers, tokenizer_mark
from rollcall.plan.judge import indivisible, workable_plan
from rollcall.plan.memory import read_sizes
from rollcall.plan.placement import TRAINED, PlannedProcess, Role, roles_in_parts, roles_together, shrink
from rollcall.process.groups.backend import Backend
from rollcall.process.groups.cluster import VirtualCluster
from rollcall.process.groups.group import WorkerBuilder, WorkerGroup
from rollcall.process.ray.connect import connect
from rollcall.run.build import Inputs, build_environments, build_scorers, load_inputs
from rollcall.run.engines import WAIT_S, Engines
from rollcall.run.environment_hosts import EnvironmentHosts
from rollcall.run.team import Site, Spares, Team, look_at
from rollcall.run.worker import PURPOSES, Facts


class RemoteLearner:
    def __init__(self, team: Team, *, rescores: bool) -> None:
        self.num_tokens_trained = 0
        self._team = team
        self._rescores = rescores

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        if self._rescores:
            scores = self.score(samples)
            samples = [sample.with_(old_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
        metrics, self.num_tokens_trained = self._team.call_role(Role.ACTOR, "update", list(samples))[0]
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


def build_workers_on_cluster(config: Config, *, backend: Backend | None) -> Workers:
    """Place the plan's processes and load every role, on ``backend`` or by default on the Ray cluster that this node belongs to."""
    assert config.cluster is not None
    plan = workable_plan(config, config.cluster)
    on_ray, joined = backend is None, None
    if backend is None:
        # Connect before anything slow, so that a node outside any cluster is refused at once.
        joined = connect(ray_address=config.cluster.ray_address)
        from rollcall.process.ray.reserve import RayBackend  # imported late: nodes that share only a folder need no Ray

        backend = RayBackend(joined)
    section, kept = config.cluster, list(range(plan.num_nodes))
    if (elastic := config.trainer.elastic) is not None:
        from rollcall.process.ray.reserve import wait_for_nodes

        kept = wait_for_nodes(joined, plan.num_nodes, fewest=elastic.min_nodes, wait_s=elastic.wait_s)
    if len(kept) < plan.num_nodes:
        section = shrink(section, plan, kept=kept)
        plan = workable_plan(config, section)
    inputs = load_inputs(config)
    in_parts = roles_in_parts(config, plan)
    # Refuse what the model or its optimizers do not support, before any process is started.
    with suppress(SizesUnknown):  # the processes refuse such an architecture by name
        if problems := indivisible(plan, read_sizes(inputs.model_path)):
            raise PlacementError("; ".join(problems))
    for role in TRAINED:
        if role in plan.processes:
            optimizer_class(getattr(config, role.value), name=role.value, in_parts=role in in_parts)
    say(f"placing {counted(len(plan.all_processes), 'process')} on {counted(plan.num_nodes, 'node')}")
    cluster = VirtualCluster(
        list(plan.slots_per_node),
        num_gpus_per_node=max(plan.slots_per_node),
        name=config.run.name,
        node_ranks=None if len(kept) == config.cluster.num_nodes else kept,
        backend=backend,
    )
    with ExitStack() as owned:  # free the slots again if this fails
        owned.enter_context(cluster)
        site = Site(plan=plan, section=section, kept=kept, cluster=cluster)
        return _fill(config, site, inputs=inputs, in_parts=in_parts, on_ray=on_ray, owned=owned)


def _fill(
    config: Config, site: Site, *, inputs: Inputs, in_parts: frozenset[Role], on_ray: bool, owned: ExitStack
) -> Workers:
    """Start the processes, load their roles, and build the controller's handles. The returned ``Workers`` own what is in ``owned``."""
    assert config.cluster is not None
    plan, processes = site.plan, site.plan.all_processes
    team, facts = _start(config, site, inputs=inputs, in_parts=in_parts)
    # A lost process that only does rollout is replaced within the attempt; the loss of any other process ends the attempt.
    replaceable = [worker for worker, process in enumerate(processes) if set(process.ranks) == {Role.ROLLOUT}]
    team.group.tolerate(replaceable)
    spares = [Spares(team.group, config.trainer, role=Role.ROLLOUT)]
    engines = Engines(
        team,
        room=config.rollout.max_running,
        node_weights=config.cluster.node_weights,
        replaceable=replaceable,
        replace=lambda worker: spares[0].replace(
            worker, lambda: team.call([worker], "build", processes[worker].ranks, {})
        ),
        wait_s=config.trainer.elastic.wait_s if config.trainer.elastic else WAIT_S,
    )
    learner = RemoteLearner(team, rescores=config.algorithm.rescores(config.actor))
    models = {index: partial(_reward, team, index) for index, one in enumerate(config.reward) if one.type == "model"}
    scorer, eval_scorer = build_scorers(config.reward, score=learner.score, models=models, owned=owned)
    groups: list[tuple[WorkerGroup, Sequence[PlannedProcess]]] = [(team.group, processes)]
    section, tokenizer, rows = config.environment, inputs.tokenizer, (inputs.train, inputs.val)
    if plan.environments:
        assert section is not None, "a placement without one is refused"
        hosts = EnvironmentHosts(section, site=site, trainer=config.trainer, run_dir=config.run.dir)
        environments = build_environments(section, tokenizer, *rows, make=hosts.start)
        groups.append((hosts.group, plan.environments))
        spares.append(hosts.spares)
    else:
        environments = build_environments(section, tokenizer, *rows)
    missing_nodes = frozenset(range(config.cluster.num_nodes)) - frozenset(site.kept)

    for each in spares:
        owned.callback(each.close)
    return Workers(
        tokenizer=tokenizer,
        engine=engines,
        learner=learner,
        critic=RemoteCritic(team) if Role.CRITIC in team.members else None,
        reference=partial(team.forward, Role.REFERENCE, "score_reference") if Role.REFERENCE in team.members else None,
        scorer=scorer,
        eval_scorer=eval_scorer,
        environments=environments,
        train=inputs.train,
        val=inputs.val,
        stop_token_ids=facts.stop_token_ids,
        max_positions=facts.max_positions,
        shares_policy=not set(team.members[Role.ROLLOUT]).isdisjoint(team.members[Role.ACTOR]),
        saving=saving_of(
            config,
            team.call,
            processes=sorted({worker for role in TRAINED for worker in team.members.get(role, ())}),
            in_parts=config.model.lora is None and not in_parts.isdisjoint(TRAINED),
        ),
        export=lambda directory: team.call_role(Role.ACTOR, "export", directory.resolve()),
        owned=owned.pop_all(),
        is_remote=True,
        look=partial(look_at, groups, missing_nodes=missing_nodes, on_ray=on_ray),
        admit=engines.admit,
        regrow=partial(_regrow, missing_nodes),
    )


def _start(config: Config, site: Site, *, inputs: Inputs, in_parts: frozenset[Role]) -> tuple[Team, Facts]:
    """Start all processes; each joins its gang and loads its roles. Raises if a process's tokenizer differs from the controller's."""
    plan, processes = site.plan, site.plan.all_processes
    # A builtin model is part of the package, so each node uses its own copy.
    path = config.model.path if config.model.path.startswith("builtin:") else inputs.model_path
    builder = WorkerBuilder("rollcall.run.worker.RoleWorker", config, path, in_parts=in_parts)
    group = site.start(builder, processes, name=config.run.name, purposes=PURPOSES)
    group.tolerate([])
    place = {process.slots: number for number, process in enumerate(processes)}
    members = {role: [place[process.slots] for process in plan.processes[role]] for role in plan.meshes}
    team = Team(group=group, members=members, together=roles_together(config, plan))
    meetings = team.meetings()
    run = group.run_single_worker_single_data
    built = [run("build", worker, process.ranks, meetings) for worker, process in enumerate(processes)]
    facts: list[Facts] = group.get_all_worker_results(built)
    marks = {
        f"{process.kind} on node {one['node_rank']}": fact.tokenizer
        for process, one, fact in zip(processes, group.worker_metadata, facts, strict=True)
    }
    refuse_other_tokenizers(tokenizer_mark(inputs.tokenizer), marks, path=inputs.model_path)
    return team, facts[0]


def _regrow(missing_nodes: Collection[int]) -> str | None:
    if not missing_nodes:
        return None
    from rollcall.process.ray.members import ranked_nodes

    back = sorted({node.rank for node in ranked_nodes()}.intersection(missing_nodes))
    return f"node {', '.join(map(str, back))} is back" if back else None


def _reward(team: Team, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
    """Call one reward process. Prompts are spread over all reward processes."""
    workers = team.members[Role.REWARD]
    worker = workers[hash(prompt.id) % len(workers)]
    (scores,) = team.call([worker], "reward", index, prompt, completions)
    return scores
