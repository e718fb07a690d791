"""The roles of a run in processes of the cluster, driven as if they were here.

``build_remote_workers`` places one process per seat of the plan and gives the controller the same handles that local
mode has: an engine, a learner, a critic, a reference. Each handle calls the processes that hold its role. Calls to one
process run one after the other, so an update never meets a half-decoded step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.checkpoint.store import CheckpointError
from rollcall.cluster.backend import Seat
from rollcall.cluster.environment import submitted_env, worker_env
from rollcall.cluster.local import NUM_REWARD_WORKERS, build_eval_scorer, load_inputs, model_rewards
from rollcall.cluster.placement import Plan, Role, needs_of, plan_placement
from rollcall.cluster.role_worker import TRAINED, Facts, Seating
from rollcall.cluster.state import ClusterError
from rollcall.cluster.virtual import VirtualCluster, init_ray
from rollcall.cluster.workers import WorkerBuilder, WorkerGroup
from rollcall.config import Config
from rollcall.data.load import PromptSet
from rollcall.engine.protocol import Finished, Request
from rollcall.learner.gang import balance
from rollcall.learner.learner import TokenScores
from rollcall.reward.scorer import Scorer
from rollcall.types import Completion, Floats, Prompt, Sample

POLL_S = 0.5  # the longest that one look at the engines takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """All processes of the run, and which of them hold each role (by rank)."""

    group: WorkerGroup
    members: dict[Role, list[int]]

    def call(self, workers: Sequence[int], method: str, *args: Any) -> list[Any]:
        return self.group.get_all_worker_results(self.group.run_some_workers_single_data(method, workers, *args))

    def call_role(self, role: Role, method: str, *args: Any) -> list[Any]:
        return self.call(self.members[role], method, *args)

    def spread(self, role: Role, method: str, samples: Sequence[Sample]) -> list[Any]:
        """One result per sample, computed by the role's processes, each on a fair share of the tokens."""
        workers = self.members[role]
        costs = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
        shares = balance([[index] for index in range(len(samples))], costs, size=len(workers))
        busy = [(worker, share) for worker, share in zip(workers, shares, strict=True) if share]
        futures = [
            self.group.run_single_worker_single_data(method, worker, [samples[index] for index in share])
            for worker, share in busy
        ]
        results: list[Any] = [None] * len(samples)
        for (_, share), part in zip(busy, self.group.get_all_worker_results(futures), strict=True):
            for index, value in zip(share, part, strict=True):
                results[index] = value
        return results


