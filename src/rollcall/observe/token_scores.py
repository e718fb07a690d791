"""The learner's log-probs and entropies for the tokens of a few groups, in ``run_dir/token_scores/``, one file per saved step.

The journal has the engine's log-probs from sampling. Together they show, token by token, where engine and learner differ and
how confident the policy was.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from rollcall.base.atomic import write_atomic
from rollcall.base.types import Floats, Group

FOLDER = "token_scores"
GROUPS = 4  # per step: enough to look at, and cheap compared to the update


def file_name(step: int) -> str:
    return f"{step:06d}.npz"


def write_token_scores(
    folder: Path, *, step: int, groups: Sequence[Group], logprobs: Sequence[Floats], entropy: Sequence[Floats]
) -> Path:
    """Write a step's file. ``logprobs`` and ``entropy`` have one array per completion, in the order of the groups."""
    counts = [len(completion.token_ids) for group in groups for completion in group.completions]
    assert counts == [len(row) for row in logprobs] == [len(row) for row in entropy], "one number for each token"
    data = io.BytesIO()
    np.savez(
        data,
        draws=np.array([group.draw for group in groups for _ in group.completions], dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        logprobs=np.concatenate([np.zeros(0, dtype=np.float32), *logprobs]),
        entropy=np.concatenate([np.zeros(0, dtype=np.float32), *entropy]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / file_name(step), data.getvalue())
    return folder / file_name(step)


def scores_in(file: IO[bytes], group: Group, *, completion: int) -> dict[str, Floats] | None:
    """Read one completion's values, or None if the file does not contain them or is incomplete."""
    try:
        with np.load(file, allow_pickle=False) as held:
            draws, counts = held["draws"], held["counts"]
            rows = np.flatnonzero(draws == group.draw)
            if len(rows) <= completion or len(draws) != len(counts):
                return None
            row = rows[completion]
            start, count = int(counts[:row].sum()), int(counts[row])
            found = {name: held[name][start : start + count].astype(np.float32) for name in ("logprobs", "entropy")}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, IndexError, TypeError):
        return None
    num_tokens = len(group.completions[completion].token_ids)
    return found if all(len(values) == num_tokens for values in found.values()) else None
