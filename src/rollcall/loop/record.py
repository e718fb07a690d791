"""Writes a run's files step by step: metrics, samples, checkpoints, and the model at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.base.errors import CheckpointError, NonFiniteError
from rollcall.base.patience import disk_fault, persist
from rollcall.base.stop import heeded
from rollcall.base.types import Group, Sample
from rollcall.base.wait import Wait, warn
from rollcall.checkpoint.store import CheckpointStore
from rollcall.config import TrainerSection
from rollcall.engine.protocol import Stats
from rollcall.loop.attempts import RunError, causes
from rollcall.loop.callbacks import Callbacks, CheckpointSaved, EvaluationDone, StepDone
from rollcall.loop.evaluate import Evaluation
from rollcall.loop.phases import is_due
from rollcall.loop.step_metrics import batch_metrics, peak_memory_gib
from rollcall.loop.supply import StepBatch
from rollcall.loop.tasks import start
from rollcall.loop.workers import Workers
from rollcall.observe.console import Console
from rollcall.observe.headline import ACCURACY, REWARD, headline_of
from rollcall.observe.samples import SCORED_GROUPS, TOKEN_SCORES, write_samples, write_token_scores
from rollcall.observe.sinks import Sink, read_rows

FIRST_WORD_S = 1.0  # a wait shorter than this is not worth a message
LONGEST_S = 6 * 3600.0  # timeout for one checkpoint; a terabyte over a slow network takes two hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result and duration of a step's update."""

    samples: list[Sample]
    metrics: dict[str, float]
    num_tokens: int
    score_s: float
    update_s: float


class Saves:
    """Tracks the checkpoint that is written while the run continues. There is at most one such checkpoint.

    ``begin`` returns at once. ``settle`` waits for the checkpoint; ``poll`` never waits. Both call ``tell`` once the checkpoint is
    committed. If the save failed, both raise its error on every call, because the thread that gets the error first may have no caller
    left to report it to.
    """

    def __init__(self, tell: Callable[[int, Path], None]) -> None:
        self._tell = tell
        self._under_way: tuple[int, Future[Path]] | None = None
        self._lock = threading.Lock()  # the loop polls in one thread, and the next save waits in another

    def begin(self, step: int, save: Callable[[], Path]) -> None:
        """Start ``save`` in a thread. It writes and commits the checkpoint."""
        assert self._under_way is None, "call settle first"
        self._under_way = step, start(save)

    def poll(self) -> None:
        with self._lock:
            if self._under_way is None or not self._under_way[1].done():
                return
            step, save = self._under_way
            path = save.result()
            self._under_way = None
            self._tell(step, path)

    def forget_failed(self) -> bool:
        """Allow a new save if the last one failed. Returns whether the last one failed."""
        with self._lock:
            save = self._under_way and self._under_way[1]
            if save is None or not save.done() or save.exception() is None:
                return False
            self._under_way = None
            return True

    def settle(self) -> None:
        """Wait for the checkpoint. Raises ``CheckpointError`` if it takes longer than ``LONGEST_S``."""
        with self._lock:
            if self._under_way is None:
                return
            step, save = self._under_way
        word, deadline = Wait(first_s=FIRST_WORD_S), time.monotonic() + LONGEST_S
        while not save.done():
            word.tell(f"waiting for the checkpoint of step {step}, which is still being written")
            wait([save], timeout=min(word.until_word_s, 0.5))
            if heeded().is_interrupted:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint of step {step} has still not been written after {LONGEST_S / 3600:,.1f} hours, because the disk, "
                    "or a node that writes a part of the checkpoint, does not respond; check that checkpoint files can be written "
                    "there, then run the same command again: it continues from the newest complete checkpoint"
                )
        self.poll()


