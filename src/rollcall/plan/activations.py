"""Estimates the learner's memory for one micro-batch, in addition to weights, optimizer state and summed gradients. The arithmetic
mirrors the learner's code and needs no torch.

A backward pass has three points where memory may peak, and ``Passes.peak`` is the maximum over them:

- head: all layers keep their activations while a chunk of logits is differentiated (``learner/logprobs.py``). Logits that are kept
  from the forward pass only because the GPU has room are not counted;
- layers: the last layer is differentiated while all others still keep their activations;
- end: no activations are left, but the gradient of every weight exists.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

LOGITS_AT_ONCE = 1 << 29  # elements; the learner computes logits in chunks of this size
COMPILE_FROM = 50_000_000  # parameters; below this, compiling a learner on a GPU costs more than it saves
WIDE = 4  # bytes per float32
ON_CARD = 3  # layer inputs on the GPU at once when inputs are offloaded to the host: two in transit, one in use


class Recompute(IntEnum):
    """The options for what layers keep for the backward pass, from most to least memory. All but NO recompute the layers."""

    NO = 0  # everything
    YES = 1  # their inputs
    ON_HOST = 2  # their inputs, in host memory

    @classmethod
    def of(cls, setting: bool | Literal["auto", "offload"]) -> Recompute:
        """Convert the setting ``activation_checkpointing``. For ``auto``, return NO, the first choice."""
        return cls.ON_HOST if setting == "offload" else cls.YES if setting is True else cls.NO

    @property
    def setting(self) -> str:
        """The value of ``activation_checkpointing`` in a run file."""
        return ("false", "true", "offload")[self]

    @property
    def sentence(self) -> str:
        """The phrase that messages append to the size of a micro-batch."""
        kept = " from inputs in host memory" if self is Recompute.ON_HOST else ""
        return f", with layers recomputed in the backward pass{kept}" if self else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """The sizes of a decoder that determine how much memory its activations take."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def working_elements(self, tensor: int) -> int:
        """Return how many elements per token are alive at once in an uncompiled forward pass without gradients."""
        return 3 * self.hidden + max((self.heads + 2 * self.kv_heads) * self.head_dim, 4 * self.intermediate) // tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The forward and backward passes of one learner on one rank."""

    sizes: DecoderSizes
    width: int  # bytes per weight
    num_parameters: int  # the parameters whose gradients this rank has at the end of a backward pass
    gradient_width: int  # bytes per gradient element
    has_head: bool  # whether the model computes logits; a critic does not
    tensor: int = 1  # ranks over which heads and MLP columns are split
    compiled: bool = True
    recompute: Recompute = Recompute.NO
    frozen: bool = False  # embeddings and head have no gradient because only an adapter is trained
    held: int = 0  # bytes in memory throughout the passes: the gradient sums

    def peak(self, tokens: int) -> int:
        return self.held + max(self.at_head(tokens), self.at_layers(tokens), self.at_end(tokens))

    def tokens_in(self, room: int) -> int:
        """Return the largest number of tokens whose peak is at most ``room``."""
        return max(0, bisect_right(range(1 << 40), room, key=self.peak) - 1)

    def at_head(self, tokens: int) -> int:
        sizes = self.sizes
        # Outside the layers: the final norm (not compiled), the rows that predict tokens, and their gradient.
        kept = tokens * (self._kept_of_all + sizes.hidden * (WIDE + 4 * self.width))
        if not self.has_head:
            return kept
        logits = min(tokens // self.tensor * sizes.vocab, LOGITS_AT_ONCE)
        chunk = (WIDE + self.width) * logits  # the logits and their gradient
        gradient = 0 if self.frozen else WIDE * sizes.vocab * sizes.hidden
        return kept + gradient + chunk

    def at_layers(self, tokens: int) -> int:
        """Includes the head's gradient. It is kept until the embeddings' gradient exists, because embeddings and head share a weight or
        because the embeddings come last."""
        head = self.sizes.vocab * self.sizes.hidden * self.width if self.has_head and not self.frozen else 0
        again = self.kept_per_layer if self.recompute else 0
        return tokens * (self._kept_of_all + again + self._gradients_of_layer) + head

    def at_end(self, tokens: int) -> int:
        """Includes the embeddings' gradient before it is added to the head's."""
        embeddings = 0 if self.frozen else self.sizes.vocab * self.sizes.hidden * self.width
        return self.num_parameters * self.gradient_width + embeddings + tokens * self._gradients_of_layer

    @property
    def kept_per_layer(self) -> int:
        """Bytes per token that a layer keeps until its backward pass if it keeps everything: the inputs to its norms and
        matrix products, queries, keys, values, and the attention output with its log-sum-exps."""
        sizes = self.sizes
        attention = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim * self.width + WIDE * sizes.heads
        if self.compiled:
            norms = 4 * sizes.hidden * self.width
            gated = 3 * sizes.intermediate * self.width
        else:  # each norm also keeps its float32 version, and the gate its activation
            norms = 2 * sizes.hidden * (WIDE + 2 * self.width)
            gated = 4 * sizes.intermediate * self.width
        return norms + (attention + gated) // self.tensor

    @property
    def _kept_of_all(self) -> int:
        if self.recompute is Recompute.NO:
            return self.sizes.layers * self.kept_per_layer
        layers = min(self.sizes.layers, ON_CARD) if self.recompute is Recompute.ON_HOST else self.sizes.layers
        return layers * self.sizes.hidden * self.width

    def on_host(self, tokens: int) -> int:
        """Return the bytes of pinned host memory. torch rounds each piece up to a power of two."""
        if self.recompute is not Recompute.ON_HOST:
            return 0
        return self.sizes.layers * (1 << (tokens * self.sizes.hidden * self.width - 1).bit_length())

    @property
    def _gradients_of_layer(self) -> int:
        """The peak memory of gradients while a layer is differentiated, in bytes per token. It is reached around the MLP."""
        return (3 * self.sizes.hidden + 3 * self.sizes.intermediate // self.tensor) * self.width
