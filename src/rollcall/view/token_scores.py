"""What the learner said of the tokens of some groups, as ``loop/token_scores.py`` kept it."""

from __future__ import annotations

import io
from pathlib import Path

from rollcall.observe.token_scores import FOLDER, file_name, scores_in
from rollcall.types import Floats, Group
from rollcall.view.inside import read_inside
from rollcall.view.trained import Trained


def read_scores(root: Path, group: Group, *, completion: int, trained: Trained) -> dict[str, Floats] | None:
    """Log-probs and entropy of each token; None: they were not kept for this group."""
    step = trained.step_of(group.draw) or group.step
    data = read_inside(root, FOLDER, file_name(step))
    return None if data is None else scores_in(io.BytesIO(data), group, completion=completion)
