"""Runs on workers of known duration, for what a run costs beyond its rollouts and updates.

The real controller, router, remote engine and learner handles drive stand-ins. ``team_of`` has them in threads of
this process, one call of each at a time, as their processes would do it; ``team_on_ray`` in processes on a Ray of this
machine alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.ours import Recorder
from benchmarks.standin_worker import Pace, StandIn
from rollcall.base.journal import Journal
from rollcall.base.types import Prompt
from rollcall.checkpoint.saving import Saving
from rollcall.checkpoint.store import Checkpoint, CheckpointStore
from rollcall.config import Config
from rollcall.loop.controller import Controller
from rollcall.loop.data.load import PromptSet
from rollcall.loop.record import Record
from rollcall.loop.workers import Workers
from rollcall.observe.console import Console
from rollcall.observe.events import Events
from rollcall.observe.progress import Progress
from rollcall.plan.placement import Role
from rollcall.reward.scorer import Scorer
from rollcall.run.engines import Engines
from rollcall.run.on_cluster import RemoteLearner
from rollcall.run.team import Team


class ThreadGroup:
    """What the remote handles call of a worker group, with the workers in threads of this process."""

    def __init__(self, workers: Sequence[StandIn], *, node_ranks: Sequence[int]) -> None:
        self.workers = list(workers)
        self.worker_metadata = [{"node_rank": rank, "address": "127.0.0.1"} for rank in node_ranks]
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in workers]

    def run_single_worker_single_data(self, method: str, worker: int, *args: Any) -> Future[Any]:
        return self._threads[worker].submit(getattr(self.workers[worker], method), *args)

    def run_some_workers_single_data(self, method: str, workers: Sequence[int], *args: Any) -> list[Future[Any]]:
        return [self.run_single_worker_single_data(method, worker, *args) for worker in workers]

    def wait_for_some(self, futures: Sequence[Future[Any]], *, timeout_s: float) -> list[Future[Any]]:
        return list(wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED).done)

    def get_all_worker_results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        return [future.result() for future in futures]

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)


def team_of(paces: Sequence[Pace], *, node_ranks: Sequence[int], actors: Sequence[int]) -> Team:
    """Stand-ins in threads: all but the actors have an engine, and the actors too where the policy is shared."""
    group: Any = ThreadGroup([StandIn(pace) for pace in paces], node_ranks=node_ranks)
    return Team(group=group, members=_members(paces, actors))


def team_on_ray(paces: Sequence[Pace], *, actors: Sequence[int]) -> Team:
    """Stand-ins in processes; the Ray they are on ends with ``stop``."""
    from rollcall.cluster import VirtualCluster, WorkerBuilder, WorkerGroup, init_ray

    init_ray(num_gpus=len(paces))
    cluster = VirtualCluster([len(paces)], num_gpus_per_node=len(paces))
    builder = WorkerBuilder("benchmarks.standin_worker.StandIn", Pace())
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    group = WorkerGroup(cluster=cluster, remote_worker_builder=builder, name_prefix="standin", env_vars=env)
    group.get_all_worker_results(
        [group.run_single_worker_single_data("set_pace", worker, pace) for worker, pace in enumerate(paces)]
    )
    return Team(group=group, members=_members(paces, actors))


def stop(team: Team) -> None:
    if isinstance(team.group, ThreadGroup):
        team.group.shutdown()
        return
    import ray

    team.group.cluster.shutdown()
    ray.shutdown()


def _members(paces: Sequence[Pace], actors: Sequence[int]) -> dict[Role, list[int]]:
    rollouts = [worker for worker, pace in enumerate(paces) if worker not in actors or pace.shares_policy]
    return {Role.ROLLOUT: rollouts, Role.ACTOR: list(actors)}


def make_workers(config: Config, team: Team, *, prompts: int, room: int, prompt_tokens: int = 64) -> Workers:
    """``room`` is in completions, as ``rollout.max_running``."""
    weights = config.cluster.node_weights if config.cluster else None
    actors = team.members[Role.ACTOR]
    owned = ExitStack()
    scorer = owned.enter_context(Scorer(config.reward, num_workers=2, model_rewards={}))
    return Workers(
        tokenizer=None,
        engine=Engines(team, room=room, node_weights=weights),
        learner=RemoteLearner(team, rescores=config.algorithm.rescores(config.actor)),
        scorer=scorer,
        eval_scorer=scorer,
        train=PromptSet(
            prompts=[_prompt(index, prompt_tokens) for index in range(prompts)], num_overlong=0, source="stand-ins"
        ),
        stop_token_ids=(),
        max_positions=1 << 20,
        shares_policy=not set(team.members[Role.ROLLOUT]).isdisjoint(actors),
        saving=Saving(call=team.call, processes=actors[:1], place="shared", run_name="stand-ins"),
        export=lambda directory: None,
        owned=owned,
        is_remote=True,
    )


def _prompt(index: int, num_tokens: int) -> Prompt:
    text = hashlib.blake2b(str(index).encode(), digest_size=4).hexdigest()
    return Prompt(id=str(index), token_ids=np.full(num_tokens, 5, dtype=np.int32), text=text, answer=text, metadata={})


@contextmanager
def controller_of(
    config: Config, workers: Workers, *, resume: Checkpoint | None = None
) -> Iterator[tuple[Controller, Recorder]]:
    recorder = Recorder()
    run_dir = config.run.dir
    run_dir.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(run_dir / "checkpoints", keep_last=1, keep_best=0)
    console = Console(Progress(name=config.run.name, num_steps=config.trainer.steps))
    with Journal(run_dir / "journal") as journal, closing(Events(run_dir)) as events:
        yield (
            Controller(
                config,
                workers,
                journal=journal,
                record=Record(
                    run_dir,
                    config.trainer,
                    workers,
                    threshold=config.eval.threshold,
                    store=store,
                    sinks=[recorder],
                    console=console,
                ),
                console=console,
                resume=store.latest() if resume is None else resume,
                events=events,
            ),
            recorder,
        )


def run_steps(config: Config, workers: Workers) -> Recorder:
    """The training loop to its end, from where the run directory stands."""
    with controller_of(config, workers) as (controller, recorder):
        try:
            asyncio.run(controller.run())
        finally:
            workers.close()
    return recorder
