"""What the trained model computes when it is saved: the log-probs of a few fixed rows of tokens.

A model directory that is made of the checkpoint later must compute the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollcall.config.yaml import read_small
from rollcall.errors import CheckpointError
from rollcall.learner.learner import Learner, score_samples
from rollcall.types import Completion, Sample
from rollcall.version import __version__

ROW_LENGTHS = (8, 16, 32, 48)  # tokens; enough for rotary positions and sliding windows to matter
_STRIDE = 0.6180339887498949  # the golden ratio's fraction: its multiples spread evenly over the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedProbe:
    """``logprobs[r][t]`` is the log-prob of ``rows[r][t + 1]`` after the tokens before it, at temperature 1."""

    rows: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float | None]]  # None: it was not finite
    dtype: str  # of the weights, in which the learner computes
    rollcall: str
    torch: str
    beside: Mapping[str, str] = field(default_factory=dict)  # checksums of the config files (``config_files.py``)
    # Of the weights that an adapter is added to, an identity for each type (``model/base.py``); empty: there is no adapter.
    base: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> str:
        return json.dumps({"format": 1, **asdict(self)}, indent=1)


def probe_of(learner: Learner) -> TrainedProbe | None:
    """On the gang's first rank; None on the others, which take part where no rank can score alone."""
    body = learner.body
    if not body.together and learner.gang.rank != 0:
        return None
    config = learner.model.config
    rows = probe_rows(config.vocab_size, longest=getattr(config, "max_position_embeddings", None) or ROW_LENGTHS[-1])
    scores = score_samples(
        body, [_sample(row, draw=draw) for draw, row in enumerate(rows)], learner.section, temperature=1.0
    )
    base = learner.base_identities
    if learner.gang.rank != 0:
        return None
    return TrainedProbe(
        rows=rows,
        logprobs=[[_finite(value) for value in score.logprobs.tolist()] for score in scores],
        dtype=str(learner.model.dtype).removeprefix("torch."),
        rollcall=__version__,
        torch=torch.__version__,
        base=base,
    )


def probe_rows(vocabulary: int, *, longest: int) -> list[list[int]]:
    """The same rows for the same vocabulary; no two rows begin alike, and neighbours are far apart in it.

    >>> probe_rows(10, longest=4)
    [[6, 2, 8, 4], [0, 7, 3, 9], [5, 1, 7, 4], [0, 6, 2, 8]]
    """
    lengths = [max(2, min(length, longest)) for length in ROW_LENGTHS]
    ends = np.cumsum(lengths)
    ids = [int(vocabulary * math.fmod((place + 1) * _STRIDE, 1.0)) for place in range(int(ends[-1]))]
    return [ids[end - length : end] for length, end in zip(lengths, ends.tolist(), strict=True)]


def _sample(row: Sequence[int], *, draw: int) -> Sample:
    ids = np.array(row, dtype=np.int32)
    return Sample.of(Completion.given(ids[1:]), draw=draw, attempt=0, prompt_ids=ids[:1])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_probe(path: Path) -> TrainedProbe:
    """What ``TrainedProbe.dump`` wrote; anything else is refused."""
    try:
        found: Any = json.loads(read_small(path))
        found.setdefault("beside", {})  # earlier versions noted none
        if isinstance(found.setdefault("base", {}), str):  # what earlier versions noted cannot be compared
            found["base"] = {}
        probe = TrainedProbe(**{name: found[name] for name in TrainedProbe.__dataclass_fields__})
        pairs = zip(probe.rows, probe.logprobs, strict=True)
        sound = found["format"] == 1 and probe.rows and all(len(row) == len(own) + 1 for row, own in pairs)
        numbers = [value for own in probe.logprobs for value in own if value is not None]
        sound = sound and all(isinstance(token, int) and token >= 0 for row in probe.rows for token in row)
        sound = sound and all(isinstance(value, float | int) and math.isfinite(value) for value in numbers)
        noted = [*probe.beside.items(), *probe.base.items()]
        sound = sound and all(isinstance(one, str) for pair in noted for one in pair)
        sound = sound and isinstance(getattr(torch, str(probe.dtype), None), torch.dtype)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so what the trained model computed is not known; give a checkpoint or an exported model "
            "that this version of Rollcall saved"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a probe of a saved model: {type(error).__name__} {error}") from error
    if not sound:
        raise CheckpointError(f"{path} is not a probe of a saved model: its rows and log-probs do not fit together")
    return probe
