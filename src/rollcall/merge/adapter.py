"""The whole model of an adapter, for a merge: the weights of its base with the adapter added to them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rollcall.stored.files import StoredError
from rollcall.stored.find import adapter_folder, checkpoint_of
from rollcall.stored.manifest import read_manifest
from rollcall.stored.safetensors import open_model_dir
from rollcall.stored.tensors import Stored
from rollcall.wait import say


@contextmanager
def whole_model(source: Path, *, beside: Path) -> Iterator[Stored | None]:
    """The tensors of the model with the adapter at ``source``, in files beside the target that go with the block; None: there is no
    adapter at ``source``."""
    folder = adapter_folder(source) if source.is_dir() else None
    if folder is None:
        yield None
        return
    import torch
    from safetensors.torch import save_file

    from rollcall.model.load import ModelError, load_causal_lm, outline_causal_lm

    say(f"adding the adapter in {folder} to its model")
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapter-", dir=beside) as space:
        try:
            dtype = outline_causal_lm(str(folder), dtype=torch.float32).config.dtype or torch.float32
            model = load_causal_lm(str(folder), device=torch.device("cpu"), dtype=dtype)
        except ModelError as error:
            raise StoredError(str(error)) from None
        tied = getattr(model, "all_tied_weights_keys", {})
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
        save_file(tensors, Path(space) / "model.safetensors", metadata={"format": "pt"})
        stored = open_model_dir(Path(space))
        yield replace(stored, origin=str(source), folder=folder, kind="adapter and its model", facts=_facts(source))


def _facts(source: Path) -> dict[str, object]:
    """What the checkpoint's writer noted of the run."""
    checkpoint = checkpoint_of(source)
    if checkpoint is None:
        return {}
    return {key: value for key, value in read_manifest(checkpoint).fields.items() if key != "files"}