@dataclass(eq=False, repr=False)
class Record:
    run_dir: Path
    trainer: TrainerSection
    workers: Workers
    _: KW_ONLY
    threshold: float  # a completion is correct if its first reward is at least this
    store: CheckpointStore
    sinks: Sequence[Sink]
    console: Console
    callbacks: Callbacks = Callbacks()

    def __post_init__(self) -> None:
        # The newest trained step, if it is not in the last checkpoint or the one being written.
        self.unsaved: StepBatch | None = None
        self.newest: StepBatch | None = None  # the step whose update made the current weights; None during an update
        self.update_s = 0.0  # for the last step
        self._row: Callable[[], dict[str, float]] | None = None  # for a step that is trained but not yet logged
        self.saves = Saves(self._tell_saved)
        self._evaluated_step = -1
        self._scores: dict[str, float] = {}  # scores of that evaluation; keys: metrics that can rank checkpoints

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in (*self.sinks, self.console):
            sink.log(step, metrics)

    def begin_update(self) -> None:
        """Until ``note_update`` is called, the weights do not belong to any step, so they cannot be saved."""
        self.unsaved = self.newest = None

    def note_update(self, batch: StepBatch, update: Update, *, stats: Stats, reward_s: float, started: float) -> None:
        """Record that the step is trained; ``log_step`` writes its row. ``stats`` and ``reward_s`` are those of its rollout."""
        self.unsaved = self.newest = batch
        self.update_s = update.score_s + update.update_s
        since = {"time/sync_s": time.perf_counter(), "time/step_s": started}
        self._row = partial(self._metrics, batch, update, stats=stats, reward_s=reward_s, since=since)

    def log_step(self) -> None:
        if self._row is not None and self.unsaved is not None:
            batch, metrics = self.unsaved, self._row()
            self.log(batch.step, metrics)
            self._row = None
            groups = tuple(batch.groups)
            self.callbacks.tell(StepDone(step=batch.step, num_steps=self.trainer.steps, metrics=metrics, groups=groups))

    def log_evaluation(self, step: int, result: Evaluation, *, seconds: float) -> None:
        metrics = {**result.metrics(), "time/eval_s": seconds}
        self.log(step, metrics)
        self.write_samples(step, "val", result.groups[:64])
        self._evaluated_step = step
        self._scores = {headline.metric: metrics[headline.metric] for headline in (ACCURACY, REWARD)}
        self.callbacks.tell(EvaluationDone(step=step, num_steps=self.trainer.steps, metrics=metrics, evaluation=result))

    def write_samples(self, step: int, split: str, groups: Sequence[Group]) -> None:
        directory = self.run_dir / "samples"
        write = partial(write_samples, directory, step=step, split=split, groups=groups)
        persist(write, path=directory, what=f"the {split} samples of step {step}")

    def write_token_scores(self, batch: StepBatch) -> None:
        """Score the tokens of the first groups with the learner's weights from before the step's update, and write the scores. They are
        only for display, so the run does not wait until the disk accepts them."""
        groups = batch.groups[:SCORED_GROUPS]
        rows = self.workers.learner.score(
            [
                Sample.of(completion, draw=group.draw, attempt=attempt, prompt_ids=group.prompt.token_ids)
                for group in groups
                for attempt, completion in enumerate(group.completions)
            ]
        )
        directory = self.run_dir / TOKEN_SCORES
        logprobs, entropy = [row.logprobs for row in rows], [row.entropy for row in rows]
        try:
            write_token_scores(directory, step=batch.step, groups=groups, logprobs=logprobs, entropy=entropy)
        except OSError as error:
            if (fault := disk_fault(error, near=directory)) is None:
                raise
            warn(
                f"{directory}: the token scores of step {batch.step} were not written ({fault.strerror}); the page shows these tokens "
                "without the learner's log-probs and entropy"
            )

    def save(self, batch: StepBatch) -> None:
        """Copy a step's checkpoint to host memory and start writing it; ``saves`` tracks the write while the run continues. Samples are
        written first, because if the process is killed before the checkpoint is complete, the resumed run writes both again."""
        step, trainer = batch.step, self.trainer
        self.saves.settle()
        self.write_samples(step, "train", batch.groups[:8])
        ranking = self._ranking(step)
        evaluates = self.workers.val is not None and is_due(step, every=trainer.eval_every, last=trainer.steps)
        state = {
            "step": step,
            "next_draw": batch.cursor.next_draw,
            "pending": list(batch.cursor.pending),
            "version": step,
            "owes_evaluation": evaluates and self._evaluated_step < step,
        }
        with self.explaining_divergence(step, lost="this step was not saved"):
            self.workers.saving.copy()
        score = ranking["scores"].get(ranking["best_by"])
        self.saves.begin(step, partial(self._write_checkpoint, step, state=state, score=score, **ranking))
        self.unsaved = None

    def _write_checkpoint(self, step: int, **about: Any) -> Path:
        saving = self.workers.saving
        path = self.store.save(step, write=saving.write, **about)
        saving.tidy(self.store.dir, keep=self.store.places())
        return path

    def _tell_saved(self, step: int, path: Path) -> None:
        self.callbacks.tell(CheckpointSaved(step=step, num_steps=self.trainer.steps, path=path))

    def add_scores(self, step: int) -> None:
        """Add the scores to a checkpoint that was saved before its evaluation."""
        self.store.add_scores(step, **self._ranking(step))

    def export(self, *, step: int) -> None:
        target = self.run_dir / "model"
        with self.explaining_divergence(step, lost="no model was exported"):
            persist(partial(self.workers.export, target), path=target, what="the trained model", refuse=CheckpointError)

    @contextmanager
    def explaining_divergence(self, step: int, *, lost: str) -> Iterator[None]:
        """If weights, loss or gradients become non-finite in the block, here or in a worker, raise an error that says what to do."""
        try:
            yield
        except Exception as error:
            found = next((cause for cause in causes(error) if isinstance(cause, NonFiniteError)), None)
            if found is None:
                raise
            with suppress(Exception):  # the divergence is the error to report
                self.saves.settle()
            newest = self.store.latest()
            where = f"continues from {newest.path}" if newest else "begins at step 1, with the groups in the journal"
            raise RunError(
                f"step {step}: {found}; {lost}, and nothing on disk is lost. Lower actor.lr, set actor.grad_clip, or look at "
                f"the step's groups in the journal; then run the same command again: it {where}"
            ) from error

    def _ranking(self, step: int) -> dict[str, Any]:
        """Return the arguments from which the store decides whether this checkpoint is among the best."""
        headline = headline_of(read_rows(self.run_dir / "metrics.jsonl"))
        return {"scores": self._scores if self._evaluated_step == step else {}, "best_by": headline.metric}

    def _metrics(
        self, batch: StepBatch, update: Update, *, stats: Stats, reward_s: float, since: Mapping[str, float]
    ) -> dict[str, float]:
        """Compute the step's metrics row, while the next rollout runs. ``since`` maps metrics to the times from which they count."""
        now, first_reward = time.perf_counter(), self.workers.scorer.names[0]
        metrics = batch_metrics(
            batch, update.samples, stats=stats, reward_s=reward_s, threshold=self.threshold, first_reward=first_reward
        )
        others = {"mismatch": "rollout/logprob_mismatch", "mismatch_max": "rollout/logprob_mismatch_max"}
        metrics |= {others.get(name, f"train/{name}"): value for name, value in update.metrics.items()}
        return metrics | {
            "train/tokens": float(update.num_tokens),
            "time/score_s": update.score_s,
            "time/update_s": update.update_s,
            "perf/train_tokens_per_s": update.num_tokens / (update.score_s + update.update_s),
            "perf/peak_memory_gib": peak_memory_gib(),
            **{name: now - then for name, then in since.items()},
        }
