"""The weights of a model where they are stored, for processes that each hold a part of it: nothing is read before its turn.

A checkpoint of any kind that ``stored/`` opens, or a model directory with safetensors whose tensors have the names and shapes
of the model. Everything else (``.bin`` files, a model under other names, code that comes with a model and converts names) only transformers
can read, as a whole.

``load_onto`` brings a whole model to an accelerator in the same way, so that loading takes a piece of host memory and not the size
of the model, however many processes of a node load it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcall.model.decoder import fuse_parameters
from rollcall.model.fetch import fetch_model
from rollcall.model.files import model_folder
from rollcall.model.hub import HubError
from rollcall.model.load import (
    cached_folder,
    is_stored,
    load_causal_lm,
    non_finite_of,
    outline_causal_lm,
    refuse_diverged,
)
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.open import open_stored
from rollcall.model.stored.outline import ROTARY
from rollcall.model.stored.tensors import Stored, refuse_whole_numbers

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PIECE_BYTES = 64 << 20  # of a tensor in host memory at once


class WholeOnly(ValueError):
    """The weights cannot be read in blocks; the message says why."""


def open_unread(path: str, model: Any, *, fetch: bool = False) -> Stored:
    """The stored weights of ``model``, which is the outline of ``path``. Raises WholeOnly if only transformers can read them. ``fetch``:
    download a hub's model first, if it is not in the cache."""
    folder = Path(path).expanduser() if is_stored(path) else _folder_of(path, fetch=fetch)
    try:
        stored = open_stored(folder)
    except StoredError as error:
        raise WholeOnly(str(error)) from None
    _refuse_other_names(model, stored)
    _refuse_other_head(model, stored)
    refuse_whole_numbers(stored.types, dict(model.named_parameters()), origin=f"model.path={path}")
    return stored


def _folder_of(path: str, *, fetch: bool) -> Path:
    """The directory with the weights of a local model or of one in the hub's cache."""
    folder = model_folder(path) or _cached(path)
    if folder is None and fetch:
        try:
            folder = fetch_model(path)
        except HubError as error:
            raise WholeOnly(str(error)) from None
    if folder is None or not any(folder.glob("*.safetensors")):
        raise WholeOnly(f"{folder or path} has no safetensors" + ("" if folder else " in the hub's cache"))
    return folder


def _cached(name: str) -> Path | None:
    folder = cached_folder(name)
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def _refuse_other_names(model: Any, stored: Stored) -> None:
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in stored.tensors.items()}
    if missing := next((name for name, shape in wanted.items() if found.get(name) != shape), None):
        have = f"as {list(found[missing])}" if missing in found else "not at all"
        raise WholeOnly(f"the model has {missing} as {list(wanted[missing])}, and the files have it {have}")
    others = [name for name in found if name not in wanted and name != HEAD and not name.endswith(ROTARY)]
    if others:
        raise WholeOnly(f"the files have {others[0]}, and the model does not")


def load_onto(path: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """``load_causal_lm``; onto an accelerator piece by piece, if the files allow it."""
    if device.type != "cpu":  # where the model is in host memory anyway
        outline = outline_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code)
        with suppress(WholeOnly):
            stored = open_unread(path, outline)
            return fill(outline, stored, device=device, path=path)
    return load_causal_lm(path, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


@torch.no_grad()
def fill(outline: Any, stored: Stored, *, device: torch.device, path: str) -> Any:
    """The outline as a model with the stored weights on ``device``."""
    model, rotary = outline.to_empty(device=device), outline.model.rotary_emb
    model.model.rotary_emb = type(rotary)(rotary.config).to(device)  # computed, not stored
    model.tie_weights()
    model = model.eval().requires_grad_(False)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        for start, piece in _pieces(stored, name):
            parameter[start : start + len(piece)].copy_(piece.to(parameter.dtype))
    refuse_diverged(path, non_finite_of(named, dtype=model.dtype))
    fuse_parameters(model)
    return model


def _pieces(stored: Stored, name: str) -> Iterator[tuple[int, Tensor]]:
    """A tensor in runs of rows, each with the number of its first row."""
    tensor = stored.tensors[name]
    rows, *rest = tensor.shape
    step = max(1, PIECE_BYTES * rows // max(tensor.num_bytes, 1))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        yield start, stored.read(name, start=(start, *[0] * len(rest)), shape=(count, *rest))


def _refuse_other_head(model: Any, stored: Stored) -> None:
    """Refuse a stored output head that is not the embeddings, although the config says so: transformers takes it."""
    if HEAD not in stored.tensors or HEAD in dict(model.named_parameters()):
        return
    pairs = zip(_pieces(stored, EMBEDDINGS), _pieces(stored, HEAD), strict=True)
    if not all(torch.equal(one, other) for (_, one), (_, other) in pairs):
        raise WholeOnly(f"{stored.origin} has an output head that is not the embeddings, and config.json ties them")


def each_tensor(model: Any, stored: Stored, *, path: str) -> Iterator[tuple[str, Tensor]]:
    """The stored weights of an outline, one by one, in its type."""
    for name, parameter in model.named_parameters():
        tensor = stored.read(name).to(parameter.dtype)
        refuse_diverged(path, non_finite_of({name: tensor}, dtype=tensor.dtype))
        yield name, tensor
