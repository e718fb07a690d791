"""Memory of one micro-batch in the learner, besides weights, optimizer state and summed gradients: arithmetic that follows the code
that runs it. Pure: no torch.

A backward has three moments at which memory is largest, and ``Passes.peak`` is the largest of them:

- head: all layers keep their activations, and a chunk of logits is differentiated (``learner/logprobs.py``). Logits that are kept
  from the forward only because a card has room are not a need, and not counted;
- layers: the last layer is differentiated, while all others still keep theirs;
- end: nothing is kept any more, and the gradient of every weight is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

LOGITS_AT_ONCE = 1 << 29  # elements; the learner makes logits in chunks of this size
COMPILE_FROM = 50_000_000  # parameters; below, compiling a learner on a GPU costs more than it saves
WIDE = 4  # bytes of a float32
ON_CARD = 3  # inputs of layers there at once, where they wait in host memory: two on their way, one in use


class Recompute(IntEnum):
    """The activations that layers keep for the backward, from the most memory to the least. All but NO run the layers again."""

    NO = 0  # everything
    YES = 1  # their inputs
    ON_HOST = 2  # their inputs, in host memory

    @classmethod
    def of(cls, setting: bool | Literal["auto", "offload"]) -> Recompute:
        """From ``activation_checkpointing``; `auto` begins with NO."""
        return cls.ON_HOST if setting == "offload" else cls.YES if setting is True else cls.NO

    @property
    def setting(self) -> str:
        """The value of ``activation_checkpointing`` in a run file."""
        return ("false", "true", "offload")[self]

    @property
    def sentence(self) -> str:
        """The words that follow the size of a micro-batch."""
        kept = ", their inputs wait in host memory" if self is Recompute.ON_HOST else ""
        return f", layers run again in the backward{kept}" if self else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """The sizes of a decoder on which its activations depend."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def working_elements(self, tensor: int) -> int:
        """Numbers alive at once for one token in a forward pass without gradients, which is not compiled."""
        return 3 * self.hidden + max((self.heads + 2 * self.kv_heads) * self.head_dim, 4 * self.intermediate) // tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The forward and backward passes of one learner on one rank."""

    sizes: DecoderSizes
    width: int  # bytes of a weight
    num_parameters: int  # whose gradients this rank holds at the end of a backward
    gradient_width: int  # bytes of a number in them
    has_head: bool  # logits; a critic has none
    tensor: int = 1  # ranks over which heads and MLP columns are divided
    compiled: bool = True
    recompute: Recompute = Recompute.NO
    frozen: bool = False  # embeddings and head have no gradient: an adapter of the layers is trained
    held: int = 0  # bytes that are in memory during the passes: the sums of gradients

    def peak(self, tokens: int) -> int:
        return self.held + max(self.at_head(tokens), self.at_layers(tokens), self.at_end(tokens))

    def tokens_in(self, room: int) -> int:
        """The largest number of tokens whose peak is at most ``room``."""
        low, high = 0, 1
        while self.peak(high) <= room and high < 1 << 40:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle) <= room else (low, middle)
        return low

    def at_head(self, tokens: int) -> int:
        if not self.has_head:
            return tokens * (self._kept_of_all + self._around)
        sizes = self.sizes
        logits = min(tokens // self.tensor * sizes.vocab, LOGITS_AT_ONCE)
        chunk = (WIDE + self.width) * logits  # and their gradient
        gradient = 0 if self.frozen else WIDE * sizes.vocab * sizes.hidden
        return tokens * (self._kept_of_all + self._around) + gradient + chunk

    def at_layers(self, tokens: int) -> int:
        """The gradient of the head waits for that of the embeddings, which are the same weight or come last."""
        head = self.sizes.vocab * self.sizes.hidden * self.width if self.has_head and not self.frozen else 0
        again = self.kept_per_layer if self.recompute else 0
        return tokens * (self._kept_of_all + again + self._gradients_of_layer) + head

    def at_end(self, tokens: int) -> int:
        """And the gradient of the embeddings, before it is added to the head's."""
        embeddings = 0 if self.frozen else self.sizes.vocab * self.sizes.hidden * self.width
        return self.num_parameters * self.gradient_width + embeddings + tokens * self._gradients_of_layer

    @property
    def kept_per_layer(self) -> int:
        """Bytes that one layer keeps for one token until its backward, if it keeps all: the inputs of its norms and of its
        products, queries, keys, values and the outcome of attention with its sums."""
        sizes = self.sizes
        attention = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim * self.width + WIDE * sizes.heads
        if self.compiled:
            norms = 4 * sizes.hidden * self.width
            gated = 3 * sizes.intermediate * self.width
        else:  # each norm also keeps its float32 form, the gate also its activation
            norms = 2 * sizes.hidden * (WIDE + 2 * self.width)
            gated = 4 * sizes.intermediate * self.width
        return norms + (attention + gated) // self.tensor

    @property
    def _kept_of_all(self) -> int:
        if self.recompute is Recompute.NO:
            return self.sizes.layers * self.kept_per_layer
        layers = min(self.sizes.layers, ON_CARD) if self.recompute is Recompute.ON_HOST else self.sizes.layers
        return layers * self._input_of_layer

    def on_host(self, tokens: int) -> int:
        """Bytes of pinned host memory; torch rounds each piece up to a power of two."""
        if self.recompute is not Recompute.ON_HOST:
            return 0
        return self.sizes.layers * (1 << (tokens * self._input_of_layer - 1).bit_length())

    @property
    def _input_of_layer(self) -> int:
        return self.sizes.hidden * self.width

    @property
    def _around(self) -> int:
        """Of one token outside the layers: the final norm, which is not compiled, the rows that are predicted, their gradient."""
        return self.sizes.hidden * (WIDE + 4 * self.width)

    @property
    def _gradients_of_layer(self) -> int:
        """Of one token, alive at once while a layer is differentiated: around the MLP, where they are largest."""
        return (3 * self.sizes.hidden + 3 * self.sizes.intermediate // self.tensor) * self.width
