"""The roles of a run in processes of the cluster, driven as if they were here.

``build_remote_workers`` places one process per seat of the plan and gives the controller the same handles that local
mode has: an engine, a learner, a critic, a reference. Each handle calls the processes that hold its role. Calls to one
process run one after the other, so an update never meets a half-decoded step.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.config import ClusterSection, Config
from rollcall.data.load import PromptSet
from rollcall.durable.atomic import staging, swap_in
from rollcall.engine.tokenizers import refuse_other_tokenizers, tokenizer_mark
from rollcall.errors import CheckpointError, PlacementError, SizesUnknown, WorkerDiedError, WorkerLostError
from rollcall.groups.backend import Seat
from rollcall.groups.cluster import VirtualCluster, has_own_backend
from rollcall.groups.group import WorkerBuilder, WorkerGroup
from rollcall.learner.learner import TokenScores
from rollcall.learner.optimizer import optimizer_class
from rollcall.loop.attempts import Budget, headline
from rollcall.net.door import new_secret
from rollcall.net.meeting import Place
from rollcall.on_ray.connect import connect
from rollcall.plan.elastic import shrink
from rollcall.plan.judge import indivisible, workable_plan
from rollcall.plan.memory import read_sizes
from rollcall.plan.placement import Plan, Role
from rollcall.reward.scorer import Scorer
from rollcall.roles.engines import WAIT_S, RemoteEngine
from rollcall.roles.local import NUM_REWARD_WORKERS, Inputs, build_eval_scorer, load_inputs, model_rewards
from rollcall.roles.team import Team
from rollcall.roles.worker import TRAINED, Facts, Seating, roles_in_parts
from rollcall.types import Completion, Floats, Prompt, Sample
from rollcall.words import counted
from rollcall.worker_env.declared import submitted_env, worker_env

REPLACE_S = 24 * 3600.0  # for a seat to be there again, while others do the work; told meanwhile


class RemoteLearner:
    def __init__(self, team: Team, config: Config) -> None:
        self.num_tokens_trained = 0
        self._team = team
        self._in_parts = roles_in_parts(config, team.members)
        self._rescores = config.rescores

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        if self._rescores:
            scores = self.score(samples)
            samples = [sample.with_(old_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
        results = self._team.call_role(Role.ACTOR, "update", list(samples))
        metrics, self.num_tokens_trained = results[0]
        return metrics

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        role = Role.INFERENCE if Role.INFERENCE in self._team.members else Role.ACTOR
        return run_forward(self._team, role, "score", samples, in_parts=role in self._in_parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRepairs:
    engine: RemoteEngine
    missing_nodes: frozenset[int]  # ranks that this attempt does without

    @property
    def is_due(self) -> bool:
        return self.engine.is_due

    @property
    def regrow(self) -> str | None:
        if not self.missing_nodes:
            return None
        from rollcall.on_ray.reserve import ranked_nodes

        back = sorted(self.missing_nodes & {node.rank for node in ranked_nodes()})
        return f"node {', '.join(map(str, back))} is back" if back else None

    def admit(self, version: int) -> None:
        if self.engine.is_due:  # or the new ones came along with an update meanwhile
            self.engine.update_weights(version)


class RemoteCritic:
    def __init__(self, team: Team, config: Config) -> None:
        self._team = team
        self._in_parts = Role.CRITIC in roles_in_parts(config, team.members)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return run_forward(self._team, Role.CRITIC, "values", samples, in_parts=self._in_parts)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self._team.call_role(Role.CRITIC, "update_critic", list(samples))[0]


def run_forward(team: Team, role: Role, method: str, samples: Sequence[Sample], *, in_parts: bool) -> list[Any]:
    """One result per sample. Processes that hold parts of a model share the samples out among themselves."""
    if not in_parts:
        return team.spread(role, method, samples)
    return team.call_role(role, method, list(samples))[0]


@dataclass(slots=True, kw_only=True)
class RemoteWorkers:
    """What the controller drives, on the cluster."""

    tokenizer: Any
    engine: RemoteEngine
    learner: RemoteLearner
    critic: RemoteCritic | None
    reference: Callable[[Sequence[Sample]], list[TokenScores]] | None
    scorer: Scorer
    eval_scorer: Scorer
    train: PromptSet
    val: PromptSet | None
    stop_token_ids: tuple[int, ...]
    max_positions: int
    team: Team
    cluster: VirtualCluster
    repairs: RemoteRepairs
    _preemptions_seen: int = 0

    @property
    def is_remote(self) -> bool:
        return True

    @property
    def shares_policy(self) -> bool:
        return not set(self.team.members[Role.ROLLOUT]).isdisjoint(self.team.members[Role.ACTOR])

    def take_preemptions(self) -> int:
        new = self.engine.num_preemptions - self._preemptions_seen
        self._preemptions_seen += new
        return new

    def write_checkpoint(self, directory: Path) -> None:
        self.team.call_role(Role.ACTOR, "write_checkpoint", Role.ACTOR, directory.resolve())
        if self.critic:
            self.team.call_role(Role.CRITIC, "write_checkpoint", Role.CRITIC, directory.resolve())
        if not (directory / "model" / "config.json").exists():
            raise CheckpointError(
                f"the actor wrote {directory} on its node and it is not to be seen here; put run.dir on a folder that all "
                "nodes share"
            )

    def read_checkpoint(self, directory: Path) -> None:
        roles = [role for role in TRAINED if role in self.team.members]
        workers = sorted({worker for role in roles for worker in self.team.members[role]})
        self.team.call(workers, "read_checkpoint", directory.resolve())

    def export(self, directory: Path) -> None:
        self.team.call_role(Role.ACTOR, "export", directory.resolve())

    def close(self) -> None:
        self.scorer.close()
        if self.eval_scorer is not self.scorer:
            self.eval_scorer.close()
        self.cluster.shutdown()


def build_remote_workers(config: Config, *, say: Callable[[str], None]) -> RemoteWorkers:
    """Place the plan's processes on the cluster that this node belongs to, and load every role."""
    assert config.cluster is not None
    plan = workable_plan(config, config.cluster)
    if not has_own_backend():
        connect()  # before anything slow: a node that is in no cluster says so at once
    plan, section, kept = _fit_nodes(config, plan, say=say)
    inputs = load_inputs(config, say=say)
    _refuse_impossible(config, plan, model_path=inputs.model_path)
    say(
        f"placing {counted(sum(len(group.processes) for group in plan.groups), 'process')} on {counted(plan.num_nodes, 'node')}"
    )
    cluster = VirtualCluster(
        list(plan.slots_per_node),
        num_gpus_per_node=max(plan.slots_per_node),
        name=config.run.name,
        node_ranks=None if len(kept) == config.cluster.num_nodes else kept,
    )
    try:
        team, facts, seatings = _place(config, plan, cluster, inputs=inputs, section=section, kept=kept)
        engine = _engine(config, team, seatings=seatings)
    except BaseException:  # an interrupt too: slots must not stay taken
        cluster.shutdown()
        raise
    learner = RemoteLearner(team, config)
    rewards = model_rewards(
        config,
        score=learner.score,
        load_reward_model=lambda reward: partial(_reward, team, config.reward.index(reward)),
    )
    scorer = Scorer(config.reward, num_workers=NUM_REWARD_WORKERS, model_rewards=rewards)
    return RemoteWorkers(
        tokenizer=inputs.tokenizer,
        engine=engine,
        learner=learner,
        critic=RemoteCritic(team, config) if Role.CRITIC in team.members else None,
        reference=_reference(team, config) if Role.REFERENCE in team.members else None,
        scorer=scorer,
        eval_scorer=build_eval_scorer(config, scorer),
        train=inputs.train,
        val=inputs.val,
        stop_token_ids=facts.stop_token_ids,
        max_positions=facts.max_positions,
        team=team,
        cluster=cluster,
        repairs=RemoteRepairs(
            engine=engine, missing_nodes=frozenset(range(config.cluster.num_nodes)) - frozenset(kept)
        ),
    )


