"""Records a probe with a saved model: log-probs for a few fixed token rows, and checksums of its config files.

A model directory that is built from the checkpoint later must compute the same log-probs. Config files, tokenizer and chat template must
not change either: a wrong tokenizer or stop token does not change the log-probs of given tokens, and a slightly wrong config may
change them by less than rounding does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from rollcall.base.errors import CheckpointError
from rollcall.base.types import Completion, Sample
from rollcall.base.version import __version__
from rollcall.config.yaml import read_small
from rollcall.learner.learner import Learner, score_samples
from rollcall.model.stored.find import PROBE

ROW_LENGTHS = (8, 16, 32, 48)  # in tokens; long enough to test rotary positions and sliding windows
ENDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# A merge or a different precision may change these fields of config.json.
_FREE = ("dtype", "torch_dtype", "_name_or_path", "transformers_version")
_STRIDE = 0.6180339887498949  # fractional part of the golden ratio; its multiples spread evenly over the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedProbe:
    """``logprobs[r][t]`` is the log-prob of ``rows[r][t + 1]`` given the preceding tokens, at temperature 1."""

    rows: Sequence[Sequence[NonNegativeInt]]
    logprobs: Sequence[Sequence[FiniteFloat | None]]  # None if it was not finite
    dtype: str  # dtype of the weights, in which the learner computes
    rollcall: str
    torch: str
    beside: Mapping[str, str] = field(default_factory=dict)  # checksums of the config files
    # A fingerprint for each dtype of the weights that an adapter is added to (``model/base.py``). Empty without an adapter.
    base: Mapping[str, str] = field(default_factory=dict)
    format: Literal[1] = 1

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1)


def probe_of(learner: Learner) -> TrainedProbe | None:
    """Compute the probe on the gang's first rank. Other ranks return None, but must also call this, because the model may be sharded."""
    body = learner.body
    if not body.together and learner.gang.rank != 0:
        return None
    config = learner.model.config
    rows = probe_rows(config.vocab_size, longest=getattr(config, "max_position_embeddings", None) or ROW_LENGTHS[-1])
    ids = [np.array(row, dtype=np.int32) for row in rows]
    samples = [
        Sample.of(Completion.given(row[1:]), draw=draw, attempt=0, prompt_ids=row[:1]) for draw, row in enumerate(ids)
    ]
    scores = score_samples(body, samples, learner.section, temperature=1.0)
    base = learner.base_identities
    if learner.gang.rank != 0:
        return None
    return TrainedProbe(
        rows=rows,
        logprobs=[[one if math.isfinite(one) else None for one in score.logprobs.tolist()] for score in scores],
        dtype=str(learner.model.dtype).removeprefix("torch."),
        rollcall=__version__,
        torch=torch.__version__,
        base=base,
    )


def probe_rows(vocabulary: int, *, longest: int) -> list[list[int]]:
    """Return fixed token rows. They start differently, and neighbouring tokens are far apart in the vocabulary.

    >>> probe_rows(10, longest=4)
    [[6, 2, 8, 4], [0, 7, 3, 9], [5, 1, 7, 4], [0, 6, 2, 8]]
    """
    lengths = [max(2, min(length, longest)) for length in ROW_LENGTHS]
    ends = np.cumsum(lengths)
    ids = [int(vocabulary * math.fmod((place + 1) * _STRIDE, 1.0)) for place in range(int(ends[-1]))]
    return [ids[end - length : end] for length, end in zip(lengths, ends.tolist(), strict=True)]


_READER = TypeAdapter(TrainedProbe)


def read_probe(path: Path) -> TrainedProbe:
    """Read a file that ``TrainedProbe.dump`` wrote. Raises ``CheckpointError`` on anything else."""
    try:
        probe = _READER.validate_json(read_small(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so nothing records what the trained model computed; use a checkpoint or an exported model "
            "that this version of Rollcall saved"
        ) from None
    except (OSError, ValueError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{path} is not a probe of a saved model: {why}") from error
    pairs = zip(probe.rows, probe.logprobs, strict=False)
    fits = len(probe.rows) == len(probe.logprobs) > 0 and all(len(row) == len(own) + 1 for row, own in pairs)
    if not fits or not isinstance(getattr(torch, probe.dtype, None), torch.dtype):
        raise CheckpointError(f"{path} is not a probe of a saved model: its rows and log-probs do not match")
    return probe


def describe_config_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return a checksum for each file name. In configs, it covers only fields that neither a conversion nor a user may change."""
    known = {name: data for name, data in sorted(files.items()) if name.endswith(ENDS)}
    return {name: blake2b(_meaning(name, data), digest_size=16).hexdigest() for name, data in known.items()}


def with_probe(files: Mapping[str, bytes], probe: TrainedProbe) -> dict[str, bytes]:
    """Return the config files together with the probe, which records their checksums."""
    return {**files, PROBE: replace(probe, beside=describe_config_files(files)).dump().encode()}


def changed_config_files(folder: Path, described: Mapping[str, str]) -> list[str]:
    """Return the files that differ from ``described``, including new templates."""
    names = {*described, *(path.name for path in folder.glob("*.jinja"))} if described else set()
    there = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    now = describe_config_files(there)
    return sorted(name for name in names if now.get(name) != described.get(name))


def _meaning(name: str, data: bytes) -> bytes:
    if name not in ("config.json", "generation_config.json"):
        return data
    try:
        pairs, is_config = json.loads(data).items(), name == "config.json"
        kept = {key: value for key, value in pairs if (key not in _FREE if is_config else key.endswith("_token_id"))}
    except (ValueError, AttributeError, RecursionError):
        return data
    return json.dumps(kept, sort_keys=True).encode()
