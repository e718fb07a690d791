"""Selects the stored tensors that belong to the model by comparing them with its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollcall.base.errors import ModelFilesError
from rollcall.model.files import read_model_config
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.outline import ROTARY, Outline, known_outline, outline_of
from rollcall.model.stored.tensors import Stored, other_tensors, refuse_whole_numbers

VALUE_HEADS = ("v_head.", "value_head.", "score.", "classifier.")
ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.", ".modules_to_save.")


def select(stored: Stored, folder: Path) -> tuple[list[str], list[str]]:
    """Return the tensor names, and notes on what was left out or could not be checked. ``folder`` contains the model's config.json."""
    if adapter := next((name for name in stored.tensors if any(part in name for part in ADAPTERS)), None):
        raise StoredError(
            f"{stored.origin} holds an adapter ({adapter}), not only a model; merge the adapter into its model first, with peft's "
            "merge_and_unload"
        )
    try:
        fields = read_model_config(folder / "config.json")  # transformers would build any number of layers
    except ModelFilesError as error:
        raise StoredError(str(error)) from None
    outline = known_outline(fields) or outline_of(folder)
    if outline is None:
        note = (
            "the installed transformers does not know this kind of model, so names and shapes were not compared with it"
        )
        return list(stored.tensors), [note]
    outline = outline.like(stored.tensors)
    others = [name for name in stored.tensors if name not in outline.shapes]
    heads = [name for name in others if name.startswith(VALUE_HEADS)]
    rotary = [name for name in others if name.endswith(ROTARY)]
    copies = {
        name: source for name, source in outline.tied.items() if name in stored.tensors and source in stored.tensors
    }
    for name, source in copies.items():
        if not stored.are_equal(name, source):
            raise StoredError(
                f"{stored.origin}: config.json ties {name} to {source}, and the two are stored with different numbers; correct "
                "tie_word_embeddings in config.json, or give the files that belong together"
            )
    names = [name for name in stored.tensors if name not in {*copies, *heads, *rotary}]
    _refuse_others(stored, outline, names, folder=folder)
    if "quantization_config" not in fields:
        refuse_whole_numbers(stored.types, names, origin=stored.origin)
    notes = [f"{head} is a value head, not part of the model, and was left out" for head in heads]
    if rotary:
        notes.append(f"{rotary[0]} is computed by the model when it is loaded, and was left out")
    return names, notes


def _refuse_others(stored: Stored, outline: Outline, names: Sequence[str], *, folder: Path) -> None:
    wanted = {name: shape for name, shape in outline.shapes.items() if name not in outline.tied}
    # A tied tensor may be stored under either name.
    there = {outline.tied.get(name, name): stored.tensors[name].shape for name in names}
    if faults := other_tensors(wanted=wanted, found=there):
        raise StoredError(
            f"{stored.origin} does not hold the model of {folder / 'config.json'}: {faults}. Give the files that belong together"
        )
