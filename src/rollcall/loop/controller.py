"""The training loop.

      prompts            groups                samples              micro-batches
 data ───────▶ generate ────────▶ journal ──┐
                 ▲      + rewards (on disk) │  buffer
                 │                          ▼
                 │                        train: advantages ▶ pack ▶ update ▶ new version
                 └───────────────── weights ────────────────────────────────────┘

Two coroutines share one buffer (``loop/supply.py``). ``Supply.run`` starts rollouts as far ahead as ``trainer.staleness``
allows. Groups that are already in the journal are read from it, and the engine generates all others (``loop/group_maker.py``).
``_train`` waits for a step's groups, updates, and announces the new version. With staleness 0 the two coroutines take turns.

If all roles are in this process, long calls (update, new weights) block the loop. On a cluster they run in a thread, so that rollout
continues. To save a checkpoint, the loop only waits until the state has been copied; the copy is written while the run trains
(``record.Saves``). With ``trainer.in_flight``, engines take new weights in the middle of completions. Without it, the controller first
waits until they have finished all requests (``Engine.pause``). In both cases, once an update has changed an engine's parameters, the
engine does not decode until ``serve`` is called.

Step n is the n-th update. Its groups are sampled from version n - 1 (or up to ``staleness`` versions older), and it produces version n.
After a crash, the same code runs again from the last checkpoint. Replayed steps take their groups from the journal, so they train on the
same groups as before. ``loop/record.py`` writes the run's files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import Any, TypeVar

from rollcall.base.journal import Journal
from rollcall.base.lease import Lease
from rollcall.base.stop import Stop
from rollcall.base.wait import say
from rollcall.base.words import counted
from rollcall.checkpoint.store import Checkpoint
from rollcall.config import Config
from rollcall.loop.attempts import Regrow, RunError
from rollcall.loop.evaluate import evaluate
from rollcall.loop.group_maker import GroupMaker, sampling_of
from rollcall.loop.phases import Bounds, Split, is_due, steps_ahead
from rollcall.loop.record import Record, Update
from rollcall.loop.rollout import Rewards, Rollouts, player_of
from rollcall.loop.samples import make_samples
from rollcall.loop.supply import AsCompleted, Cursor, Demand, InOrder, NothingLeftError, StepBatch, Supply
from rollcall.loop.tasks import every, in_thread, together
from rollcall.loop.workers import Workers
from rollcall.observe.calls import BusySpans
from rollcall.observe.console import Console
from rollcall.observe.events import Events, StepPhase
from rollcall.observe.samples import sample_rows

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Controller:
    config: Config
    workers: Workers
    _: KW_ONLY
    journal: Journal
    record: Record
    console: Console
    resume: InitVar[Checkpoint | None]
    events: Events
    bounds: Bounds = Bounds()
    lease: Lease | None = None
    stop: Stop = field(default_factory=Stop)
    rewards: BusySpans | None = None

    def __post_init__(self, resume: Checkpoint | None) -> None:
        self.start_step = resume.step if resume else 0
        state: dict[str, Any] = resume.state if resume else {"next_draw": 0}
        self.cursor = Cursor.of(state, where=str(resume.path if resume else self.config.run.dir))
        trainer = self.config.trainer
        last = trainer.steps  # the last step for which this command needs groups
        if not self.bounds.trains:
            last = min(last, self.start_step + steps_ahead(trainer.staleness, order=trainer.order))
        self.steps_ahead = range(self.start_step + 1, last + 1)
        self.version = self.start_step
        self._policy = asyncio.Lock()  # held while the actor's weights differ from ``version``
        self._said_no_signal = False
        self._owes_evaluation = bool(state.get("owes_evaluation"))

    async def run(self) -> None:
        """Train from the resumed step to the last one, and write the trained model to ``run_dir/model``."""
        workers = self.workers
        config = self.config
        self.rollouts = Rollouts(
            engine=workers.engine,
            rewards=Rewards(is_remote=workers.is_remote, spans=self.rewards),
            player=player_of(config, workers.environments, tokenizer=workers.tokenizer, scorer=workers.scorer),
        )
        self.maker = GroupMaker(
            config, workers, bounds=self.bounds, journal=self.journal, rollouts=self.rollouts, call=self._call
        )
        self.supply = self._make_supply()
        with self.events.phase(StepPhase.SYNC, self.version):
            await workers.engine.serve(self.version)
        background = [self.maker.open_groups.run(), every(0.5, partial(self._call, self.record.saves.poll))]
        if workers.is_remote:
            # Flush the journal during the rollout, so that a step does not have to wait for all of it.
            background.append(every(1.0, partial(in_thread, self.journal.sync)))
        if workers.admit is not None:
            background.append(every(0.5, partial(self._admit, workers.admit)))
        if self.lease is not None:  # the run ends if another controller takes over the run directory
            background.append(every(1.0, partial(self._call, self.lease.check)))
        try:
            await together(self._run(), background=background)
        finally:
            await workers.aclose()

    async def _run(self) -> None:
        if self.bounds.split is Split.EVAL:
            await self._evaluate(self.start_step, title="of the newest checkpoint")
            return
        if self.start_step == 0 and self.bounds.trains:
            await self._evaluate(0, title="before training")
        elif self._owes_evaluation and self.bounds.trains:
            await self._evaluate(self.start_step, title="after training")
            await self._call(self.record.add_scores, self.start_step)
        await together(self._train() if self.bounds.trains else self._fill(), background=[self.supply.run()])
        if self.bounds.trains and self.version == self.config.trainer.steps:
            with self.events.phase(StepPhase.EXPORT, self.version):
                await self._call(partial(self.record.export, step=self.version))

    async def _fill(self) -> None:
        """Generate and journal the groups of all steps that may be sampled from the current weights, without training on them."""
        for step in self.steps_ahead:
            await self._batch(step)

    async def _train(self) -> None:
        started = time.perf_counter()
        for step in self.steps_ahead:
            batch = await self._batch(step)
            if batch is None:
                break
            if self.workers.shares_policy:
                with self.events.phase(StepPhase.ENGINE_RELEASE, step):
                    await self._pause()
            stats, reward_s = self.workers.engine.take_stats(), self.rollouts.rewards.take_seconds()
            # The unsaved steps would be lost if this update did not finish in time.
            if self.stop.asked and self.record.unsaved and self.record.update_s > self.stop.left_s:
                self.stop.check()
            async with self._policy:
                # The steps since the last checkpoint would be lost if this update stopped half-way.
                shield = self.stop.shielded() if self.record.unsaved else nullcontext()
                self.record.begin_update()
                with self.events.phase(StepPhase.UPDATE, step), shield:
                    update = await self._call(self._update, batch)
                    draws = [group.draw for group in batch.groups]
                    await self._call(partial(self.journal.mark_trained, step, draws=draws, version=step))
                    self.record.note_update(batch, update, stats=stats, reward_s=reward_s, started=started)
                await self._announce(step)
            started = time.perf_counter()
            await self._call(self.record.log_step)
            self.stop.check()
            with self.events.phase(StepPhase.EVALUATION_DECISION, step) as outcome:
                evaluates = self.workers.val is not None and self._is_due(step, every=self.config.trainer.eval_every)
                outcome.result = "due" if evaluates else "not due"
            if evaluates:
                await self._evaluate(step, title="after training")
                started = time.perf_counter()
            if self._is_due(step, every=self.config.trainer.save_every):
                await self._save(batch)
                started = time.perf_counter()
                if step < self.config.trainer.steps and (news := self.workers.regrow()):
                    await self._call(self.record.saves.settle)
                    raise Regrow(news)
        if self.steps_ahead and self.version == self.start_step:
            raise RunError(
                f"the journal of {self.config.run.dir} has no complete step after step {self.start_step}, so there is nothing to "
                "train on; generate groups with --phase rollout, or use --phase both"
            )
        if self.record.unsaved is not None:  # the journal contained no more steps
            await self._save(self.record.unsaved)
        await self._call(self.record.saves.settle)

    def save_unsaved(self) -> None:
        """Save the newest step after ``run`` was stopped, if it is not saved yet."""
        failed = self.record.saves.forget_failed()  # the disk may be fine again
        if (batch := self.record.newest if failed else self.record.unsaved) is not None:
            self.record.log_step()
            with self.events.phase(StepPhase.CHECKPOINT, batch.step):
                self.record.save(batch)
        self.record.saves.settle()

    async def _batch(self, step: int) -> StepBatch | None:
        """Return the step's groups once all are on disk. None if this command only trains and the journal lacks them."""
        with self.events.phase(StepPhase.ROLLOUT, step) as outcome:
            try:
                batch = await self.supply.batch(step)
            except NothingLeftError:
                outcome.result = "not in the journal"
                return None
            if batch.num_from_journal < len(batch.groups):
                outcome.waited_for = max(batch.groups, key=lambda group: group.finished_s).worker
            outcome.result = f"{counted(len(batch.groups), 'group')}, {batch.num_from_journal} from the journal"
        with self.events.phase(StepPhase.AGGREGATE, step):
            await self._call(self.journal.sync)
        self.maker.refuse_unscored(batch)
        return batch

    def _update(self, batch: StepBatch) -> Update:
        """Compute advantages, then update the policy (and the critic)."""
        workers = self.workers
        started = time.perf_counter()
        samples = make_samples(
            batch.groups,
            algorithm=self.config.algorithm,
            max_response_tokens=self.config.rollout.max_response_tokens,
            reference=workers.reference,
            values=workers.critic.values if workers.critic else None,
            environment=self.config.environment,
            environment_weight=sum(reward.weight for reward in self.config.reward if reward.type == "environment"),
        )
        if self._is_due(batch.step, every=self.config.trainer.save_every):
            self.record.write_token_scores(batch)
        scored = time.perf_counter()
        trained_before = workers.learner.num_tokens_trained
        metrics = {"skipped_fraction": 1.0}
        if not any(sample.mask.any() for sample in samples):
            say(
                f"step {batch.step} has nothing to train on: all rewards returned None, or all episodes were truncated, timed out or "
                "failed, and the settings environment.truncated, timed_out and failed exclude these (see the metrics under episode/). "
                "Weights, momentum and schedule do not change"
            )
        else:
            with self.record.explaining_divergence(batch.step, lost="this update was not applied"):
                critic = workers.critic.update(samples) if workers.critic else {}
                metrics = {**workers.learner.update(samples), **critic}
            if metrics.get("skipped_fraction") == 1 and not self._said_no_signal:
                self._said_no_signal = True
                say(
                    f"step {batch.step}: all advantages are zero, so weights, momentum and schedule do not change; "
                    "train/skipped_fraction shows this for each step"
                )
        return Update(
            samples=samples,
            metrics=metrics,
            num_tokens=workers.learner.num_tokens_trained - trained_before,
            score_s=scored - started,
            update_s=time.perf_counter() - scored,
        )

    async def _announce(self, version: int) -> None:
        """Send the new weights to the engine, and let the rollouts that waited for this version start."""
        is_last = version == self.config.trainer.steps
        with self.events.phase(StepPhase.FINAL_SYNC if is_last else StepPhase.SYNC, version):
            await self._pause()
            await self.workers.engine.serve(version)
        with self.events.phase(StepPhase.ENGINE_RESTORE, version):
            self.version = version
            await self.supply.announce(version)

    async def _pause(self) -> None:
        """Stop decoding until ``serve``. Running completions finish first, unless ``trainer.in_flight`` is set."""
        await self.workers.engine.pause(drain=not self.config.trainer.in_flight)

    async def _evaluate(self, step: int, *, title: str) -> None:
        val = self.workers.val
        if val is None:
            return
        started = time.perf_counter()
        section = self.config.eval
        with self.events.phase(StepPhase.EVALUATION, step):
            result = await evaluate(
                val.prompts[: section.max_prompts],
                section=section,
                make_group=self.rollouts.group,
                scorer=self.workers.eval_scorer,
                sampling=sampling_of(self.config.rollout, self.workers.stop_token_ids, temperature=section.temperature),
                seed=self.config.run.seed,
                step=step,
            )
            await self._call(partial(self.record.log_evaluation, step, result, seconds=time.perf_counter() - started))
        if step in (0, self.config.trainer.steps):
            self.console.show_samples(f"answers {title}", sample_rows(result.groups, limit=6))
        # Reset the counters, so that the next step's metrics do not include the evaluation.
        self.workers.engine.take_stats()
        self.rollouts.rewards.take_seconds()

    async def _save(self, batch: StepBatch) -> None:
        saving = time.perf_counter()
        with self.events.phase(StepPhase.CHECKPOINT, batch.step), self.stop.shielded():
            await self._call(self.record.save, batch)
        await self._call(self.record.log, batch.step, {"time/save_s": time.perf_counter() - saving})

    def _is_due(self, step: int, *, every: int) -> bool:
        return is_due(step, every=every, last=self.config.trainer.steps)

    def _make_supply(self) -> Supply:
        trainer, algorithm = self.config.trainer, self.config.algorithm
        demand = Demand(
            start_step=self.start_step,
            steps=max(self.steps_ahead, default=self.start_step),
            wanted=self.config.data.prompts_per_step,
            staleness=trainer.staleness,
            max_refills=algorithm.max_refills if algorithm.dynamic_sampling else None,
            make=self.maker.make,
            has_signal=self.maker.has_signal,
        )
        if trainer.order == "in_order":
            return InOrder(demand, cursor=self.cursor)
        return AsCompleted(demand, cursor=self.cursor, recorded=self.maker.trained)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Make a long call: in a thread if it only waits for other processes, otherwise in the current thread."""
        return await in_thread(function, *args) if self.workers.is_remote else function(*args)

    async def _admit(self, admit: Callable[[], Awaitable[None]]) -> None:
        """Let new rollout processes serve. Waits for a running update first, so that they get the current version of the weights."""
        async with self._policy:
            await admit()
