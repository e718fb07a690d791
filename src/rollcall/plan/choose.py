"""Decides what ``auto`` means on a GPU for micro-batch tokens, recomputation and the KV cache, and warns if too little memory makes a
run slow. This is pure arithmetic: ``rollcall plan`` passes estimates from config.json, and a run measurements of the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollcall.base.words import counted, size
from rollcall.config import Config, OptimizerSection, RolloutSection
from rollcall.config.sections import OptimizerChoice
from rollcall.plan.activations import WIDE, DecoderSizes, Passes, Recompute

MOST_TOKENS = 32768  # larger micro-batches are at most a few percent faster, but take memory from the KV cache
ENOUGH_TOKENS = 8192  # smaller micro-batches cost more than recomputing the layers
KV_SHARE = 0.3  # share of the free GPU memory that the KV cache gets before micro-batches grow, if it can use that much
SAFE = 0.92  # usable share of a GPU: the allocator cannot use all of it
KV_BLOCK = 64  # tokens
FILL_TOKENS = 32768  # the native engine prefills prompts in packs of this size
KV_FRACTION = 0.3  # share of a GPU's memory, if `rollout.kv_memory_fraction` is auto and nothing better is known
FEW = 8  # an engine is slow if it can decode less than 1/FEW of its completions at once
SMALL = ENOUGH_TOKENS // 4  # micro-batches with fewer tokens are memory-bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The memory of a measured pass, as a linear function of its tokens."""

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


Needs = Passes | Line  # converts between the tokens of a pass and the bytes that it needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    tokens: int
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """The minimum and maximum bytes of KV cache that an engine can use."""

    least: int  # for one sequence
    most: int  # for ``max_running`` sequences

    def of(self, room: int) -> int:
        return min(self.most, max(self.least, room))


NO_KV = KvNeed(least=0, most=0)


def choose(
    section: OptimizerSection, *, room: int, passes: Callable[[Recompute], Needs], longest: int, kv: KvNeed
) -> Choice:
    """Choose what fits in ``room`` bytes. ``passes`` returns the memory needs of a pass. ``longest`` is the number of tokens in the
    longest row; rows are never split."""
    given, wanted = section.tokens_per_microbatch, section.activation_checkpointing
    enough = max(ENOUGH_TOKENS, longest) if given == "auto" else given
    left = room - kv.of(int(room * KV_SHARE))
    recompute = Recompute.of(wanted)
    if wanted == "auto" and passes(recompute).tokens_in(left) < enough:
        recompute = Recompute.YES
        # Host memory is the last resort, because it needs a fast bus.
        if passes(recompute).tokens_in(room - kv.least) < (longest if given == "auto" else given):
            recompute = Recompute.ON_HOST
    if given != "auto":
        return Choice(tokens=given, recompute=recompute)
    fits = passes(recompute).tokens_in(left)
    if fits < longest:  # give the KV cache less memory
        fits = passes(recompute).tokens_in(room - kv.least)
    return Choice(tokens=max(longest, min(MOST_TOKENS, fits)), recompute=recompute)


# The engine


def kv_is_open(rollout: RolloutSection) -> bool:
    """Whether the KV cache gets the memory that the learners leave free."""
    return rollout.engine == "native" and rollout.kv_tokens is None and rollout.kv_memory_fraction == "auto"


def kv_fraction(rollout: RolloutSection) -> float:
    return KV_FRACTION if rollout.kv_memory_fraction == "auto" else rollout.kv_memory_fraction


class EngineNeeds:
    """Bytes that an engine needs on one slot in addition to its weights: KV cache and working memory."""

    def __init__(self, *, config: Config, sizes: DecoderSizes, positions: int, width: int, tensor: int) -> None:
        """``positions``: those of the model. ``width``: bytes per weight. ``tensor``: slots over which vLLM splits the model; 1 for the
        native engine."""
        self.config, self.positions, self.tensor = config, positions, tensor
        data, rollout = config.data, config.rollout
        # With more slots than KV heads, each slot has one head.
        self.kv_per_token = 2 * sizes.layers * max(1, sizes.kv_heads // tensor) * sizes.head_dim * width
        # The most tokens that a prompt and its completion can have. A conversation may grow until it fills all positions.
        self.longest = min(data.max_prompt_tokens + rollout.max_response_tokens, positions)
        self.open_kv = self._kv_need(self.longest if config.environment is None else positions)
        # Working memory while prompts are prefilled.
        tokens = min(FILL_TOKENS, rollout.max_running * data.max_prompt_tokens)
        self.filling = tokens * sizes.working_elements(tensor) * width
        # The logits of a decode step: one copy that the step's CUDA graph keeps, and one from before the capture.
        self.graphs = 2 * rollout.max_running * sizes.vocab * WIDE

    def fixed_kv(self, card: int) -> int:
        """Return the bytes of KV cache that the run file sets, on a GPU with ``card`` bytes of memory."""
        rollout = self.config.rollout
        if rollout.kv_tokens is not None:
            return rollout.kv_tokens * self.kv_per_token
        return min(int(card * kv_fraction(rollout)), self._kv_need(self.positions).most)

    def _kv_need(self, longest: int) -> KvNeed:
        least = -(-longest // KV_BLOCK) * KV_BLOCK * self.kv_per_token
        return KvNeed(least=least, most=self.config.rollout.max_running * least)


# Messages


def on_kv(config: Config, *, tokens: int, longest: int, per_token: int, num_engines: int) -> str | None:
    """Warn about a small KV cache that ``auto`` chose. ``longest`` is the most tokens that a prompt and its completion can have."""
    at_once = min(config.rollout.max_running, -(-config.completions_per_step // num_engines))
    rows = max(1, tokens // longest)
    if rows * FEW >= at_once:
        return None
    missing = size((at_once - rows) * longest * per_token)
    return (
        f"an engine gets {at_once} completions of up to {longest} tokens in a step, but the KV cache has room for only {rows} of them, so "
        f"decoding takes up to {at_once // rows} times as long as it would with {missing} more memory. {_more_room(config)}"
    )


def on_microbatch(
    config: Config, name: str, *, tokens: int, longest: int, num_ranks: int, needed: int = 0, room: int = 0
) -> str | None:
    """Warn about a small micro-batch that ``auto`` chose for the learner ``name``. ``needed`` is the number of bytes for a pass, and
    ``room`` the number of free bytes."""
    section = config.critic if name == "critic" else config.actor
    rows = -(-config.completions_per_step // (section.minibatches * num_ranks))
    passes = -(-rows * longest // tokens)
    if needed > room:
        cost = f"and even that needs an estimated {size(needed)}, while {size(max(room, 0))} are free"
    elif tokens < SMALL and passes > FEW:
        cost = f"so an update of {counted(rows, 'completion')} takes up to {passes} passes, each too small to keep the card busy"
    else:
        return None
    return f"{name}: a micro-batch has room for {tokens} tokens, {cost}. {_more_room(config)}"


def _more_room(config: Config) -> str:
    actor, ways = config.actor, ["lower rollout.max_response_tokens or data.max_prompt_tokens"]
    if config.model.lora is None:
        ways.insert(0, "train an adapter (model.lora.rank=16)")
        if actor.optimizer == OptimizerChoice() and actor.master_weights and not actor.cpu_offload:
            ways.insert(0, "set actor.optimizer.state=bfloat16")
    return f"To make room: {', '.join(ways)}, or use more cards (cluster.component_placement, actor.sharding=fsdp)"
