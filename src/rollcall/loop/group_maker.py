"""The group of each draw: read from the journal if an earlier process made it, else generated and journaled.

After a crash the same steps run again and get the same groups, so they train on what they trained on before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollcall.algo.shaping import has_signal
from rollcall.config import Config, RolloutSection
from rollcall.data.order import DataOrder
from rollcall.durable.journal import Journal
from rollcall.engine.protocol import Sampling
from rollcall.loop.attempts import RunError
from rollcall.loop.protocols import Workers
from rollcall.loop.rollout import OpenGroups, Rollouts, is_finite, sampling_seeds
from rollcall.loop.supply import NothingLeftError, StepBatch, SuppliedGroup
from rollcall.reward.scorer import ENVIRONMENT, why_unscored
from rollcall.types import Completion, Group, Prompt, failed_on_all


@dataclass(slots=True, kw_only=True)
class GroupMaker:
    """``call`` runs a function that takes long, in a thread where other work can go on meanwhile."""

    config: Config
    workers: Workers
    journal: Journal
    rollouts: Rollouts
    open_groups: OpenGroups
    generates: bool
    call: Callable[..., Awaitable[Any]]
    trained: dict[int, tuple[int, ...]] = field(init=False)  # step -> draws, by earlier processes
    _order: DataOrder = field(init=False)
    # step -> draw -> the group of an earlier process
    _journaled: dict[int, dict[int, Group]] = field(default_factory=dict)
    # step -> draw -> place in the group -> an attempt of an earlier process, whose group was not finished
    _attempts: dict[int, dict[int, dict[int, Group]]] = field(default_factory=dict)
    # step -> the rewards that failed on every completion of it
    _unscored: dict[int, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self._order = DataOrder(len(self.workers.train.prompts), seed=config.run.seed, shuffle=config.data.shuffle)
        self.trained = {step: entry.draws for step, entry in self.journal.trained().items()}

    async def make(self, step: int, draw: int) -> SuppliedGroup:
        prompt = self.workers.train.prompts[self._order.index(draw)]
        group = self._take_journaled(step, draw)
        if group is None:
            return SuppliedGroup(group=await self._generate(step, draw, prompt), from_journal=False)
        if step in self._unscored and not self._is_trained(draw):  # its rewards failed, which ended an earlier process
            group = await self._make_again(group, failed=self._unscored[step])
            await self.call(partial(self.journal.append, group, again=True))
        return SuppliedGroup(group=group, from_journal=True)

    def has_signal(self, group: Group) -> bool:
        """A step that is trained again keeps the groups that it had the first time."""
        if self.config.algorithm.dynamic_sampling and self.config.trainer.order == "in_order":
            recorded = self.trained.get(group.step, ())
            if len(recorded) > 1:  # a single one may stand in for a step without any signal
                return group.draw in recorded
        return has_signal(group)

    def refuse_unscored(self, batch: StepBatch) -> None:
        """A reward that scores nothing teaches nothing: stop, and do not train on zeros until the last step."""
        failed = failed_on_all(batch.groups)
        if failed and not self._is_trained(batch.groups[0].draw):
            raise RunError(
                f"step {batch.step}: {why_unscored(batch.groups, reward=min(failed), scorer=self.workers.scorer)}\n"
                f"Nothing was trained on them. {_what_to_do(min(failed))}"
            )

    def _is_trained(self, draw: int) -> bool:
        return any(draw in draws for draws in self.trained.values())

    def _take_journaled(self, step: int, draw: int) -> Group | None:
        """A step's file is read before this process adds to it."""
        if step not in self._journaled:
            groups = self.journal.read(step)
            self._journaled[step] = {group.draw: group for group in groups}
            if failed := failed_on_all(groups):
                self._unscored[step] = failed
        return self._journaled[step].pop(draw, None)

    async def _make_again(self, group: Group, *, failed: frozenset[str]) -> Group:
        """The same completions with new scores; episodes whose environment failed are played again."""
        if ENVIRONMENT not in failed or self.rollouts.player is None or not self.generates:
            return await self.rollouts.score_again(group, scorer=self.workers.scorer)
        given = self._given(group.step, group.draw, group.prompt)
        return await self.rollouts.group(group.prompt, **given)

    async def _generate(self, step: int, draw: int, prompt: Prompt) -> Group:
        if not self.generates:
            raise NothingLeftError
        given = self._given(step, draw, prompt)
        done = self._earlier_attempts(step=step, draw=draw, seeds=given["seeds"])
        self.open_groups.open(prompt, step=step, draw=draw, done=done)
        group = await self.rollouts.group(prompt, **given, done=done)
        if not all(map(is_finite, group.completions)):
            raise RunError(
                f"step {step}: the policy's log-probs for prompt {prompt.id!r} are not finite, so its weights have diverged; "
                f"this group was not journaled. Lower actor.lr or set actor.grad_clip, then remove the newest checkpoint in "
                f"{self.config.run.dir / 'checkpoints'} to go on from an older one, or start over with --fresh"
            )
        self.open_groups.close(step=step, draw=draw)
        await self.call(self.journal.append, group)
        return group

    def _given(self, step: int, draw: int, prompt: Prompt) -> dict[str, Any]:
        # With the draw, a prompt that comes twice in one step (small data, refills) gets different seeds.
        count = self.config.rollout.samples_per_prompt
        seeds = sampling_seeds(self.config.run.seed, step, f"{prompt.id}#{draw}", count)
        sampling = sampling_of(self.config.rollout, self.workers.stop_token_ids)
        return {"step": step, "draw": draw, "seeds": seeds, "sampling": sampling, "scorer": self.workers.scorer}

    def _earlier_attempts(self, *, step: int, draw: int, seeds: tuple[int, ...]) -> dict[int, Completion]:
        """What an earlier process finished of this group."""
        if step not in self._attempts:
            self._attempts[step] = self.journal.read_attempts(step)
        found = self._attempts[step].pop(draw, {})
        return {
            place: one.completions[0]
            for place, one in found.items()
            if place < len(seeds) and one.completions[0].seed == seeds[place]
        }


def _what_to_do(failed: str) -> str:
    if failed == ENVIRONMENT:
        return "Correct the environment, then run the same command again (leave out --fresh): these episodes are played again"
    return (
        "Correct the reward (`rollcall reward test RUN.yaml` tries it), then run the same command again (leave out --fresh): "
        "the completions are kept and scored again"
    )


def sampling_of(
    rollout: RolloutSection, stops: tuple[int, ...], *, temperature: float | None = None, max_tokens: int | None = None
) -> Sampling:
    """How the run samples; ``temperature`` and ``max_tokens`` are those of an evaluation."""
    greedy = temperature == 0
    return Sampling(
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        max_tokens=max_tokens or rollout.max_response_tokens,
        stop_token_ids=stops,
        stop_strings=tuple(rollout.stop),
    )
