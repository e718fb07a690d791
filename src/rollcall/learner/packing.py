"""Packs samples into micro-batches: rows are concatenated under a token budget, and each shared prefix is laid out once.

The input of a row with response tokens r0..rn is its prompt and r0..r(n-1); the prompt's last token predicts r0. Rows of one draw in the
same micro-batch form a prefix tree: a row reuses the tokens that it has in common with the beginning of an earlier row, in the prompt or
after it. So tokens that the attempts of a group or the branches of an episode share are computed once. Rows are never split.

    system, task ─┬─ answer 1
                  └─ turn 1, observation 1 ─┬─ turn 2
                                            └─ summary, turn 3
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rollcall.base.types import Floats, Ints, Longs, MicroBatch, Sample, attempts_of
from rollcall.base.wait import say
from rollcall.config import OptimizerSection
from rollcall.config.sections import DEFAULT_TOKENS
from rollcall.learner.gang import units_of
from rollcall.plan.activations import Recompute

OPTIONAL = ("old_logprobs", "reference_logprobs", "returns", "values")
# Rows that share their prompt and fewer than this many tokens after it share only the prompt. Responses of equal length then have
# segments of the same shape. Attention on a CPU computes these together, which saves more than sharing a few tokens.
FEW = 8


@dataclass(slots=True, kw_only=True)
class Fit:
    """The current micro-batch size. It only shrinks, and all ranks of a gang agree on it after every update."""

    name: str  # the section's name: actor or critic
    tokens: int
    recompute: Recompute
    may_recompute: bool = False  # whether activation_checkpointing is auto, so that ``shrink`` may change ``recompute``

    @classmethod
    def of(cls, section: OptimizerSection, *, name: str) -> Fit:
        """Return the section's size, or the default for a CPU. Nothing is measured yet."""
        tokens, setting = section.tokens_per_microbatch, section.activation_checkpointing
        return cls(
            name=name,
            tokens=DEFAULT_TOKENS if tokens == "auto" else tokens,
            recompute=Recompute.of(setting),
            may_recompute=setting == "auto",
        )

    def shrink(self, batch: MicroBatch, *, why: str, units: int, furthest: Recompute) -> bool:
        """Make room after this micro-batch did not fit. Return whether that was possible. The micro-batch has ``units`` rows, or attempts
        whose rows stay together. ``furthest`` is the strongest recomputation that is allowed."""
        before = min(self.tokens, batch.num_tokens)
        if units > 1:
            self.tokens = max(1, before // 2)
            say(
                f"{self.name}: a micro-batch of {before} tokens does not fit ({why}); {self.name}.tokens_per_microbatch is "
                f"{self.tokens} from now on"
            )
            return True
        if self.may_recompute and self.recompute < furthest:
            self.recompute = Recompute(self.recompute + 1)
            say(
                f"{self.name}: a row of {batch.num_tokens} tokens does not fit ({why}); {self.name}.activation_checkpointing is "
                f"{self.recompute.setting} from now on"
            )
            return True
        return False

    def agree(self, others: Sequence[tuple[int, int]]) -> None:
        """Use the smallest size of all ranks in the gang."""
        self.tokens = min(tokens for tokens, _ in others)
        self.recompute = Recompute(max(recompute for _, recompute in others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Samples to pack into micro-batches of a size that fits."""

    samples: Sequence[Sample]
    weights: Floats
    max_rows: int | None
    whole_attempts: bool = False

    def batches(self, rows: Sequence[int], tokens: int) -> Iterator[MicroBatch]:
        """Pack these samples lazily. A micro-batch refers to its rows by their index among all samples."""
        places = np.array(rows, dtype=np.int64)
        for batch in pack(
            [self.samples[row] for row in rows],
            weights=self.weights[list(rows)],
            tokens_per_microbatch=tokens,
            max_rows=self.max_rows,
            whole_attempts=self.whole_attempts,
        ):
            yield replace(batch, sample_index=places[batch.sample_index])

    def units(self, batch: MicroBatch) -> int:
        return batch.num_attempts if self.whole_attempts else batch.num_rows


def pack(
    samples: Sequence[Sample],
    *,
    weights: Floats,
    tokens_per_microbatch: int,
    max_rows: int | None = None,
    whole_attempts: bool = False,
) -> Iterator[MicroBatch]:
    """Pack in the given order. Each micro-batch is packed only when it is needed. ``weights[i]`` is the loss weight of each loss token in
    sample ``i``.

    The budget counts a shared token once. Samples without a loss token cost nothing and are left out. ``max_rows`` limits the rows
    of a micro-batch. With ``whole_attempts``, all rows of an attempt are in the same micro-batch, even if they exceed the budget.
    """
    rows = [index for index, sample in enumerate(samples) if sample.mask.any()]
    units = units_of(attempts_of([samples[index] for index in rows]).tolist() if whole_attempts else rows)
    trees = _Trees()
    for places in units:
        unit = [rows[place] for place in places]
        if not trees.take(samples, unit, most_tokens=tokens_per_microbatch, most_rows=max_rows):
            yield _lay_out(samples, trees.rows, weights)
            trees = _Trees()
            trees.take(samples, unit, most_tokens=tokens_per_microbatch, most_rows=max_rows)
    if trees.rows:
        yield _lay_out(samples, trees.rows, weights)


class _Row(NamedTuple):
    index: int  # the sample's index
    ids: Ints  # the row's input tokens
    key: bytes  # the same tokens as bytes
    parent: int  # the row in the micro-batch with which it shares the most tokens
    shared: int  # how many tokens at its start it shares with the parent


class _Trees:
    """The rows of one micro-batch, with a prefix tree for each draw.

    A row shares the most tokens with a neighbour in the sorted order of all rows, so a sorted list can serve as the tree. A new row
    is compared with only two rows, however many there are.
    """

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self._num_tokens = 0
        self._sorted: dict[int, list[tuple[bytes, int]]] = {}  # by draw: each row's key and index

    def take(self, samples: Sequence[Sample], unit: list[int], *, most_tokens: int, most_rows: int | None) -> bool:
        """Add these rows if there is room for all of them. Return whether they were added. The first unit is always added."""
        first, before = len(self.rows), self._num_tokens
        for index in unit:
            self._add(samples[index], index)
        too_many = most_rows is not None and len(self.rows) > most_rows
        if first == 0 or (self._num_tokens <= most_tokens and not too_many):
            return True
        ordered = self._sorted[samples[unit[0]].draw]
        for place in range(first, len(self.rows)):
            del ordered[bisect_left(ordered, (self.rows[place].key, place))]
        del self.rows[first:]
        self._num_tokens = before
        return False

    def _add(self, sample: Sample, index: int) -> None:
        ids = np.concatenate((sample.prompt_ids, sample.response_ids[:-1]))
        entry = (ids.tobytes(), len(self.rows))
        ordered = self._sorted.setdefault(sample.draw, [])
        here = bisect_left(ordered, entry)
        parent, shared = -1, 0
        for _, place in ordered[max(here - 1, 0) : here + 1]:
            common = _common(ids, self.rows[place].ids)
            if common > shared:
                parent, shared = place, common
        past_prompt = shared - len(sample.prompt_ids)
        if 0 < past_prompt < FEW and shared < len(ids):
            shared -= past_prompt
        ordered.insert(here, entry)
        self.rows.append(_Row(index, ids, entry[0], parent, shared))
        self._num_tokens += len(ids) - shared


def _common(one: Ints, other: Ints) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    place = int(differ.argmax())
    return place if differ[place] else length


def _lay_out(samples: Sequence[Sample], rows: list[_Row], weights: Floats) -> MicroBatch:
    token_ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    kv_index: list[np.ndarray] = []
    logit_index: list[np.ndarray] = []
    paths: list[Longs] = []  # per row: the packed position of each of its input tokens
    end = 0
    for row in rows:
        sample, length = samples[row.index], len(row.ids)
        path = np.arange(end - row.shared, end + length - row.shared)
        if row.shared:
            path[: row.shared] = paths[row.parent][: row.shared]
        paths.append(path)
        # The prompt is a separate segment, so that responses of equal length have segments of the same shape.
        prompt_end = len(sample.prompt_ids)
        for start, stop in ((row.shared, prompt_end), (max(row.shared, prompt_end), length)):
            if start < stop:
                token_ids.append(row.ids[start:stop])
                positions.append(np.arange(start, stop))
                kv_index.append(path[:stop])
        end += length - row.shared
        # The position that predicts response token t: the prompt's last token for t = 0, then response token t - 1.
        logit_index.append(path[prompt_end - 1 :])

    indices = [row.index for row in rows]
    chosen = [samples[index] for index in indices]
    mask = np.concatenate([sample.mask for sample in chosen])
    counts = [np.count_nonzero(sample.mask) for sample in chosen]

    def masked(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.concatenate([getattr(sample, name) for sample in chosen])[mask].astype(dtype, copy=False)

    return MicroBatch(
        token_ids=np.concatenate(token_ids).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64, copy=False),
        kv_index=np.concatenate(kv_index).astype(np.int64, copy=False),
        cu_q=_ends(token_ids),
        cu_k=_ends(kv_index),
        logit_index=np.concatenate(logit_index)[mask].astype(np.int64, copy=False),
        targets=masked("response_ids", np.int64),
        row=np.repeat(np.arange(len(indices)), counts).astype(np.int64, copy=False),
        sample_index=np.array(indices, dtype=np.int64),
        attempt=attempts_of(chosen),
        weights=np.repeat(weights[indices], counts).astype(np.float32, copy=False),
        behaviour_logprobs=masked("behaviour_logprobs"),
        advantages=masked("advantages"),
        **{name: masked(name) if getattr(chosen[0], name) is not None else None for name in OPTIONAL},
    )


def _ends(parts: list[np.ndarray]) -> Ints:
    return np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
