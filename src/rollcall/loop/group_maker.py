"""Makes each draw's group. If an earlier process made the group, it comes from the journal; otherwise it is generated and journaled.

After a crash, the same steps run again with the same groups, so they train on the same data as before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollcall.algo.shaping import has_signal, trained
from rollcall.base.journal import Journal
from rollcall.base.types import Completion, Group, Prompt, Score, failed_on_all, rows_of
from rollcall.config import Config, RolloutSection
from rollcall.engine.protocol import LOCAL, Sampling
from rollcall.loop.attempts import RunError
from rollcall.loop.data.order import prompt_index
from rollcall.loop.phases import Bounds, Phase
from rollcall.loop.rollout import Rollouts, sampling_seeds
from rollcall.loop.supply import NothingLeftError, StepBatch, SuppliedGroup
from rollcall.loop.workers import Workers
from rollcall.reward.scorer import ENVIRONMENT, why_unscored

KEEP_EVERY_S = 1.0
UNSCORED = Score(value=0.0, parts={}, errors={})


class GroupMaker:
    """``call`` runs a slow function. It uses a thread if other work can continue meanwhile."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        *,
        bounds: Bounds,
        journal: Journal,
        rollouts: Rollouts,
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        self._config = config
        self._prompts, self._scorer = workers.train.prompts, workers.scorer
        num_prompts, shuffle = len(self._prompts), config.data.shuffle
        self._index = partial(prompt_index, num_prompts=num_prompts, seed=config.run.seed, shuffle=shuffle)
        self._sampling = sampling_of(config.rollout, workers.stop_token_ids)
        self._journal, self._rollouts, self._call = journal, rollouts, call
        self._generates = bounds.phase is not Phase.UPDATE
        self.trained = {step: entry.draws for step, entry in journal.trained().items()}  # by earlier processes
        self.open_groups = OpenGroups(partial(call, journal.append_attempts))
        self._unwritten: dict[int, Group] = {}  # finished groups, by draw
        self._writing = asyncio.Lock()
        # step -> draw -> the group that an earlier process made
        self._journaled: dict[int, dict[int, Group]] = {}
        # step -> draw -> index in the group -> an attempt by an earlier process that did not finish the group
        self._attempts: dict[int, dict[int, dict[int, Group]]] = {}
        # step -> the rewards that failed on all of its completions
        self._unscored: dict[int, frozenset[str]] = {}

    async def make(self, step: int, draw: int) -> SuppliedGroup:
        prompt = self._prompts[self._index(draw)]
        if step not in self._journaled:  # the step's file is read before this process adds to it
            groups = self._journal.read(step)
            self._journaled[step] = {group.draw: group for group in groups}
            self._unscored[step] = failed_on_all(groups)
        group = self._journaled[step].pop(draw, None)
        if group is None:
            return SuppliedGroup(group=await self._generate(step, draw, prompt), from_journal=False)
        failed = self._unscored[step]
        if failed and not self._is_trained(draw):  # its rewards failed, so the earlier process stopped
            if ENVIRONMENT in failed and self._rollouts.player is not None and self._generates:
                again = self._given(group.step, group.draw, group.prompt)  # the episodes are played again
                group = await self._rollouts.group(group.prompt, **again)
            else:
                scores = await self._rollouts.rewards.score(self._scorer, group.prompt, group.completions)
                group = replace(group, scores=scores)  # finished_s remains the time at which the completions finished
            await self._call(partial(self._journal.append, group, again=True))
        return SuppliedGroup(group=group, from_journal=True)

    def has_signal(self, group: Group) -> bool:
        # A step that is trained again keeps the groups that it was first trained on.
        keeps_recorded = self._config.algorithm.dynamic_sampling and self._config.trainer.order == "in_order"
        recorded = self.trained.get(group.step, ()) if keeps_recorded else ()
        if len(recorded) > 1:  # a single group may have been used because no group had a signal
            return group.draw in recorded
        return has_signal(trained(group, self._config.environment))

    def refuse_unscored(self, batch: StepBatch) -> None:
        """Raise if a reward failed on all completions, instead of training on zeros until the last step."""
        failed = failed_on_all(batch.groups)
        if failed and not self._is_trained(batch.groups[0].draw):
            if min(failed) == ENVIRONMENT:
                fix, kept = "the environment", "these episodes will be played again"
            else:
                fix = "the reward (`rollcall reward test RUN.yaml` tries it)"
                kept = "the completions are kept and will be scored again"
            raise RunError(
                f"step {batch.step}: {why_unscored(batch.groups, reward=min(failed), scorer=self._scorer)}\n"
                f"The step was not trained. Fix {fix}, then run the same command again (leave out --fresh): {kept}"
            )

    def _is_trained(self, draw: int) -> bool:
        return any(draw in draws for draws in self.trained.values())

    async def _generate(self, step: int, draw: int, prompt: Prompt) -> Group:
        if not self._generates:
            raise NothingLeftError
        given = self._given(step, draw, prompt)
        if step not in self._attempts:
            self._attempts[step] = self._journal.read_attempts(step)
        done = {place: one.completions[0] for place, one in self._attempts[step].pop(draw, {}).items()}
        self.open_groups.open(prompt, step=step, draw=draw, done=done)
        group = await self._rollouts.group(prompt, **given, done=done)
        if not all(map(is_finite, group.completions)):
            raise RunError(
                f"step {step}: the policy's log-probs for prompt {prompt.id!r} are not finite, so its weights have diverged; "
                f"this group was not journaled. Lower actor.lr or set actor.grad_clip, then remove the newest checkpoint in "
                f"{self._config.run.dir / 'checkpoints'} to continue from an older one, or start over with --fresh"
            )
        self._unwritten[draw] = group
        async with self._writing:
            if draw in self._unwritten:  # otherwise an earlier call has written it
                await self._call(self._write)
        self.open_groups.close(step=step, draw=draw)  # last, because a cancellation must not lose its completions
        return group

    def _write(self) -> None:
        """Write all groups that have finished by now. Many groups finish at the same time, and a call for each would take longer."""
        for draw, group in list(self._unwritten.items()):
            self._journal.append(group)
            del self._unwritten[draw]

    def _given(self, step: int, draw: int, prompt: Prompt) -> dict[str, Any]:
        # The draw is included so that a prompt that occurs twice in one step (small data, refills) gets different seeds.
        seeds = sampling_seeds(
            self._config.run.seed, step, f"{prompt.id}#{draw}", self._config.rollout.samples_per_prompt
        )
        return {"step": step, "draw": draw, "seeds": seeds, "sampling": self._sampling, "scorer": self._scorer}


