"""Estimates an engine's GPU memory besides its weights: KV and working memory. Pure arithmetic: ``rollcall plan`` passes in the sizes
from config.json, and a run passes in those of the loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from rollcall.config import Config, RolloutSection
from rollcall.plan.activations import WIDE, DecoderSizes
from rollcall.plan.choose import KV_BLOCK, KvNeed

FILL_TOKENS = 32768  # the native engine prefills prompts in packs of this size
KV_FRACTION = 0.3  # of a GPU, if `rollout.kv_memory_fraction` is auto and nothing better is known


def kv_is_open(rollout: RolloutSection) -> bool:
    """Whether KV gets the memory that the learners leave free."""
    return rollout.engine == "native" and rollout.kv_tokens is None and rollout.kv_memory_fraction == "auto"


def kv_fraction(rollout: RolloutSection) -> float:
    return KV_FRACTION if rollout.kv_memory_fraction == "auto" else rollout.kv_memory_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """Bytes on one slot."""

    config: Config
    sizes: DecoderSizes
    positions: int  # of the model
    width: int  # bytes per weight
    tensor: int  # slots over which vLLM splits the model; 1 for the native engine

    @property
    def kv_per_token(self) -> int:
        """Bytes of KV per token on one slot. If there are more slots than KV heads, each slot has one head."""
        heads = max(1, self.sizes.kv_heads // self.tensor)
        return 2 * self.sizes.layers * heads * self.sizes.head_dim * self.width

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its completion can have."""
        return min(self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens, self.positions)

    @property
    def open_kv(self) -> KvNeed:
        # A conversation may grow until it fills all positions of the model.
        longest = self.longest if self.config.environment is None else self.positions
        return self._kv_need(longest)

    def fixed_kv(self, card: int) -> int:
        """Return the KV bytes that the run file sets, on a GPU with ``card`` bytes."""
        rollout = self.config.rollout
        if rollout.kv_tokens is not None:
            return rollout.kv_tokens * self.kv_per_token
        return min(int(card * kv_fraction(rollout)), self._kv_need(self.positions).most)

    def _kv_need(self, longest: int) -> KvNeed:
        least = -(-longest // KV_BLOCK) * KV_BLOCK * self.kv_per_token
        return KvNeed(least=least, most=self.config.rollout.max_running * least)

    @property
    def filling(self) -> int:
        """Working memory while prompts are prefilled."""
        tokens = min(FILL_TOKENS, self.config.rollout.max_running * self.config.data.max_prompt_tokens)
        return tokens * self.sizes.working_elements(self.tensor) * self.width

    @property
    def graphs(self) -> int:
        """The logits of a decode step: one copy kept by its CUDA graph and one from before it was captured."""
        return 2 * self.config.rollout.max_running * self.sizes.vocab * WIDE
