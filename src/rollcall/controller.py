"""The loop.

      prompts            groups                samples              micro-batches
 data ───────▶ generate ────────▶ journal ──┐
                 ▲      + rewards (on disk) │  buffer
                 │                          ▼
                 │                        train: advantages ▶ pack ▶ update ▶ new version
                 └───────────────── weights ────────────────────────────────────┘

Two coroutines over one buffer (``supply.py``). ``Supply.run`` starts rollouts as far ahead as ``trainer.staleness``
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
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from rollcall.aside import in_thread
from rollcall.attempts import Regrow
from rollcall.checkpoint.store import Checkpoint, CheckpointStore
from rollcall.config import Config
from rollcall.data.load import PromptSet
from rollcall.data.order import DataOrder
from rollcall.engine.protocol import Engine, Sampling
from rollcall.evaluate import Evaluation, evaluate
from rollcall.journal import Journal, JournalError
from rollcall.learner.optimizer import NonFiniteError
from rollcall.observe.console import Console
from rollcall.observe.sinks import Sink
from rollcall.observe.summary import peak_memory_gib, sample_rows, write_samples
from rollcall.reward.scorer import Scorer
from rollcall.rollout import Clock, Rollouts, sampling_seeds
from rollcall.samples import Score as ScoreSamples
from rollcall.samples import has_signal, make_samples
from rollcall.supply import AsCompleted, Cursor, InOrder, Made, Needs, StepBatch, Supply
from rollcall.types import FinishReason, Floats, Group, Prompt, Sample

T = TypeVar("T")
FLUSH_EVERY_S = 1.0
REPAIR_EVERY_S = 0.5


class RunError(RuntimeError):
    """The run cannot go on; what is on disk is whole, and the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    samples: list[Sample]
    metrics: dict[str, float]
    num_tokens: int
    score_s: float
    update_s: float


class Trainable(Protocol):
    """The policy's learner, or the critic."""

    def update(self, samples: Sequence[Sample]) -> dict[str, float]: ...


class Policy(Trainable, Protocol):
    num_tokens_trained: int


class ValueFunction(Trainable, Protocol):
    def values(self, samples: Sequence[Sample]) -> list[Floats]: ...


class Repairs(Protocol):
    """Processes that take the place of lost ones, and nodes that come back."""

    @property
    def is_due(self) -> bool:
        """A new rollout process waits for the current weights."""
        ...

    @property
    def regrow(self) -> str | None:
        """Why another attempt could use more nodes than this one; None: it could not."""
        ...

    def admit(self, version: int) -> None:
        """Give this version, which the actor holds, to the new processes, and let them serve."""
        ...


