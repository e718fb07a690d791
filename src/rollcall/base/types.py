"""One type per stage of the data flow: Prompt -> Completion -> Group -> Sample -> MicroBatch.

Fields without a default are required; a field allows ``None`` if its value may be missing at some stage. Lengths are checked
once, when the object is created, so later stages need not check them. Arrays are numpy arrays on the host; only the learner
turns a MicroBatch into tensors.

Axes in the comments: T tokens of one completion, R rows of a micro-batch, N packed tokens of a micro-batch, K packed key positions, L
loss tokens (those whose mask is true).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # the token limit
    ABORT = "abort"  # cancelled by the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task."""

    id: str
    token_ids: Ints
    text: str  # the rendered prompt, which rewards and the samples page use
    answer: str  # ground truth, as a string; rewards read it
    metadata: dict[str, Any]  # the row's other columns, passed to rewards unchanged

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"prompt {self.id!r} has no tokens, but needs at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens sampled under one weight version."""

    version: int
    num_tokens: int


class EndReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment ended it, or the model made no further tool call
    TURNS = "turns"  # the turn limit
    TOKENS = "tokens"  # the token limit
    TIMEOUT = "timeout"  # the episode, or one call to its environment, took too long
    ERROR = "error"  # the environment raised, died or returned something invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in readable form."""

    name: str
    arguments: dict[str, Any]
    result: str
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Sampled tokens, followed by observation tokens (mask false)."""

    num_sampled: int
    num_observed: int
    text: str  # what the model wrote
    observation: str  # the environment's response; empty in the last turn
    calls: tuple[ToolCall, ...]
    reward: float | None  # for this turn; `None` if the environment gives no per-turn rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An additional training row of an episode. It contains a conversation that the agent's program held and that does not extend the first one."""

    prompt_ids: Ints
    token_ids: Ints  # [T]
    logprobs: Floats  # [T]
    mask: Bools  # [T]
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        _check_row(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What happened in an attempt with an environment. The tokens are in its Completion."""

    prompt_ids: Ints | None  # the tokens that the model read first; `None`: the group's prompt
    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...]
    reward: float | None  # from the environment, for the full episode; `None` if it gives none
    metrics: dict[str, float]
    ended: EndReason
    error: str  # why the environment failed; empty if it did not
    opening: str = ""  # what the environment added to the prompt
    attributes: dict[str, Any] = field(default_factory=dict)  # what it left in the environment, for rewards to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One attempt at a prompt, as sampled by the engine. Never re-tokenised."""

    token_ids: Ints  # [T]
    logprobs: Floats  # [T] under the sampling distribution (temperature, top-p, top-k); 0 where mask is false
    mask: Bools  # [T] false for tokens that the policy did not choose (tool or user turns)
    segments: tuple[Segment, ...]
    finish: FinishReason
    seed: int
    text: str
    episode: Episode | None  # `None` for a single turn without an environment

    def __post_init__(self) -> None:
        _check_row(self)

    def prompt_ids(self, group_prompt: Ints) -> Ints:
        """Return the tokens that the model read first. ``group_prompt`` is the default."""
        own = self.episode.prompt_ids if self.episode is not None else None
        return group_prompt if own is None else own

    @property
    def is_cut(self) -> bool:
        """Whether the token limit ended the completion."""
        return self.finish is FinishReason.LENGTH if self.episode is None else self.episode.ended is EndReason.TOKENS

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens, over all rows of the completion."""
        return sum(int(row.mask.sum()) for row in rows_of(self))

    @classmethod
    def given(cls, token_ids: Ints, *, text: str = "") -> Completion:
        """Build a completion from tokens that were not sampled, with log-probs of 0."""
        num_tokens = len(token_ids)
        return cls(
            token_ids=token_ids,
            logprobs=np.zeros(num_tokens, dtype=np.float32),
            mask=np.ones(num_tokens, dtype=np.bool_),
            segments=(Segment(version=0, num_tokens=num_tokens),),
            finish=FinishReason.STOP,
            seed=0,
            text=text,
            episode=None,
        )


def _check_row(row: Completion | Branch) -> None:
    num_tokens = len(row.token_ids)
    assert num_tokens == len(row.logprobs) == len(row.mask), "token ids, log-probs and mask differ in length"
    assert num_tokens == sum(segment.num_tokens for segment in row.segments), "segments do not add up"


def rows_of(completion: Completion) -> tuple[Completion | Branch, ...]:
    """Return an attempt's training rows: its completion, then its episode's branches."""
    return (completion, *completion.episode.branches) if completion.episode else (completion,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The scores of one completion."""

    value: float  # the weighted sum that the algorithm uses
    parts: dict[str, float]  # reward name -> unweighted score
    errors: dict[str, str]  # reward name -> why it could not score (raised, hung or returned NaN); its part is then 0
    notes: dict[str, str] = field(default_factory=dict)  # reward name -> its service's note; optional in journals
    # False: every reward declined the completion, so it is not compared or trained on; optional in journals
    is_given: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one prompt. Scheduling, the journal, filters and refills work on groups."""

    step: int  # the optimizer step that it was generated for
    draw: int  # position in the data order; unique per run
    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
    started_s: float  # unix time
    finished_s: float
    worker: str  # the worker that generated it

    def __post_init__(self) -> None:
        assert len(self.completions) == len(self.scores), "one score per completion"

    @property
    def rewards(self) -> Doubles:
        return np.array([score.value for score in self.scores], dtype=np.float64)

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


def failed_on_all(groups: Sequence[Group]) -> frozenset[str]:
    """Return the rewards that failed to score every completion in these groups."""
    errors = [frozenset(score.errors) for group in groups for score in group.scores]
    return frozenset.intersection(*errors) if errors else frozenset()


PER_TOKEN = (
    "mask", "behaviour_logprobs", "old_logprobs", "reference_logprobs", "advantages", "returns", "values",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A training row: one completion, or one branch of its episode, with everything that the loss needs."""

    draw: int  # rows with the same draw begin with the same tokens
    attempt: int  # its index in the group; an episode's branches are rows of the same attempt
    prompt_ids: Ints
    response_ids: Ints  # [T]
    mask: Bools  # [T]
    behaviour_logprobs: Floats  # [T] from the engine
    old_logprobs: Floats | None  # [T] from the learner before the step; `None`: computed in the first forward
    reference_logprobs: Floats | None  # [T] from the frozen reference; `None` without a KL term
    advantages: Floats  # [T]
    returns: Floats | None  # [T] for the critic; `None` without a critic
    values: Floats | None  # [T] the critic's values when the advantages were computed

    def __post_init__(self) -> None:
        num_tokens = len(self.response_ids)
        for name in PER_TOKEN:
            array = getattr(self, name)
            assert array is None or len(array) == num_tokens, f"{name} has {len(array)} entries for {num_tokens} tokens"
        assert len(self.prompt_ids), "nothing predicts the first token of a row without a prompt"

    @classmethod
    def of(cls, row: Completion | Branch, *, draw: int, attempt: int, prompt_ids: Ints) -> Sample:
        """Build a row with zero advantages and no optional fields. ``prompt_ids`` are the tokens of the group's prompt; they are not used
        if the row has its own prompt."""
        return cls(
            draw=draw,
            attempt=attempt,
            prompt_ids=row.prompt_ids if isinstance(row, Branch) else row.prompt_ids(prompt_ids),
            response_ids=row.token_ids,
            mask=row.mask,
            behaviour_logprobs=row.logprobs,
            old_logprobs=None,
            reference_logprobs=None,
            advantages=np.zeros(len(row.token_ids), dtype=np.float32),
            returns=None,
            values=None,
        )

    def with_(self, **changes: Any) -> Sample:
        return replace(self, **changes)


def attempts_of(samples: Sequence[Sample]) -> Longs:
    """Number each row's attempt from 0, in the order in which attempts first appear."""
    numbers: dict[tuple[int, int], int] = {}
    return np.array(
        [numbers.setdefault((sample.draw, sample.attempt), len(numbers)) for sample in samples], dtype=np.int64
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows packed for one forward pass, without padding.

    A prefix that several rows share is stored once. ``kv_index`` lists, for each segment, the packed positions of its keys: the path from
    the row's first token to the segment's last, through segments of other rows where these are shared. A query segment ``i`` is
    ``[cu_q[i], cu_q[i+1])`` of the packed tokens. It attends causally, aligned at its end, to the keys
    ``kv_index[cu_k[i]:cu_k[i+1]]``.
    """

    token_ids: Longs  # [N]
    positions: Longs  # [N]
    kv_index: Longs  # [K]
    cu_q: Ints  # [segments + 1]
    cu_k: Ints  # [segments + 1]
    logit_index: Longs  # [L] packed position whose hidden state predicts the loss token; rows may share positions
    targets: Longs  # [L] the loss token's id
    row: Longs  # [L] the loss token's row in this micro-batch
    sample_index: Longs  # [R] the row's index in the packed list of samples
    attempt: Longs  # [R] the row's attempt, counted from 0 in this micro-batch
    weights: Floats  # [L] the token's share of the loss, which is a plain weighted sum
    behaviour_logprobs: Floats  # [L]
    old_logprobs: Floats | None  # [L]
    reference_logprobs: Floats | None  # [L]
    advantages: Floats  # [L]
    returns: Floats | None  # [L]
    values: Floats | None  # [L]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.positions) == self.cu_q[-1], (
            "packed tokens and query segments differ in length"
        )
        assert len(self.kv_index) == self.cu_k[-1], "key index and key segments differ in length"
        num_loss_tokens = len(self.targets)
        for name in ("logit_index", "row", "weights", "behaviour_logprobs", "advantages"):
            assert len(getattr(self, name)) == num_loss_tokens, f"{name} does not have one entry per loss token"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.sample_index)

    @property
    def num_attempts(self) -> int:
        return int(self.attempt.max()) + 1
