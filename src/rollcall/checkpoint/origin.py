"""What a run began with, noted in its directory: its rows and its model. A resume with other ones is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollcall.checkpoint.run_dir import has_begun
from rollcall.config.yaml import read_small
from rollcall.data.columns import DataError
from rollcall.data.load import PromptSet
from rollcall.durable.atomic import write_atomic
from rollcall.durable.patience import persist
from rollcall.engine.tokenizers import tokenizer_mark
from rollcall.errors import CheckpointError, ModelFilesError
from rollcall.learner.learner import Learner
from rollcall.model.base import base_identities, is_adapter, used_of
from rollcall.model.stop_tokens import stop_token_ids
from rollcall.types import Prompt
from rollcall.wait import warn
from rollcall.words import ANOTHER_RUN, are, counted

ROWS, BASE = "data.json", "base.json"
MOST_BYTES = 1 << 31  # 16 for each row
T = TypeVar("T")


# Rows


def refuse_changed_rows(run_dir: Path, split: str, prompts: PromptSet, *, limit: int | None = None) -> None:
    """``prompts`` are the rows of ``data.train`` or ``data.val`` now. Of a run whose ``limit`` changes, those are compared that it had
    and still has."""
    noted = _noted(run_dir, ROWS, lambda found: _read_rows(found, split), what="which rows the run began with")
    if noted is None:
        if has_begun(run_dir):
            warn(
                f"{run_dir} has no {ROWS}, so it is not known whether data.{split} is as it was when the run began; see to that yourself"
            )
        return
    (before, limit_before), now = noted, _identities(prompts)
    shared = min(len(before), len(now))
    differ = np.flatnonzero(before[:shared] != now[:shared])
    told = []
    if len(before) != len(now) and limit == limit_before:
        told.append(f"it had {counted(len(before), 'row')} and has {len(now):,} now")
    if len(differ):
        told.append(
            f"{counted(len(differ), 'row')} {are(len(differ))} different, the first is {prompts.prompts[differ[0]].id!r}"
        )
    if told:
        raise DataError(
            f"data.{split}={prompts.source} is not as it was when the run in {run_dir} began: {'; '.join(told)}. The rows of a run must "
            f"stay the same in all their columns and in their tokens: restore the file (or the tokenizer and the chat template), or begin "
            f"a run with these rows: {ANOTHER_RUN}"
        )


def note_rows(run_dir: Path, train: PromptSet, val: PromptSet | None, *, limit: int | None) -> None:
    """``limit`` is that of ``val``."""

    def rows() -> dict[str, Any]:
        sets = {"train": (train, None)} | ({} if val is None else {"val": (val, limit)})
        return {
            split: {"rows": _identities(prompts).tobytes().hex(), "limit": most}
            for split, (prompts, most) in sets.items()
        }

    _note(run_dir, ROWS, rows, what="the identity of the rows")


def _identities(prompts: PromptSet) -> np.ndarray:
    """8 bytes for each row."""
    return np.frombuffer(b"".join(map(_identity, prompts.prompts)), dtype="<u8")


def _identity(prompt: Prompt) -> bytes:
    """Covers all that anything can read of a row."""
    read = [prompt.id, prompt.text, prompt.answer, prompt.metadata]
    digest = blake2b(json.dumps(read, sort_keys=True, default=str).encode(), digest_size=8)
    digest.update(prompt.token_ids.tobytes())
    return digest.digest()


def _read_rows(found: Any, split: str) -> tuple[np.ndarray, int | None]:
    return np.frombuffer(bytes.fromhex(found[split]["rows"]), dtype="<u8"), found[split]["limit"]


# The model


def base_of(learner: Learner, tokenizer: Any) -> dict[str, Any]:
    """Of the model at ``model.path``, before a checkpoint is read into it: its weights, how they are used, and what makes and ends its
    tokens. All ranks of a gang call this."""
    model, body = learner.model, learner.body
    weights = learner.base_identities if learner.adapter else base_identities(body.base_tensors(), dtype=body.dtype)
    stops = stop_token_ids(tokenizer, model.config, model.generation_config)
    template = json.dumps(tokenizer.chat_template, default=str).encode()
    return {
        "base": weights,
        "config": {**used_of(model.config), "eos_token_id": list(stops)},
        "tokenizer": tokenizer_mark(tokenizer),
        "chat template": blake2b(template, digest_size=8).hexdigest(),
    }


def refuse_changed_base(run_dir: Path, now: Mapping[str, Any], *, path: str) -> None:
    """``now`` is what ``base_of`` says of the model at ``path``."""
    before = _noted(run_dir, BASE, _read_base, what="which model the run began with")
    if before is None:
        return
    weights = {} if is_adapter(path) else before["base"]
    told = ["other weights"] if any(now["base"].get(kind, one) != one for kind, one in weights.items()) else []
    told += [f"another {part}" for part in ("tokenizer", "chat template") if before.get(part, now[part]) != now[part]]
    config = now["config"]
    told += [f"{key}: {one} -> {config.get(key)}" for key, one in before["config"].items() if config.get(key) != one]
    if told:
        raise ModelFilesError(
            f"model.path={path} is not the model that the run in {run_dir} began with ({'; '.join(told)}): put it back there as it was, or "
            f"begin a run with this one: {ANOTHER_RUN}"
        )


def note_base(run_dir: Path, found: Mapping[str, Any]) -> None:
    _note(run_dir, BASE, lambda: found, what="the identity of the model")


def _read_base(found: Any) -> dict[str, Any]:
    """Earlier versions noted only the weights, of a run with an adapter."""
    return {**found, "base": dict(found["base"]), "config": dict(found.get("config", {}))}


# Files


def _note(run_dir: Path, name: str, facts: Callable[[], Mapping[str, Any]], *, what: str) -> None:
    """Once the run has begun, what is noted stays."""
    path = run_dir / name
    if not has_begun(run_dir) or not path.exists():
        data = json.dumps({"format": 1, **facts()})
        persist(lambda: write_atomic(path, data), path=path, what=what)


def _noted(run_dir: Path, name: str, read: Callable[[Any], T], *, what: str) -> T | None:
    """None: the run has not begun, or an earlier version noted nothing."""
    path = run_dir / name
    if not has_begun(run_dir):
        return None
    try:
        return read(json.loads(read_small(path, most=MOST_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not as Rollcall writes it ({type(error).__name__}: {error}), so it is not known {what}; restore the file, or "
            "remove it if nothing has changed"
        ) from None