class Workers(Protocol):
    """What the controller drives: all of it in this process (``cluster/local.py``) or on a cluster (``cluster/remote.py``)."""

    @property
    def is_remote(self) -> bool:
        """Calls only wait for other processes, so they may run beside the loop."""
        ...

    @property
    def shares_policy(self) -> bool:
        """Some engine reads the learner's own parameters, so an update changes what it samples from."""
        ...

    @property
    def repairs(self) -> Repairs | None:
        """None: nothing here can be replaced."""
        ...

    @property
    def engine(self) -> Engine: ...
    @property
    def learner(self) -> Policy: ...
    @property
    def critic(self) -> ValueFunction | None: ...
    @property
    def reference(self) -> ScoreSamples | None: ...
    @property
    def scorer(self) -> Scorer: ...
    @property
    def eval_scorer(self) -> Scorer: ...
    @property
    def train(self) -> PromptSet: ...
    @property
    def val(self) -> PromptSet | None: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def max_positions(self) -> int: ...
    def take_preemptions(self) -> int: ...
    def write_checkpoint(self, directory: Path) -> None: ...
    def read_checkpoint(self, directory: Path) -> None: ...
    def export(self, directory: Path) -> None: ...
    def close(self) -> None: ...


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
    ):
        self.config = config
        self.workers = workers
        self.run_dir = run_dir
        self.journal = journal
        self.store = store
        self.sinks = sinks
        self.console = console
        self.order = DataOrder(len(workers.train.prompts), seed=config.run.seed, shuffle=config.data.shuffle)
        self.start_step = resume.step if resume else 0
        state: dict[str, Any] = resume.state if resume else {"next_draw": 0}
        self.cursor = Cursor(pending=tuple(state.get("pending", ())), next_draw=int(state["next_draw"]))
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

    async def run(self) -> None:
        """From the resumed step to the last; the trained model is then in ``run_dir/model``."""
        self.rollouts = Rollouts(self.workers.engine)
        self.supply = self._make_supply()
        await self._call(self.workers.engine.update_weights, self.version)
        await _together(self._run(), background=[self.rollouts.pump(), self._flush(), self._repair()])

    async def _run(self) -> None:
        if self.start_step == 0:
            await self._evaluate(0, title="before training")
        await _together(self.supply.run(), self._train())
        await self._call(self._export)

    async def _train(self) -> None:
        started = time.perf_counter()
        for step in range(self.start_step + 1, self.config.trainer.steps + 1):
            batch = await self.supply.batch(step)
            await self._call(self.journal.sync)
            if self.workers.shares_policy:
                await self._settle()
            clock = self.rollouts.clock.take()
            async with self._policy:
                update = await self._call(self._update, batch)
                self.journal.mark_trained(step, draws=[group.draw for group in batch.groups], version=step)
                updated = time.perf_counter()
                await self._announce(step)
            announced = time.perf_counter()
            metrics = await self._call(self._metrics, batch, update, clock)
            self._log(step, metrics | {"time/sync_s": announced - updated, "time/step_s": announced - started})
            started, evaluation = announced, None
            if self._is_due(step, "eval_every"):
                evaluation = await self._evaluate(step, title="after training")
                started = time.perf_counter()
            if self._is_due(step, "save_every"):
                saving = time.perf_counter()
                await self._call(self._save, step, batch, evaluation)
                started = time.perf_counter()
                self._log(step, {"time/save_s": started - saving})
                if self.workers.repairs and self.workers.repairs.regrow and step < self.config.trainer.steps:
                    raise Regrow(self.workers.repairs.regrow)

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
        await self._settle()
        await self._call(self.workers.engine.update_weights, version)
        self.version = version
        self.rollouts.go_on()
        await self.supply.announce(version)

    def _make_supply(self) -> Supply:
        trainer, algorithm = self.config.trainer, self.config.algorithm
        needs = Needs(
            start_step=self.start_step,
            steps=trainer.steps,
            wanted=self.config.data.prompts_per_step,
            staleness=trainer.staleness,
            max_refills=algorithm.max_refills if algorithm.dynamic_sampling else None,
            make=self._group,
            has_signal=self._has_signal,
        )
        if trainer.order == "in_order":
            return InOrder(needs, cursor=self.cursor)
        recorded = {step: entry.draws for step, entry in self.journal.trained().items()}
        return AsCompleted(needs, cursor=self.cursor, recorded=recorded)

    def _take_journaled(self, step: int, draw: int) -> Group | None:
        """What an earlier process made of this draw. A step's file is read before this process adds to it."""
        if step not in self._journaled:
            self._journaled[step] = {group.draw: group for group in self.journal.read(step)}
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
            return Made(group=found, journaled=True)
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
        self.journal.append(group)
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
        except NonFiniteError as error:
            raise RunError(
                f"step {batch.step}: {error}; this update was not applied and nothing on disk is lost. Lower actor.lr, "
                "set actor.grad_clip, or look at the step's groups in the journal; then run the same command again"
            ) from error
        return _Update(
            samples=samples,
            metrics={**learner, **critic},
            num_tokens=workers.learner.num_tokens_trained - trained_before,
            score_s=scored - started,
            update_s=time.perf_counter() - scored,
        )

    def _metrics(self, batch: StepBatch, update: _Update, clock: Clock) -> dict[str, float]:
        """What the step's row says; put together while the next rollout is under way."""
        metrics = _batch_metrics(
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

    async def _evaluate(self, step: int, *, title: str) -> Evaluation | None:
        val = self.workers.val
        if val is None:
            return None
        started = time.perf_counter()
        section = self.config.eval
        result = await evaluate(
            val.prompts[: section.max_prompts],
            section=section,
            rollouts=self.rollouts,
            scorer=self.workers.eval_scorer,
            sampling=self._sampling(temperature=section.temperature),
            seed=self.config.run.seed,
            step=step,
        )
        self._log(step, {**result.metrics(), "time/eval_s": time.perf_counter() - started})
        write_samples(self.run_dir / "samples", step=step, split="val", groups=result.groups[:64])
        if step in (0, self.config.trainer.steps):
            self.console.show_samples(f"answers {title}", sample_rows(result.groups, limit=6))
        self.rollouts.clock.take()  # the next step's numbers are its own
        return result

    def _save(self, step: int, batch: StepBatch, evaluation: Evaluation | None) -> None:
        cursor = {"next_draw": batch.cursor.next_draw, "pending": list(batch.cursor.pending)}
        self.store.save(
            step,
            write=self.workers.write_checkpoint,
            state={"step": step, **cursor, "version": self.version, "data": self.data_mark},
            score=evaluation.accuracy if evaluation else None,
        )
        write_samples(self.run_dir / "samples", step=step, split="train", groups=batch.groups[:8])

    def _export(self) -> None:
        self.workers.export(self.run_dir / "model")

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
        return has_signal(group, self.config.algorithm, self.config.rollout.max_response_tokens)

    def _is_due(self, step: int, rhythm: str) -> bool:
        every = getattr(self.config.trainer, rhythm)
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in (*self.sinks, self.console):
            sink.log(step, metrics)


def _batch_metrics(
    batch: StepBatch, samples: list[Sample], *, clock: Clock, threshold: float, first_reward: str
) -> dict[str, float]:
    scores = [score for group in batch.groups for score in group.scores]
    completions = [completion for group in batch.groups for completion in group.completions]
    rewards = np.array([score.value for score in scores])
    lengths = [len(completion.token_ids) for completion in completions]
    lags = _staleness(batch)
    loss_tokens = np.concatenate([sample.advantages[sample.mask] for sample in samples])
    metrics = {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/accuracy": float(np.mean([score.parts[first_reward] >= threshold for score in scores])),
        "train/advantage_abs_mean": float(np.abs(loss_tokens).mean()) if len(loss_tokens) else 0.0,
        "train/zero_variance_groups": batch.zero_variance,
        "train/refills": float(batch.num_refills),
        "rollout/staleness_mean": sum(lag * count for lag, count in lags.items()) / max(lags.total(), 1),
        "rollout/staleness_max": float(max(lags, default=0)),
        "rollout/tokens": float(sum(group.num_tokens for group in batch.groups)),
        "rollout/response_length_mean": float(np.mean(lengths)),
        "rollout/truncated_fraction": float(
            np.mean([completion.finish is FinishReason.LENGTH for completion in completions])
        ),
        "rollout/groups_from_journal": float(batch.num_from_journal),
        "time/rollout_s": batch.wall_s,
        "time/reward_s": clock.reward_s,
    }
    if clock.engine_s > 0 and clock.engine_tokens:
        metrics["rollout/tokens_per_s"] = clock.engine_tokens / clock.engine_s
    for name in scores[0].parts:
        metrics[f"reward/{name}"] = float(np.mean([score.parts[name] for score in scores]))
        errors = sum(name in score.errors for score in scores)
        if errors:
            metrics[f"reward_errors/{name}"] = float(errors)
    return metrics


def _staleness(batch: StepBatch) -> Counter[int]:
    """Tokens by how many versions they are older than the policy they train."""
    lags: Counter[int] = Counter()
    for completion in (completion for group in batch.groups for completion in group.completions):
        for segment in completion.segments:
            lags[batch.step - 1 - segment.version] += segment.num_tokens
    return lags


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
