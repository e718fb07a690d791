"""Checks that a model directory gives the same results as the trained model did when it was saved.

``verify`` loads the directory with plain transformers and compares the log-probs of the probe's rows (``probe.py``). Rounding causes
small differences, whose size can be estimated from both precisions. A wrong weight causes larger differences. The result is saved in the
directory (``verified.json``), with a checksum of every file. A directory that changes afterwards no longer counts as verified.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import CheckpointError
from rollcall.checkpoint.probe import TrainedProbe, changed_config_files, read_probe
from rollcall.checkpoint.store import describe_files
from rollcall.config.yaml import read_small
from rollcall.model.load import loading, own_code, refuse_loaded
from rollcall.model.stored.find import PROBE
from rollcall.model.stored.safetensors import open_model_dir
from rollcall.model.stored.tensors import Stored

VERIFIED = "verified.json"
OURS = (PROBE, VERIFIED)  # Rollcall's files, not part of the model
_ROUNDINGS = 6  # roundings of the hidden state per layer: two sums and the outputs of four products
_FAR = 8.0  # standard deviations; the largest of a hundred normal samples is within 4
_SPARE = 0.6  # fraction of the free memory that the model may use


class VerifyError(CheckpointError):
    """The model directory does not match the trained model. The message contains the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """``difference`` is the largest difference in a token's log-prob. It must be at most ``tolerance``."""

    difference: float
    tolerance: float
    num_tokens: int
    dtype: str  # the precision of the weights in the directory
    trained: str  # the precision in which the learner computed
    computed: str  # the precision in which this comparison ran

    @property
    def words(self) -> str:
        rounded = "" if self.dtype == self.trained else f", stored in {self.dtype}"
        return (
            f"the log-probs of {self.num_tokens} tokens differ from the trained model's by at most {self.difference:.2g}; rounding "
            f"can explain {self.tolerance:.2g} (trained in {self.trained}{rounded}, compared in {self.computed})"
        )


def verify(model_dir: Path, probe: Path | None = None, *, dtype: str | None = None) -> Verified:
    """Compare ``model_dir`` with a saved probe, by default the one in the directory. Raises ``VerifyError`` if they differ.

    If the weights were converted to another precision on purpose, ``dtype`` is torch's name for it.
    """
    recorded = read_probe(model_dir / PROBE if probe is None else probe)
    values = [value for row in recorded.logprobs for value in row]
    if any(value is None for value in values):
        why = "the trained model computed log-probs that are not finite"
        raise VerifyError(f"{why}, so {model_dir} cannot be compared with it; use an earlier checkpoint")
    stored = open_model_dir(model_dir)
    wanted = dtype or recorded.dtype
    floats = {tensor.dtype.name: name for name, tensor in stored.tensors.items() if tensor.dtype.is_floating_point}
    floats.pop(wanted, None)
    for kind, name in floats.items():
        how = "trained" if wanted == recorded.dtype else "supposed to be stored"
        raise VerifyError(
            f"{model_dir} stores {name} in {kind}, but it was {how} in {wanted}; merge the checkpoint again, or accept this "
            f"precision: --dtype {kind} --verify"
        )
    before = describe_files(model_dir, leave_out=OURS)
    model, computed = _load(model_dir, stored)
    found = _logprobs(model, recorded, model_dir=model_dir)
    expected = np.array(values, dtype=np.float64)
    gap = np.abs(found - expected)
    difference = math.inf if np.isnan(gap).any() else float(gap.max())
    result = Verified(
        difference=difference,
        tolerance=_tolerance(expected, model.config, trained=recorded.dtype, stored=wanted, computed=computed),
        num_tokens=len(values),
        dtype=wanted,
        trained=recorded.dtype,
        computed=computed,
    )
    wrong, advice = f"{model_dir} is not the model that was trained", "Merge the checkpoint again"
    if not difference <= result.tolerance:
        raise VerifyError(f"{wrong}: {result.words}. {advice}; if that does not help, use another checkpoint")
    if other := changed_config_files(model_dir, recorded.beside):
        have = "has" if len(other) == 1 else "have"
        raise VerifyError(f"{wrong}: {', '.join(other)} {have} changed since the run saved it. {advice}")
    write_atomic(model_dir / PROBE, recorded.dump())
    write_atomic(model_dir / VERIFIED, json.dumps({"format": 1, **asdict(result), "files": before}, indent=1))
    return result


