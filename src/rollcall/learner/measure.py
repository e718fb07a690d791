"""Runs forward and backward passes with made-up rows, to measure how much memory a micro-batch really takes on this GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rollcall.base.types import Sample
from rollcall.learner import logprobs
from rollcall.learner.fit import accumulate, passes_of, release
from rollcall.learner.learner import Critic, Learner
from rollcall.learner.packing import Packing
from rollcall.plan.choose import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The lengths of a run's longest rows."""

    prompt: int
    response: int
    group: int  # completions per prompt

    def fill(self, tokens: int, *, vocab: int) -> list[Sample]:
        """Create groups of several rows that have about this many tokens when packed."""
        prompt, response = min(self.prompt, max(1, tokens // 8)), min(self.response, max(2, tokens // 4))
        rng = np.random.default_rng(0)
        samples: list[Sample] = []
        draw = count = 0
        while count < tokens:
            ids = rng.integers(0, vocab, prompt).astype(np.int32)
            for attempt in range(self.group):
                if count >= tokens:
                    break
                samples.append(_row(ids, rng.integers(0, vocab, response).astype(np.int32), draw=draw, attempt=attempt))
                count += response + (prompt if attempt == 0 else 0)
            draw += 1
        return samples


def _row(prompt: np.ndarray, response: np.ndarray, *, draw: int, attempt: int) -> Sample:
    nothing = np.zeros(len(response), dtype=np.float32)
    return Sample(
        draw=draw, attempt=attempt, prompt_ids=prompt, response_ids=response,
        mask=np.ones(len(response), dtype=np.bool_), behaviour_logprobs=nothing, old_logprobs=nothing,
        reference_logprobs=nothing, advantages=nothing, returns=nothing, values=nothing,
    )  # fmt: skip


def measured(model: Learner | Critic, rows: Rows) -> Line | None:
    """Measure the extra bytes, including gradient sums, that passes with the model's current ``fit`` need. Return None if there are
    too few tokens to measure. All ranks of a gang must call this together, with the same ``fit``."""
    most = model.fit.tokens
    many, few = most // 2, most // 4
    if few < 8:
        return None
    per_token = passes_of(model.body, model.fit)
    estimated = (per_token.peak(many) - per_token.peak(few)) / (many - few)
    logprobs.may_keep = False
    try:
        _peak(model, rows, few)  # the first run compiles
        points = [(tokens, _peak(model, rows, tokens)) for tokens in (few, many)]
    finally:
        logprobs.may_keep = True
    # If the GPU was too small for this, the passes have lowered ``fit.tokens``.
    if model.fit.tokens < most:
        return None
    return Line.through(*points, at_least=0.5 * estimated)


def _peak(model: Learner | Critic, rows: Rows, tokens: int) -> int:
    """Return the peak memory of two micro-batches. The second runs while the gradient sums of the first are in memory."""
    body, device = model.body, model.body.device
    samples = rows.fill(tokens * body.context.size, vocab=body.whole_shapes["embed"][0])
    twice = [*samples, *(sample.with_(draw=sample.draw + len(samples)) for sample in samples)]
    packing = Packing(samples=twice, weights=np.zeros(len(twice), dtype=np.float32), max_rows=len(samples))
    fit = replace(model.fit, tokens=2 * tokens)  # the row limit decides where the first micro-batch ends
    release(device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    accumulate(body, fit, packing, model._loss, model.optimizer)
    torch.cuda.synchronize(device)
    model.optimizer.discard()
    if fit.tokens < 2 * tokens:
        model.fit.tokens = min(model.fit.tokens, fit.tokens)
    return torch.cuda.max_memory_allocated(device) - before