class RemoteEngine:
    """The engine of all rollout processes together: each request goes to whoever has least to do."""

    def __init__(self, team: Team) -> None:
        self.version = 0
        self.num_preemptions = 0
        self._team = team
        self._workers = team.members[Role.ROLLOUT]
        self._load: Counter[int] = Counter(dict.fromkeys(self._workers, 0))  # completions under way
        self._request: dict[str, tuple[int, int]] = {}  # where each is, and how many completions it has
        self._new: dict[int, list[Request]] = {worker: [] for worker in self._workers}
        self._aborted: dict[int, list[str]] = {worker: [] for worker in self._workers}
        self._calls: dict[int, Any] = {}  # the one call under way of each process that has something to do

    @property
    def num_unfinished(self) -> int:
        return len(self._request)

    def submit(self, request: Request) -> None:
        worker = min(self._workers, key=lambda worker: (self._load[worker], worker))
        self._load[worker] += len(request.seeds)
        self._request[request.id] = (worker, len(request.seeds))
        self._new[worker].append(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._request:
            self._aborted[self._request[request_id][0]].append(request_id)

    def poll(self) -> list[Finished]:
        group = self._team.group
        for worker in self._workers:
            if self._load[worker] and worker not in self._calls:
                requests, self._new[worker] = self._new[worker], []
                aborted, self._aborted[worker] = self._aborted[worker], []
                self._calls[worker] = group.run_single_worker_single_data("advance", worker, requests, aborted)
        if not self._calls:
            return []
        done = set(map(id, group.wait_for_some(list(self._calls.values()), timeout_s=POLL_S)))
        ready = [worker for worker, call in self._calls.items() if id(call) in done]
        finished: list[Finished] = []
        for progress in group.get_all_worker_results([self._calls.pop(worker) for worker in ready]) if ready else []:
            finished += progress.finished
            self.num_preemptions += progress.num_preemptions
        for item in finished:
            worker, count = self._request.pop(item.request_id)
            self._load[worker] -= count
        return finished

    def update_weights(self, version: int) -> None:
        """All processes that hold a policy take the actor's: those of the actor itself have it already."""
        members = self._team.members
        holders = sorted({*self._workers, *members.get(Role.INFERENCE, [])})
        sharing = [worker for worker in holders if worker in members[Role.ACTOR]]
        apart = [worker for worker in holders if worker not in members[Role.ACTOR]]
        group = self._team.group
        futures = group.run_some_workers_single_data("use_weights", sharing, version, None)
        if apart:
            # The weights themselves never come here: the future of one process is the argument of the others.
            weights = group.run_single_worker_single_data("weights", members[Role.ACTOR][0])
            futures += group.run_some_workers_single_data("use_weights", apart, version, weights)
        group.get_all_worker_results(futures)
        self.version = version


class RemoteLearner:
    def __init__(self, team: Team, config: Config) -> None:
        self.num_tokens_trained = 0
        self._team = team
        actor = config.actor
        self._rescores = actor.minibatches * actor.epochs > 1 and config.algorithm.old_logprobs == "learner"

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        if self._rescores:
            scores = self.score(samples)
            samples = [sample.with_(old_logprobs=row.logprobs) for sample, row in zip(samples, scores, strict=True)]
        results = self._team.call_role(Role.ACTOR, "update", list(samples))
        metrics, self.num_tokens_trained = results[0]
        return metrics

    def score(self, samples: Sequence[Sample]) -> list[TokenScores]:
        role = Role.INFERENCE if Role.INFERENCE in self._team.members else Role.ACTOR
        return self._team.spread(role, "score", samples)


class RemoteCritic:
    def __init__(self, team: Team) -> None:
        self._team = team

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return self._team.spread(Role.CRITIC, "values", samples)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self._team.call_role(Role.CRITIC, "update_critic", list(samples))[0]


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
    _preemptions_seen: int = 0

    def take_preemptions(self) -> int:
        new = self.engine.num_preemptions - self._preemptions_seen
        self._preemptions_seen += new
        return new

    def write_checkpoint(self, directory: Path) -> None:
        self._by_first(Role.ACTOR, "write_checkpoint", Role.ACTOR, directory.resolve())
        if self.critic:
            self._by_first(Role.CRITIC, "write_checkpoint", Role.CRITIC, directory.resolve())
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
        self._by_first(Role.ACTOR, "export", directory.resolve())

    def close(self) -> None:
        self.scorer.close()
        if self.eval_scorer is not self.scorer:
            self.eval_scorer.close()
        self.cluster.shutdown()

    def _by_first(self, role: Role, method: str, *args: Any) -> None:
        self.team.call(self.team.members[role][:1], method, *args)


def build_remote_workers(config: Config, *, say: Callable[[str], None]) -> RemoteWorkers:
    """Place the plan's processes on the cluster that this node belongs to, and load every role."""
    assert config.cluster is not None
    plan = plan_placement(config.cluster, needs=needs_of(config))
    _refuse_halves(plan)
    inputs = load_inputs(config, say=say)
    say(f"placing {sum(len(group.processes) for group in plan.groups)} processes on {plan.num_nodes} nodes")
    init_ray()
    cluster = VirtualCluster(
        list(plan.slots_per_node), num_gpus_per_node=max(plan.slots_per_node), name=config.run.name
    )
    try:
        team, facts = _place(config, plan, cluster, model_path=inputs.model_path)
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
        engine=RemoteEngine(team),
        learner=learner,
        critic=RemoteCritic(team) if Role.CRITIC in team.members else None,
        reference=partial(team.spread, Role.REFERENCE, "score_reference") if Role.REFERENCE in team.members else None,
        scorer=scorer,
        eval_scorer=build_eval_scorer(config, scorer),
        train=inputs.train,
        val=inputs.val,
        stop_token_ids=facts.stop_token_ids,
        max_positions=facts.max_positions,
        team=team,
        cluster=cluster,
    )


def _place(config: Config, plan: Plan, cluster: VirtualCluster, *, model_path: str) -> tuple[Team, Facts]:
    assert config.cluster is not None
    processes = sorted(
        (process for group in plan.groups for process in group.processes), key=lambda process: process.slots
    )
    starts = [sum(plan.slots_per_node[:rank]) for rank in range(plan.num_nodes)]
    section = config.cluster
    group = WorkerGroup(
        cluster=cluster,
        remote_worker_builder=WorkerBuilder("rollcall.cluster.role_worker.RoleWorker", config, model_path),
        name_prefix=config.run.name,
        seats=[
            Seat(node_rank=process.node_rank, slots=tuple(slot - starts[process.node_rank] for slot in process.slots))
            for process in processes
        ],
        node_env_vars={
            rank: worker_env(section, submitted=submitted_env(section), node_rank=rank)
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
    team = Team(group=group, members=members)
    meeting = {}
    for role in TRAINED:
        if role in members:
            first = members[role][0]
            (port,) = team.call([first], "lease_port")
            meeting[role] = (group.worker_metadata[first]["address"], port)
    sizes = {role: len(workers) for role, workers in members.items()}
    seatings = [Seating(ranks=dict(process.ranks), sizes=sizes, meeting=meeting) for process in processes]
    facts = group.get_all_worker_results(group.run_all_workers_multiple_data("build", seatings))
    return team, facts[0]


def _refuse_halves(plan: Plan) -> None:
    actor, critic = plan.processes.get(Role.ACTOR, ()), plan.processes.get(Role.CRITIC, ())
    shared = {process.slots for process in actor} & {process.slots for process in critic}
    if shared and (len(shared) != len(actor) or len(shared) != len(critic)):
        raise ClusterError(
            f"actor and critic share {len(shared)} of their {len(actor)} and {len(critic)} processes; give them the same "
            "slots, or none in common"
        )


def _reward(team: Team, index: int, prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
    """Asked of one reward process, each prompt of another."""
    workers = team.members[Role.REWARD]
    worker = workers[hash(prompt.id) % len(workers)]
    (scores,) = team.call([worker], "reward", index, prompt, completions)
    return scores