class OpenGroups:
    """Passes finished completions of unfinished groups to ``write``, in one batch at most once a second. If the process is killed, the
    resumed run generates only the missing completions. A finished completion is written with the second batch that follows, because most
    groups are finished and written as a whole before then."""

    def __init__(self, write: Callable[[list[tuple[int, Group]]], Awaitable[Any]]) -> None:
        self._write = write
        # (step, draw) -> builder for a group of one completion; finished completions by index; indices already written; indices that
        # were finished at the last batch
        self._groups: dict[tuple[int, int], tuple[Callable[..., Group], dict[int, Completion], set[int], set[int]]] = {}

    def open(self, prompt: Prompt, *, step: int, draw: int, done: dict[int, Completion]) -> None:
        """Open a group. ``done`` contains the completions that are already written; the caller adds each new one when it finishes."""
        make = partial(
            Group, step=step, draw=draw, prompt=prompt, scores=(UNSCORED,), started_s=time.time(), worker=LOCAL
        )
        self._groups[step, draw] = (make, done, set(done), set(done))

    def close(self, *, step: int, draw: int) -> None:
        """Close a group, because it has been written as a whole."""
        del self._groups[step, draw]

    async def run(self) -> None:
        """Write until cancelled, then once more."""
        try:
            while True:
                await asyncio.sleep(KEEP_EVERY_S)
                await self._flush()
        finally:
            await self._flush(everything=True)

    async def _flush(self, *, everything: bool = False) -> None:
        new: list[tuple[int, Group]] = []
        for make, done, written, finished in self._groups.values():
            due = (set(done) if everything else finished) - written
            finished.update(done)
            for place in sorted(due):
                if is_finite(done[place]):  # otherwise ``_generate`` raises for the whole group
                    written.add(place)
                    new.append((place, make(completions=(done[place],), finished_s=time.time())))
        if new:
            await self._write(new)


def is_finite(completion: Completion) -> bool:
    return all(math.isfinite(np.add.reduce(row.logprobs)) for row in rows_of(completion))


def sampling_of(
    rollout: RolloutSection, stops: tuple[int, ...], *, temperature: float | None = None, max_tokens: int | None = None
) -> Sampling:
    """Return the run's sampling settings. An evaluation sets its own ``temperature`` and ``max_tokens``."""
    greedy = temperature == 0
    return Sampling(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        max_tokens=max_tokens or rollout.max_response_tokens,
        stop_token_ids=stops,
        stop_strings=tuple(rollout.stop),
    )