def _fit_nodes(config: Config, plan: Plan, *, say: Callable[[str], None]) -> tuple[Plan, ClusterSection, list[int]]:
    """The plan on the nodes that are there, where the run may do with fewer than it asks for; and their ranks."""
    assert config.cluster is not None
    section, elastic, everyone = config.cluster, config.trainer.elastic, list(range(plan.num_nodes))
    if elastic is None:
        return plan, section, everyone
    from rollcall.on_ray.reserve import wait_for_nodes

    kept = wait_for_nodes(plan.num_nodes, fewest=elastic.min_nodes, wait_s=elastic.wait_s, say=say)
    if kept == everyone:
        return plan, section, everyone
    section = shrink(section, plan, kept=kept)
    return workable_plan(config, section), section, kept


def _engine(config: Config, team: Team, *, seatings: Sequence[Seating]) -> RemoteEngine:
    """All rollout processes; those that hold nothing else are replaced when they are lost, as often as restarts are allowed."""
    assert config.cluster is not None
    trainer = config.trainer
    only = [worker for worker, seating in enumerate(seatings) if set(seating.ranks) == {Role.ROLLOUT}]
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
                team.call([worker], "build", seatings[worker])
                return
            except WorkerLostError as error:
                loss = error
                why = headline(loss)
                print(f"{where} is lost, others do its part until it is replaced: {why}", file=sys.stderr, flush=True)

    team.group.tolerate(only)
    return RemoteEngine(
        team,
        room=config.rollout.max_running,
        node_weights=config.cluster.node_weights,
        replaceable=only,
        replace=replace,
        wait_s=trainer.elastic.wait_s if trainer.elastic else WAIT_S,
    )


