"""Builds an adapter's full model for a merge: the base weights with the adapter added."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rollcall.base.importing import calm_transformers
from rollcall.base.patience import plain_disk_errors
from rollcall.base.wait import say
from rollcall.checkpoint.merge.staging import locked
from rollcall.model.stored.files import StoredError, file_checksum
from rollcall.model.stored.find import adapter_folder, checkpoint_of, read_manifest
from rollcall.model.stored.safetensors import open_model_dir
from rollcall.model.stored.tensors import Stored

ADAPTED = "adapter and its model"


@contextmanager
def whole_model(source: Path, *, out: Path) -> Iterator[Stored | None]:
    """Write the full model for the adapter at ``source`` to a file next to the target and yield its tensors. The file is removed
    when the block ends. Yields None if there is no adapter at ``source``."""
    folder = adapter_folder(source) if source.is_dir() else None
    if folder is None:
        yield None
        return
    import torch
    from safetensors.torch import save_file

    from rollcall.base.errors import ModelFilesError
    from rollcall.model.load import ModelError, bases_of, load_causal_lm, outline_causal_lm

    space = out.with_name(f".adapter-{out.name}")  # a killed merge leaves it behind, and the next one reuses it
    with locked(space, out):
        try:
            _refuse_changed(folder)
            for base in bases_of(folder, where=str(source)):
                model = Path(base).expanduser()
                if model.is_dir() and model.resolve().is_relative_to(out.resolve()):
                    raise StoredError(
                        f"{out} holds {base}, the model of the adapter, which the merge reads; choose another --out"
                    )
            calm_transformers()
            say(f"adding the adapter in {folder} to its model")
            dtype = outline_causal_lm(str(folder), dtype=torch.float32).config.dtype or torch.float32
            model = load_causal_lm(str(folder), device=torch.device("cpu"), dtype=dtype)
            tied = getattr(model, "all_tied_weights_keys", {})
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
            with plain_disk_errors(space):
                save_file(tensors, space / "model.safetensors", metadata={"format": "pt"})
            del model, tensors
            stored = open_model_dir(space)
            checkpoint = checkpoint_of(source)
            facts = {} if checkpoint is None else read_manifest(checkpoint).facts
            yield replace(stored, origin=str(source), folder=folder, kind=ADAPTED, facts=facts)
        except (ModelError, ModelFilesError) as error:
            raise StoredError(str(error)) from None
        finally:
            shutil.rmtree(space, ignore_errors=True)


def _refuse_changed(folder: Path) -> None:
    """Refuse a checkpoint with changed files. Checked here because the code that reads them does not know the checksums."""
    checkpoint = checkpoint_of(folder)
    if checkpoint is None or checkpoint / "model" != folder:
        return
    for name, file in read_manifest(checkpoint).files.items():
        if name.startswith("model/") and (not file.path.is_file() or file_checksum(file.path) != file.blake2b):
            raise StoredError(
                f"{file} is not as written (the checksum differs); copy the file from where it was written again, or use another "
                "checkpoint"
            )
