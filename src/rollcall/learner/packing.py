"""Samples into micro-batches: rows packed end to end under a token budget, each shared prompt laid out once.

A row with response tokens r0..rn feeds r0..r(n-1); r0 is predicted by the prompt's last token. Rows of one group
that meet in a micro-batch share the prompt's tokens, so the prompt's share of the work is paid once, not once per
completion. Rows are never split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollcall.types import Floats, MicroBatch, Sample

OPTIONAL = ("old_logprobs", "reference_logprobs", "returns", "values")


def pack(
    samples: Sequence[Sample],
    *,
    weights: Floats,
    tokens_per_microbatch: int,
    max_rows: int | None = None,
) -> list[MicroBatch]:
    """Pack in the given order. ``weights[i]`` is the loss weight of each loss token of sample ``i``.

    Samples without a loss token cost nothing and are left out. ``max_rows`` bounds the rows of a micro-batch beside its
    tokens.
    """
    batches: list[list[int]] = []
    spent = 0
    draws: set[int] = set()
    for index, sample in enumerate(samples):
        if not sample.mask.any():
            continue
        own = max(len(sample.response_ids) - 1, 0)
        cost = own + (0 if sample.draw in draws else len(sample.prompt_ids))
        full = batches and max_rows is not None and len(batches[-1]) >= max_rows
        if not batches or full or spent + cost > tokens_per_microbatch:
            batches.append([])
            spent, draws = 0, set()
            cost = own + len(sample.prompt_ids)
        batches[-1].append(index)
        spent += cost
        draws.add(sample.draw)
    return [_lay_out(samples, indices, weights) for indices in batches]


def _lay_out(samples: Sequence[Sample], indices: list[int], weights: Floats) -> MicroBatch:
    token_ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    kv_index: list[np.ndarray] = []
    logit_index: list[np.ndarray] = []
    q_lengths: list[int] = []
    k_lengths: list[int] = []
    prompt_start: dict[int, int] = {}
    end = 0

    def append(ids: np.ndarray, first_position: int, keys: np.ndarray) -> None:
        nonlocal end
        token_ids.append(ids)
        positions.append(np.arange(first_position, first_position + len(ids)))
        kv_index.append(keys)
        q_lengths.append(len(ids))
        k_lengths.append(len(keys))
        end += len(ids)

    for index in indices:
        sample = samples[index]
        prompt_length, own = len(sample.prompt_ids), len(sample.response_ids) - 1
        if sample.draw not in prompt_start:
            prompt_start[sample.draw] = end
            append(sample.prompt_ids, 0, np.arange(end, end + prompt_length))
        prompt = np.arange(prompt_start[sample.draw], prompt_start[sample.draw] + prompt_length)
        # The state that predicts response token t: the prompt's last for t = 0, the row's own token t - 1 after that.
        logit_index.append(np.concatenate((prompt[-1:], np.arange(end, end + own)))[sample.mask])
        if own:
            append(sample.response_ids[:-1], prompt_length, np.concatenate((prompt, np.arange(end, end + own))))

    def masked(name: str) -> Floats:
        return np.concatenate([getattr(samples[index], name)[samples[index].mask] for index in indices]).astype(
            np.float32
        )

    optional = {name: masked(name) if getattr(samples[indices[0]], name) is not None else None for name in OPTIONAL}
    counts = [int(samples[index].mask.sum()) for index in indices]
    return MicroBatch(
        token_ids=np.concatenate(token_ids).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        kv_index=np.concatenate(kv_index).astype(np.int64),
        cu_q=np.concatenate(([0], np.cumsum(q_lengths))).astype(np.int32),
        cu_k=np.concatenate(([0], np.cumsum(k_lengths))).astype(np.int32),
        logit_index=np.concatenate(logit_index).astype(np.int64),
        targets=np.concatenate([samples[index].response_ids[samples[index].mask] for index in indices]).astype(
            np.int64
        ),
        row=np.repeat(np.arange(len(indices)), counts).astype(np.int64),
        sample_index=np.array(indices, dtype=np.int64),
        weights=np.repeat(weights[indices], counts).astype(np.float32),
        behaviour_logprobs=masked("behaviour_logprobs"),
        advantages=masked("advantages"),
        **optional,
    )
