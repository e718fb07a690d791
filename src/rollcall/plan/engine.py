"""Memory of an engine on a card besides its weights: KV and working memory. Pure arithmetic: ``rollcall plan`` gives it the sizes in
config.json, a run those of the model that it has loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rollcall.config import Config, RolloutSection
from rollcall.plan.activations import WIDE, DecoderSizes
from rollcall.plan.choose import KV_BLOCK, KvNeed

FILL_TOKENS = 32768  # the native engine computes the KV of prompts in packs of this size
KV_FRACTION = 0.3  # of a card, where `rollout.kv_memory_fraction` is auto and nothing better is known


def kv_is_open(rollout: RolloutSection) -> bool:
    """Whether KV gets what the learners leave."""
    return rollout.engine == "native" and rollout.kv_tokens is None and rollout.kv_memory_fraction == "auto"


def kv_fraction(rollout: RolloutSection) -> float:
    return KV_FRACTION if rollout.kv_memory_fraction == "auto" else rollout.kv_memory_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """Bytes on one slot."""

    config: Config
    sizes: DecoderSizes
    positions: int  # of the model
    width: int  # bytes of a weight
    tensor: int  # slots over which vLLM divides the model; of the native engine 1

    @property
    def kv_per_token(self) -> int:
        """Where there are more slots than KV heads, each has one."""
        heads = max(1, self.sizes.kv_heads // self.tensor)
        return 2 * self.sizes.layers * heads * self.sizes.head_dim * self.width

    @property
    def longest(self) -> int:
        """Tokens of a prompt and a completion."""
        return min(self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens, self.positions)

    @property
    def open_kv(self) -> KvNeed:
        # A conversation may grow until the model has no more positions.
        longest = self.longest if self.config.environment is None else self.positions
        return self._kv_need(longest)

    def fixed_kv(self, card: int) -> int:
        """Bytes that the run file sets, on a card of ``card`` bytes."""
        rollout = self.config.rollout
        if rollout.kv_tokens is not None:
            return rollout.kv_tokens * self.kv_per_token
        return min(int(card * kv_fraction(rollout)), self._kv_need(self.positions).most)

    def _kv_need(self, longest: int) -> KvNeed:
        least = -(-longest // KV_BLOCK) * KV_BLOCK * self.kv_per_token
        return KvNeed(least=least, most=self.config.rollout.max_running * least)

    @property
    def filling(self) -> int:
        """While prompts are computed."""
        tokens = min(FILL_TOKENS, self.config.rollout.max_running * self.config.data.max_prompt_tokens)
        return tokens * self.sizes.working_elements(self.tensor) * self.width

    @property
    def graphs(self) -> int:
        """The logits of a decode step, once as its graph keeps them and once from before it was captured."""
        return 2 * self.config.rollout.max_running * self.sizes.vocab * WIDE
