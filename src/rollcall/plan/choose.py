"""Chooses what ``auto`` means on a GPU: micro-batch tokens, recomputation, room for KV. Pure arithmetic:
``rollcall plan`` passes in an estimate for a pass, and a run passes in a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollcall.config import OptimizerSection
from rollcall.plan.activations import Recompute

MOST_TOKENS = 32768  # larger micro-batches are at most a few percent faster, but take memory from KV
ENOUGH_TOKENS = 8192  # smaller micro-batches cost more than recomputing the layers
KV_SHARE = 0.3  # share of the room on a GPU that KV gets before micro-batches grow, if it can use that much
SAFE = 0.92  # usable share of a GPU: the allocator cannot use all of it
KV_BLOCK = 64  # tokens


class Needs(Protocol):
    """How many bytes a pass over some tokens needs, and how many tokens fit in some bytes: ``Passes``, ``Line``."""

    def peak(self, tokens: int) -> int: ...
    def tokens_in(self, room: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A measured pass, as a linear function of its tokens."""

    fixed: int
    per_token: float

    def peak(self, tokens: int) -> int:
        return int(self.fixed + self.per_token * tokens)

    def tokens_in(self, room: int) -> int:
        return max(0, int((room - self.fixed) / max(self.per_token, 1e-9)))

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int], *, at_least: float) -> Line:
        """Fit two measurements (tokens, bytes). The slope is at least ``at_least``, because at small sizes other memory dominates.

        >>> Line.through((100, 5_000), (200, 9_000), at_least=10.0)
        Line(fixed=1000, per_token=40.0)
        """
        per_token = max((many[1] - few[1]) / (many[0] - few[0]), at_least)
        return cls(fixed=max(0, int(many[1] - per_token * many[0])), per_token=per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    tokens: int
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """Bytes of KV cache."""

    least: int  # for one sequence
    most: int  # for ``max_running`` sequences

    def first(self, room: int) -> int:
        """Return the bytes to set aside before micro-batches are sized."""
        return min(self.most, max(self.least, int(room * KV_SHARE)))

    def of(self, room: int) -> int:
        return min(self.most, max(self.least, room))


NO_KV = KvNeed(least=0, most=0)


def choose(
    section: OptimizerSection, *, room: int, passes: Callable[[Recompute], Needs], longest: int, kv: KvNeed
) -> Choice:
    """Choose within ``room`` bytes. ``passes`` returns the needs of a pass. ``longest`` is the longest row; rows are never split."""
    given, wanted = section.tokens_per_microbatch, section.activation_checkpointing
    enough = max(ENOUGH_TOKENS, longest) if given == "auto" else given
    left = room - kv.first(room)
    recompute = Recompute.of(wanted)
    if wanted == "auto" and passes(recompute).tokens_in(left) < enough:
        recompute = Recompute.YES
        # Host memory is the last resort, since it needs a bus that keeps up.
        if passes(recompute).tokens_in(room - kv.least) < (longest if given == "auto" else given):
            recompute = Recompute.ON_HOST
    if given != "auto":
        return Choice(tokens=given, recompute=recompute)
    fits = passes(recompute).tokens_in(left)
    if fits < longest:  # KV has to make do with less
        fits = passes(recompute).tokens_in(room - kv.least)
    return Choice(tokens=max(longest, min(MOST_TOKENS, fits)), recompute=recompute)
