"""Chooses what ``auto`` means on a card: tokens of a micro-batch, whether layers run again, room for KV. Pure arithmetic:
``rollcall plan`` gives it the estimate of a pass, a run the measured one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollcall.config import OptimizerSection
from rollcall.plan.activations import Recompute

MOST_TOKENS = 32768  # larger micro-batches are a few percent faster at most, and take memory from KV
ENOUGH_TOKENS = 8192  # smaller ones cost more than to run the layers again
KV_SHARE = 0.3  # of the room on a card that KV gets before micro-batches grow, if it can use that much
SAFE = 0.92  # of a card: the allocator cannot use all of it
KV_BLOCK = 64  # tokens


class Needs(Protocol):
    """The bytes that a pass over a number of tokens needs, and the tokens that fit in a number of bytes: ``Passes``, ``Line``."""

    def peak(self, tokens: int) -> int: ...
    def tokens_in(self, room: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A measured pass."""

    fixed: int
    per_token: float

    def peak(self, tokens: int) -> int:
        return int(self.fixed + self.per_token * tokens)

    def tokens_in(self, room: int) -> int:
        return max(0, int((room - self.fixed) / max(self.per_token, 1e-9)))

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int], *, at_least: float) -> Line:
        """Through two measurements (tokens, bytes). Per token no less than ``at_least``: at small sizes something else is larger.

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

    least: int  # of one sequence
    most: int  # that ``max_running`` sequences can use

    def first(self, room: int) -> int:
        """Bytes set aside before micro-batches are sized."""
        return min(self.most, max(self.least, int(room * KV_SHARE)))

    def of(self, room: int) -> int:
        return min(self.most, max(self.least, room))


NO_KV = KvNeed(least=0, most=0)


def choose(
    section: OptimizerSection, *, room: int, passes: Callable[[Recompute], Needs], longest: int, kv: KvNeed
) -> Choice:
    """Within ``room`` bytes. ``passes`` gives the needs of a pass; ``longest`` is a row, which is never split."""
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
    if fits < longest:  # KV has to do with less
        fits = passes(recompute).tokens_in(room - kv.least)
    return Choice(tokens=max(longest, min(MOST_TOKENS, fits)), recompute=recompute)
