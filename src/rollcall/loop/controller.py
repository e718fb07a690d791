"""The loop.

      prompts            groups                samples              micro-batches
 data ───────▶ generate ────────▶ journal ──┐
                 ▲      + rewards (on disk) │  buffer
                 │                          ▼
                 │                        train: advantages ▶ pack ▶ update ▶ new version
                 └───────────────── weights ────────────────────────────────────┘

Two coroutines over one buffer (``loop/supply.py``). ``Supply.run`` starts rollouts as far ahead as ``trainer.staleness``
allows, from the journal what is there, from the engine the rest; ``_train`` waits for a step's groups, updates, and
announces the new version. With staleness 0 they alternate. A third, ``Rollouts.pump``, drives engine and rewards while
anyone waits for them.

Long calls (update, new weights, checkpoint) run here when all roles are in this process. On a cluster they run in a
thread beside the loop, so rollout goes on meanwhile. With ``trainer.in_flight`` engines take new weights in the middle of
completions; without it the controller first waits until they have finished what they have, and gives them nothing new.

Step n is the n-th update: its groups are sampled from version n - 1 (or up to ``staleness`` older), its update makes
version n. After a crash the same code runs again from the last checkpoint: groups that are in the journal are taken
from there, so replayed steps train on what they trained on before.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollcall.checkpoint.store import Checkpoint, CheckpointStore
from rollcall.config import Config
from rollcall.data.order import DataOrder
from rollcall.durable.journal import Journal
from rollcall.durable.lease import Lease
from rollcall.durable.patience import persist
from rollcall.engine.protocol import Sampling
from rollcall.errors import CheckpointError, JournalError, NonFiniteError
from rollcall.loop.aside import in_thread
from rollcall.loop.attempts import Regrow, causes
from rollcall.loop.evaluate import evaluate
from rollcall.loop.phases import Bounds, Split
from rollcall.loop.protocols import Workers
from rollcall.loop.rollout import Clock, Rollouts, sampling_seeds
from rollcall.loop.samples import has_signal, make_samples
from rollcall.loop.step_metrics import batch_metrics
from rollcall.loop.supply import AsCompleted, Cursor, InOrder, Made, Needs, NothingLeftError, StepBatch, Supply
from rollcall.observe.console import Console
from rollcall.observe.events import Events, StepPhase
from rollcall.observe.headline import ACCURACY, REWARD, headline_of
from rollcall.observe.sinks import Sink, read_rows
from rollcall.observe.summary import peak_memory_gib, sample_rows, write_samples
from rollcall.reward.scorer import why_unscored
from rollcall.stop import Stop
from rollcall.types import Group, Prompt, Sample, failed_on_all
from rollcall.words import counted

T = TypeVar("T")
FLUSH_EVERY_S = 1.0
REPAIR_EVERY_S = 0.5
LEASE_LOOK_S = 1.0


class RunError(RuntimeError):
    """The run cannot go on; what is on disk is whole, and the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    samples: list[Sample]
    metrics: dict[str, float]
    num_tokens: int
    score_s: float
    update_s: float