def why_not_verified(model_dir: Path) -> str:
    """Return why the directory does not count as verified. Empty if no file has changed since it was verified."""
    mark = mark_of(model_dir)
    if mark is None:
        return "it was not verified"
    files, now = mark["files"], describe_files(model_dir, leave_out=OURS)
    if other := sorted(name for name in files.keys() | now.keys() if files.get(name) != now.get(name)):
        how = "is gone" if other[0] not in now else "is new" if other[0] not in files else "has changed"
        return f"{other[0]} {how} since it was verified"
    return ""


def mark_of(model_dir: Path) -> dict[str, Any] | None:
    """Return the result that an earlier ``verify`` saved in the directory. None if there is no valid result."""
    try:
        found: Any = json.loads(read_small(model_dir / VERIFIED))
        sound = found["format"] == 1 and isinstance(found["files"], dict) and isinstance(found["dtype"], str)
        return found if sound else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _load(model_dir: Path, stored: Stored) -> tuple[Any, str]:
    """Load the model with plain transformers, in float32 if that fits in memory, otherwise as stored. Also returns the precision."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    elements = sum(math.prod(tensor.shape) for tensor in stored.tensors.values())
    fits = 4 * elements <= _SPARE * psutil.virtual_memory().available
    if code := own_code(str(model_dir)):
        files = ", ".join(code)
        raise VerifyError(f"{model_dir} needs to run code from its own files ({files}), which verify does not allow")
    # Without this file, transformers would create an empty tokenizer for some models.
    if not (model_dir / "tokenizer_config.json").is_file():
        why = f"{model_dir} has no tokenizer_config.json, so it has no tokenizer"
        raise VerifyError(f"{why}; merge the checkpoint again")
    with loading(f"the model directory {model_dir}"):
        AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32 if fits else "auto",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # ``refuse_loaded`` names the mismatched tensors
        )
    model, info = loaded
    refuse_loaded(f"the model directory {model_dir}", info)
    return model.eval(), str(model.dtype).removeprefix("torch.")


@torch.no_grad()
def _logprobs(model: Any, probe: TrainedProbe, *, model_dir: Path) -> np.ndarray:
    largest = max(token for row in probe.rows for token in row)
    if largest >= model.config.vocab_size:
        raise VerifyError(
            f"{model_dir} is not the model that was trained: it has {model.config.vocab_size} tokens, but the trained model has "
            f"token {largest}"
        )
    found: list[np.ndarray] = []
    for row in probe.rows:
        ids = torch.tensor([row])
        logits = model(ids, use_cache=False).logits[0, :-1].double()
        chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(chosen.numpy())
    return np.concatenate(found)


def _tolerance(logprobs: np.ndarray, config: Any, *, trained: str, stored: str, computed: str) -> float:
    """Estimate how much rounding can change any of these log-probs.

    A layer rounds the hidden state a few times, each time with an error of about one unit of the precision. The errors of all layers add
    up like a random walk. For a float32 sum of products the error is more than one unit, and it grows with the length of the sum. The
    relative error of a logit is multiplied by the spread of the logits, which we estimate from the log-probs of tokens across the
    vocabulary.
    """
    sums = _unit("float32") * math.sqrt(config.hidden_size)
    share = sum(_unit(one) + sums for one in (trained, computed)) + (_unit(stored) if stored != trained else 0.0)
    # The second term matters if all log-probs are equal.
    spread = float(logprobs.std()) + 1e-3 * float(np.abs(logprobs).max())
    return _FAR * math.sqrt(_ROUNDINGS * config.num_hidden_layers) * share * spread


def _unit(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps / 2
