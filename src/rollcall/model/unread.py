"""The weights of a model where they are stored, for processes that each hold a part of it: nothing is read before its turn.

A checkpoint of any kind that ``stored/`` opens, or a model directory with safetensors whose tensors have the names and shapes
of the model. Everything else (``.bin`` files, a model under other names, code of its own that converts names) only transformers
can read, as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollcall.model.fetch import fetch_model
from rollcall.model.files import model_folder
from rollcall.model.load import is_stored
from rollcall.stored.files import StoredError
from rollcall.stored.open import open_stored
from rollcall.stored.outline import ROTARY
from rollcall.stored.tensors import Stored

HEAD = "lm_head.weight"


class WholeOnly(ValueError):
    """The weights cannot be read in blocks; the message says why."""


def open_unread(path: str, model: Any) -> Stored:
    """The stored weights of ``model``, which is the outline of ``path``. Raises WholeOnly if only transformers can read them."""
    folder = Path(path).expanduser()
    if not is_stored(path):
        folder = model_folder(path) or fetch_model(path)
        if not any(folder.glob("*.safetensors")):
            raise WholeOnly(f"{folder} has no safetensors")
    try:
        stored = open_stored(folder)
    except StoredError as error:
        raise WholeOnly(str(error)) from None
    _refuse_other_names(model, stored)
    return stored


def _refuse_other_names(model: Any, stored: Stored) -> None:
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in stored.tensors.items()}
    if missing := next((name for name, shape in wanted.items() if found.get(name) != shape), None):
        have = f"as {list(found[missing])}" if missing in found else "not at all"
        raise WholeOnly(f"the model has {missing} as {list(wanted[missing])}, and the files have it {have}")
    others = [name for name in found if name not in wanted and name != HEAD and not name.endswith(ROTARY)]
    if others:
        raise WholeOnly(f"the files have {others[0]}, and the model does not")