class Controller:
    def __init__(
        self,
        config: Config,
        workers: Workers,
        *,
        run_dir: Path,
        journal: Journal,
        store: CheckpointStore,
        sinks: list[Sink],
        console: Console,
        resume: Checkpoint | None,
        events: Events,
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
        lease: Lease | None = None,
        stop: Stop | None = None,
    ):
        self.config = config
        self.workers = workers
        self.run_dir = run_dir
        self.journal = journal
        self.store = store
        self.sinks = sinks
        self.console = console
        self.events = events
        self.bounds = bounds
        self.lease = lease
        self.stop = stop or Stop()
        self.order = DataOrder(len(workers.train.prompts), seed=config.run.seed, shuffle=config.data.shuffle)
        self.start_step = resume.step if resume else 0
        state: dict[str, Any] = resume.state if resume else {"next_draw": 0}
        self.cursor = Cursor.of(state, where=str(resume.path if resume else run_dir))
        self.steps_ahead = range(self.start_step + 1, bounds.last_step(config.trainer, start_step=self.start_step) + 1)
        self.version = self.start_step
        self.data_mark = _fingerprint(workers.train.prompts)
        if resume and resume.state.get("data", self.data_mark) != self.data_mark:
            raise JournalError(
                f"{workers.train.source} is not what this run was started with (rows, answers or tokenizer differ), so the "
                f"data order of step {resume.step} is lost; restore it, or start over with --fresh"
            )
        self.rollouts: Rollouts
        self.supply: Supply
        self._policy = asyncio.Lock()  # held while the actor's weights are not those of ``version``
        self._journaled: dict[int, dict[int, Group]] = {}  # step -> draw -> what an earlier process made
        self._trained = {step: entry.draws for step, entry in journal.trained().items()}  # by earlier processes
        self._said_no_signal = False
        self._owes_evaluation = bool(state.get("owes_evaluation"))
        self._evaluated_step = -1
        self._scores: dict[str, float] = {}  # of that step, by what may rank checkpoints
        self._unsaved: StepBatch | None = None  # trained since the newest checkpoint
        self._row: Callable[[], dict[str, float]] | None = None  # of a step that is trained and not logged
        self._update_s = 0.0  # of the last step
        self._unscored: set[int] = set()  # steps of which it could score nothing

    async def run(self) -> None:
        """From the resumed step to the last; the trained model is then in ``run_dir/model``."""
        self.rollouts = Rollouts(self.workers.engine)
        self.supply = self._make_supply()
        with self.events.phase(StepPhase.SYNC, self.version):
            await self._call(self.workers.engine.update_weights, self.version)
        beside = [self.rollouts.pump(), self._flush(), self._repair(), self._keep_lease()]
        await _together(self._run(), background=beside)

    async def _run(self) -> None:
        if self.bounds.split is Split.EVAL:
            await self._evaluate(self.start_step, title="of the newest checkpoint")
            return
        if self.start_step == 0 and self.bounds.trains:
            await self._evaluate(0, title="before training")
        elif self._owes_evaluation and self.bounds.trains:
            await self._evaluate(self.start_step, title="after training")
            await self._call(partial(self.store.add_scores, self.start_step, **self._ranking(self.start_step)))
        await _together(self._train() if self.bounds.trains else self._fill(), background=[self.supply.run()])
        if self.bounds.trains and self.version == self.config.trainer.steps:
            with self.events.phase(StepPhase.EXPORT, self.version):
                await self._call(self._export)

    async def _fill(self) -> None:
        """Rollout alone: the groups of all steps that may be sampled from these weights, into the journal."""
        for step in self.steps_ahead:
            await self._batch(step)

    async def _train(self) -> None:
        started, saved = time.perf_counter(), True
        batch: StepBatch | None = None
        for step in self.steps_ahead:
            next_batch = await self._batch(step)
            if next_batch is None:
                break
            batch, saved = next_batch, False
            if self.workers.shares_policy:
                with self.events.phase(StepPhase.ENGINE_RELEASE, step):
                    await self._settle()
            clock = self.rollouts.clock.take()
            self._leave_if_too_late()
            async with self._policy:
                # An update that is left half done takes the steps with it that no checkpoint has.
                with (
                    self.events.phase(StepPhase.UPDATE, step),
                    self.stop.shielded() if self._unsaved else nullcontext(),
                ):
                    update = await self._call(self._update, batch)
                    draws = [group.draw for group in batch.groups]
                    await self._call(partial(self.journal.mark_trained, step, draws=draws, version=step))
                    self._note_update(batch, update, clock, started=started)
                await self._announce(step)
            started = time.perf_counter()
            await self._call(self._log_step)
            self.stop.check()
            if self._decide_evaluation(step):
                await self._evaluate(step, title="after training")
                started = time.perf_counter()
            if self._is_due(step, "save_every"):
                await self._save(step, batch)
                started, saved = time.perf_counter(), True
                if self.workers.repairs and (news := self.workers.repairs.regrow) and step < self.config.trainer.steps:
                    raise Regrow(news)
        if batch is None and self.steps_ahead:
            raise RunError(
                f"the journal of {self.run_dir} has no complete step after step {self.start_step}, so there is nothing to "
                "update with; fill it with --phase rollout, or run --phase both"
            )
        if batch is not None and not saved:  # the journal ended here
            await self._save(batch.step, batch)

    def save_unsaved(self) -> None:
        """After ``run`` was stopped: a checkpoint of the newest step, unless there is one."""
        if (batch := self._unsaved) is not None:
            self._log_step()
            with self.events.phase(StepPhase.CHECKPOINT, batch.step):
                self._write_checkpoint(batch.step, batch)

    def _leave_if_too_late(self) -> None:
        """Told to stop, do not begin an update that may not end in time: what it would lose is more than it would gain."""
        if self.stop.asked and self._unsaved and self._update_s > self.stop.left_s:
            self.stop.check()

    async def _batch(self, step: int) -> StepBatch | None:
        """The step's groups, on the disk; None if this command only trains and the journal does not have them."""
        with self.events.phase(StepPhase.ROLLOUT, step) as outcome:
            try:
                batch = await self.supply.batch(step)
            except NothingLeftError:
                outcome.result = "not in the journal"
                return None
            outcome.waited_for = _last_worker(batch)
            outcome.result = f"{counted(len(batch.groups), 'group')}, {batch.num_from_journal} from the journal"
        with self.events.phase(StepPhase.AGGREGATE, step):
            await self._call(self.journal.sync)
        self._refuse_unscored(batch)
        return batch

    def _refuse_unscored(self, batch: StepBatch) -> None:
        """A reward that scores nothing teaches nothing: better to stop than to train on its zeros until the last step."""
        failed = failed_on_all(batch.groups)
        if failed and not self._is_trained(batch.groups[0].draw):
            raise RunError(
                f"step {batch.step}: {why_unscored(batch.groups, reward=min(failed), scorer=self.workers.scorer)}\n"
                "Nothing was trained on them. Put the reward right (`rollcall reward test RUN.yaml` tries it), then run the same "
                "command again (leave out --fresh): the completions are kept and scored again"
            )

    async def _score_again(self, group: Group) -> Group:
        """A group of a step whose rewards failed, which ended an earlier process."""
        scores = await self.rollouts.score(group.prompt, group.completions, scorer=self.workers.scorer)
        group = replace(group, scores=scores)
        await self._call(partial(self.journal.append, group, again=True))
        return group

    def _is_trained(self, draw: int) -> bool:
        return any(draw in draws for draws in self._trained.values())

    async def _keep_lease(self) -> None:
        """Ends the run when another controller has taken the run directory over."""
        while self.lease is not None:
            self.lease.check()
            await asyncio.sleep(LEASE_LOOK_S)

    async def _flush(self) -> None:
        """Beside a cluster's rollout, write to the disk what was journaled, so that a step need not wait for all of it."""
        while self.workers.is_remote:
            await asyncio.sleep(FLUSH_EVERY_S)
            await in_thread(self.journal.sync)

    async def _repair(self) -> None:
        """Let rollout processes that replace lost ones serve, as soon as the actor holds the weights that are due."""
        while self.workers.repairs is not None:
            await asyncio.sleep(REPAIR_EVERY_S)
            if self.workers.repairs.is_due:
                async with self._policy:
                    await self._call(self.workers.repairs.admit, self.version)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """A call that takes long: here and now, or beside the loop where it only waits for other processes."""
        return await in_thread(function, *args) if self.workers.is_remote else function(*args)

    async def _settle(self) -> None:
        """Unless completions may go on with new weights, let those under way end."""
        if not self.config.trainer.in_flight:
            await self.rollouts.drain()

    async def _announce(self, version: int) -> None:
        """The engine takes the new weights, and whoever waits for this version may go on."""
        is_last = version == self.config.trainer.steps
        with self.events.phase(StepPhase.FINAL_SYNC if is_last else StepPhase.SYNC, version):
            await self._settle()
            await self._call(self.workers.engine.update_weights, version)
        with self.events.phase(StepPhase.ENGINE_RESTORE, version):
            self.version = version
            self.rollouts.go_on()
            await self.supply.announce(version)

    def _make_supply(self) -> Supply:
        trainer, algorithm = self.config.trainer, self.config.algorithm
        needs = Needs(
            start_step=self.start_step,
            steps=max(self.steps_ahead, default=self.start_step),
            wanted=self.config.data.prompts_per_step,
            staleness=trainer.staleness,
            max_refills=algorithm.max_refills if algorithm.dynamic_sampling else None,
            make=self._group,
            has_signal=self._has_signal,
        )
        if trainer.order == "in_order":
            return InOrder(needs, cursor=self.cursor)
        return AsCompleted(needs, cursor=self.cursor, recorded=self._trained)

    def _take_journaled(self, step: int, draw: int) -> Group | None:
        """What an earlier process made of this draw. A step's file is read before this process adds to it."""
        if step not in self._journaled:
            groups = self.journal.read(step)
            self._journaled[step] = {group.draw: group for group in groups}
            if failed_on_all(groups):
                self._unscored.add(step)
        return self._journaled[step].pop(draw, None)

    async def _group(self, step: int, draw: int) -> Made:
        prompt = self.workers.train.prompts[self.order.index(draw)]
        found = self._take_journaled(step, draw)
        if found is not None:
            before = found.prompt
            if before.id != prompt.id or not np.array_equal(before.token_ids, prompt.token_ids):
                raise JournalError(
                    f"the journal has another prompt {before.id!r} for draw {draw} of step {step} than the {prompt.id!r} that "
                    "the data now gives: the data changed under the run; restore it, or start over with --fresh"
                )
            if step in self._unscored and not self._is_trained(draw):
                found = await self._score_again(found)
            return Made(group=found, journaled=True)
        if not self.bounds.generates:
            raise NothingLeftError
        rollout = self.config.rollout
        # The draw tells a prompt's second visit in one step (small data, refills) from its first.
        seeds = sampling_seeds(self.config.run.seed, step, f"{prompt.id}#{draw}", rollout.samples_per_prompt)
        attempt = await self.rollouts.attempt(
            prompt, seeds=seeds, sampling=self._sampling(), scorer=self.workers.scorer
        )
        if not all(np.isfinite(completion.logprobs).all() for completion in attempt.completions):
            raise RunError(
                f"step {step}: the policy's log-probs for prompt {prompt.id!r} are not finite, so its weights have diverged; "
                f"nothing of this was journaled. Lower actor.lr or set actor.grad_clip, and go on from an older checkpoint by "
                f"removing the newest in {self.store.dir}, or start over with --fresh"
            )
        group = Group(
            step=step,
            draw=draw,
            prompt=prompt,
            completions=attempt.completions,
            scores=attempt.scores,
            started_s=attempt.started_s,
            finished_s=attempt.finished_s,
            worker=attempt.worker,
        )
        await self._call(self.journal.append, group)
        return Made(group=group, journaled=False)

    def _update(self, batch: StepBatch) -> _Update:
        """Advantages and the policy's (and critic's) updates."""
        workers, algorithm = self.workers, self.config.algorithm
        started = time.perf_counter()
        samples = make_samples(
            batch.groups,
            algorithm=algorithm,
            max_response_tokens=self.config.rollout.max_response_tokens,
            reference=workers.reference,
            values=workers.critic.values if workers.critic else None,
        )
        scored = time.perf_counter()
        trained_before = workers.learner.num_tokens_trained
        try:
            critic = workers.critic.update(samples) if workers.critic else {}
            learner = workers.learner.update(samples)
        except Exception as error:
            self._tell_divergence(error, step=batch.step, lost="this update was not applied")
            raise
        if learner.get("skipped_fraction") == 1 and not self._said_no_signal:
            self._said_no_signal = True
            self.console.note(
                f"step {batch.step}: all advantages are zero, so weights, momentum and schedule stay as they are; "
                "train/skipped_fraction says so of each step"
            )
        return _Update(
            samples=samples,
            metrics={**learner, **critic},
            num_tokens=workers.learner.num_tokens_trained - trained_before,
            score_s=scored - started,
            update_s=time.perf_counter() - scored,
        )

    def _note_update(self, batch: StepBatch, update: _Update, clock: Clock, *, started: float) -> None:
        """From here on the step is trained, whatever happens next."""
        self._unsaved, self._update_s = batch, update.score_s + update.update_s
        updated = time.perf_counter()

        def row() -> dict[str, float]:
            now = time.perf_counter()
            return self._metrics(batch, update, clock) | {"time/sync_s": now - updated, "time/step_s": now - started}

        self._row = row

    def _log_step(self) -> None:
        if self._row is not None and self._unsaved is not None:
            self._log(self._unsaved.step, self._row())
            self._row = None

    def _metrics(self, batch: StepBatch, update: _Update, clock: Clock) -> dict[str, float]:
        """What the step's row says; put together while the next rollout is under way."""
        metrics = batch_metrics(
            batch,
            update.samples,
            clock=clock,
            threshold=self.config.eval.threshold,
            first_reward=self.workers.scorer.names[0],
        )
        metrics |= {f"train/{name}": value for name, value in update.metrics.items()}
        metrics["rollout/logprob_mismatch"] = metrics.pop("train/mismatch")
        metrics["rollout/logprob_mismatch_max"] = metrics.pop("train/mismatch_max")
        return metrics | {
            "rollout/preemptions": float(self.workers.take_preemptions()),
            "train/tokens": float(update.num_tokens),
            "time/score_s": update.score_s,
            "time/update_s": update.update_s,
            "perf/train_tokens_per_s": update.num_tokens / (update.score_s + update.update_s),
            "perf/peak_memory_gib": peak_memory_gib(),
        }

    def _decide_evaluation(self, step: int) -> bool:
        with self.events.phase(StepPhase.EVALUATION_DECISION, step) as outcome:
            due = self.workers.val is not None and self._is_due(step, "eval_every")
            outcome.result = "due" if due else "not due"
        return due

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
                rollouts=self.rollouts,
                scorer=self.workers.eval_scorer,
                sampling=self._sampling(temperature=section.temperature),
                seed=self.config.run.seed,
                step=step,
            )
            seconds = time.perf_counter() - started
            await self._call(self._log, step, {**result.metrics(), "time/eval_s": seconds})
            await self._call(self._write_samples, step, "val", result.groups[:64])
        if step in (0, self.config.trainer.steps):
            self.console.show_samples(f"answers {title}", sample_rows(result.groups, limit=6))
        self.rollouts.clock.take()  # the next step's numbers are its own
        self._evaluated_step = step
        self._scores = {one.metric: result.metrics()[one.metric] for one in (ACCURACY, REWARD)}

    def _write_samples(self, step: int, split: str, groups: Sequence[Group]) -> None:
        directory = self.run_dir / "samples"
        write = partial(write_samples, directory, step=step, split=split, groups=groups)
        persist(write, path=directory, what=f"the {split} samples of step {step}")

    async def _save(self, step: int, batch: StepBatch) -> None:
        saving = time.perf_counter()
        with self.events.phase(StepPhase.CHECKPOINT, step), self.stop.shielded():
            await self._call(self._write_checkpoint, step, batch)
        await self._call(self._log, step, {"time/save_s": time.perf_counter() - saving})

    def _write_checkpoint(self, step: int, batch: StepBatch) -> None:
        self._write_samples(step, "train", batch.groups[:8])  # first: what a kill leaves half done is then done again
        cursor = {"next_draw": batch.cursor.next_draw, "pending": list(batch.cursor.pending)}
        ranking = self._ranking(step)
        owed = self.workers.val is not None and self._is_due(step, "eval_every") and self._evaluated_step < step
        try:
            self.store.save(
                step,
                write=self.workers.write_checkpoint,
                state={"step": step, **cursor, "version": step, "data": self.data_mark, "owes_evaluation": owed},
                score=ranking["scores"].get(ranking["best_by"]),
                **ranking,
            )
        except Exception as error:
            self._tell_divergence(error, step=step, lost="this step was not saved")
            raise
        self._unsaved = None

    def _ranking(self, step: int) -> dict[str, Any]:
        """What tells whether the step's checkpoint is among the best, as the store takes it."""
        headline = headline_of(read_rows(self.run_dir / "metrics.jsonl"))
        scores = self._scores if self._evaluated_step == step else {}
        return {"scores": scores, "best_by": headline.metric}

    def _export(self) -> None:
        target = self.run_dir / "model"
        try:
            persist(lambda: self.workers.export(target), path=target, what="the trained model", refuse=CheckpointError)
        except Exception as error:
            self._tell_divergence(error, step=self.version, lost="no model was exported")
            raise

    def _tell_divergence(self, error: Exception, *, step: int, lost: str) -> None:
        """Raise what to do if the error says that weights, loss or gradients have diverged, here or in a worker."""
        found = next((one for one in causes(error) if isinstance(one, NonFiniteError)), None)
        if found is None:
            return
        newest = self.store.latest()
        where = f"goes on from {newest.path}" if newest else "begins at step 1, with the groups that the journal has"
        raise RunError(
            f"step {step}: {found}; {lost}, and nothing on disk is lost. Lower actor.lr, set actor.grad_clip, or look at the "
            f"step's groups in the journal; then run the same command again: it {where}"
        ) from error

    def _sampling(self, *, temperature: float | None = None) -> Sampling:
        rollout = self.config.rollout
        greedy = temperature == 0
        return Sampling(
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=1.0 if greedy else rollout.top_p,
            top_k=0 if greedy else rollout.top_k,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self.workers.stop_token_ids,
            stop_strings=tuple(rollout.stop),
        )

    def _has_signal(self, group: Group) -> bool:
        """A step that is trained again keeps the groups it had, whatever was asked of them then."""
        if self.config.algorithm.dynamic_sampling and self.config.trainer.order == "in_order":
            recorded = self._trained.get(group.step, ())
            if len(recorded) > 1:  # a single one may stand in for a step without any signal
                return group.draw in recorded
        return has_signal(group)

    def _is_due(self, step: int, rhythm: str) -> bool:
        every = getattr(self.config.trainer, rhythm)
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in (*self.sinks, self.console):
            sink.log(step, metrics)


def _last_worker(batch: StepBatch) -> str | None:
    """Who finished last of those that made this step's groups; None if all were in the journal."""
    if batch.num_from_journal >= len(batch.groups):
        return None
    return max(batch.groups, key=lambda group: group.finished_s).worker


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(f"{prompt.id}\0{prompt.answer}\0".encode("utf-8", "surrogatepass"))
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()


async def _together(*work: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
    """Run all of ``work`` to its end, with ``background`` beside it; the first failure of any ends the others."""
    wanted = {asyncio.create_task(coroutine) for coroutine in work}
    tasks = wanted | {asyncio.create_task(coroutine) for coroutine in background}
    try:
        while not all(task.done() for task in wanted):
            running = {task for task in tasks if not task.done()}
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