def _refuse_impossible(config: Config, plan: Plan, *, model_path: str) -> None:
    """What this model and its optimizers cannot do, before any process is started."""
    problems: list[str] = []
    with suppress(SizesUnknown):  # of an architecture that the processes then refuse by name
        problems = indivisible(plan, read_sizes(model_path))
    if problems:
        raise PlacementError("; ".join(problems))
    members = {role: list(range(plan.world_size(role))) for role in TRAINED if role in plan.processes}
    in_parts = roles_in_parts(config, members)
    for role in members:
        optimizer_class(getattr(config, role.value), name=role.value, in_parts=role in in_parts)


def _seen_by_all(path: str, config: Config) -> str:
    """The embedded model is in this node's own package: a copy goes beside the run directory, which all nodes share."""
    if not config.model.path.startswith("builtin:"):
        return path
    copy = (config.run.dir.parent / f".{config.run.dir.name}.start").resolve()
    with staging(copy) as tmp:
        shutil.copytree(path, tmp, dirs_exist_ok=True)
        swap_in(tmp, copy)
    return str(copy)


def _place(
    config: Config, plan: Plan, cluster: VirtualCluster, *, inputs: Inputs, section: ClusterSection, kept: Sequence[int]
) -> tuple[Team, Facts, list[Seating]]:
    """Processes for the plan, whose nodes have the ``kept`` ranks."""
    processes = sorted(
        (process for group in plan.groups for process in group.processes), key=lambda process: process.slots
    )
    starts = [sum(plan.slots_per_node[:rank]) for rank in range(plan.num_nodes)]
    group = WorkerGroup(
        cluster=cluster,
        remote_worker_builder=WorkerBuilder(
            "rollcall.roles.worker.RoleWorker", config, _seen_by_all(inputs.model_path, config)
        ),
        name_prefix=config.run.name,
        seats=[
            Seat(
                node_rank=kept[process.node_rank],
                slots=tuple(slot - starts[process.node_rank] for slot in process.slots),
            )
            for process in processes
        ],
        titles=[" + ".join(f"{role} rank {rank}" for role, rank in process.ranks.items()) for process in processes],
        node_env_vars={
            kept[rank]: worker_env(section, submitted=submitted_env(section), node_rank=rank)
            for rank in range(plan.num_nodes)
        },
    )
    members = {
        role: [
            place
            for _, place in sorted(
                (process.ranks[role], place) for place, process in enumerate(processes) if role in process.ranks
            )
        ]
        for role in plan.roles
    }
    group.tolerate([])
    team = Team(group=group, members=members)
    meeting = {}
    for role in TRAINED:
        if len(members.get(role, ())) > 1:
            address = group.worker_metadata[members[role][0]]["address"]
            (port,) = team.call([members[role][0]], "listen", address)
            meeting[role] = Place(address=address, port=port, secret=new_secret())
    sizes = {role: len(workers) for role, workers in members.items()}
    in_parts = roles_in_parts(config, members)
    seatings = [
        Seating(ranks=dict(process.ranks), sizes=sizes, meeting=meeting, in_parts=in_parts) for process in processes
    ]
    facts = group.get_all_worker_results(group.run_all_workers_multiple_data("build", seatings))
    marks = {
        f"{'+'.join(process.ranks)} on node {kept[process.node_rank]}": one.tokenizer
        for process, one in zip(processes, facts, strict=True)
    }
    refuse_other_tokenizers(tokenizer_mark(inputs.tokenizer), marks, path=inputs.model_path)
    return team, facts[0], seatings


def _reference(team: Team, config: Config) -> Callable[[Sequence[Sample]], list[TokenScores]]:
    in_parts = Role.REFERENCE in roles_in_parts(config, team.members)
    return partial(run_forward, team, Role.REFERENCE, "score_reference", in_parts=in_parts)


def _reward(team: Team, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
    """Asked of one reward process, each prompt of another."""
    workers = team.members[Role.REWARD]
    worker = workers[hash(prompt.id) % len(workers)]
    (scores,) = team.call([worker], "reward", index, prompt, completions)
    return scores
