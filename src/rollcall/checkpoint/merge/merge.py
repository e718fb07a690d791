"""Merges a checkpoint into one directory: plans the copies, runs them in threads, and renames the result into place.

Threads take units from the plan. Each thread reads its unit's range of a stored file, verifies it and writes it. The calling thread
flushes finished units to disk and records them. The first error, or Ctrl-C, stops all threads. Finished units are kept for the next try.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rollcall.base.errors import ModelFilesError
from rollcall.base.importing import calm_transformers
from rollcall.base.patience import plain_disk_errors
from rollcall.base.wait import say
from rollcall.base.words import parse_size
from rollcall.checkpoint.merge.card import card, copy_config_files, not_of_a_model, run_facts
from rollcall.checkpoint.merge.plan import MergePlan, copy_unit, plan_merge, written_dtype
from rollcall.checkpoint.merge.staging import Staging, begin, locked
from rollcall.model.files import read_model_config
from rollcall.model.stored.files import StoredError, file_checksum
from rollcall.model.stored.find import adapter_folder, checkpoint_of, read_manifest
from rollcall.model.stored.open import open_stored
from rollcall.model.stored.outline import ROTARY, known_outline, outline_of
from rollcall.model.stored.safetensors import INDEX, open_model_dir
from rollcall.model.stored.tensors import DTYPES as KINDS
from rollcall.model.stored.tensors import Stored, other_tensors, refuse_whole_numbers

DTYPES = {
    **{short: KINDS[name] for short, name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"))},
    **{name: KINDS[name] for name in ("bfloat16", "float16", "float32")},
}
ADAPTED = "adapter and its model"
VALUE_HEADS = ("v_head.", "value_head.", "score.", "classifier.")
ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.", ".modules_to_save.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge."""

    out: Path
    origin: str
    kind: str
    num_tensors: int
    num_bytes: int
    num_files: int
    continued_bytes: int  # written by an earlier merge that was interrupted
    duration_s: float
    facts: dict[str, str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"from" if key == "origin" else key.removeprefix("num_"): value for key, value in asdict(self).items()}


def merge(
    source: Path | Stored,
    out: Path,
    *,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    base: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Merged:
    """Merge ``source`` into ``out``. ``base`` is a model directory with config and tokenizer, for weights that come without them.
    ``progress`` gets the number of bytes copied so far and the total number."""
    out = Path(os.path.abspath(out))
    if isinstance(source, Path):
        with _disk_in_words(out), whole_model(source, out=out) as whole:
            if whole is not None:
                return merge(whole, out, dtype=dtype, max_shard_size=max_shard_size, base=base, progress=progress)
    started = time.monotonic()
    if dtype != "keep" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is unknown; use keep, bf16, fp16 or fp32")
    target = DTYPES.get(dtype)
    try:
        most = parse_size(max_shard_size)
    except ValueError as error:
        raise ValueError(f"--max-shard-size {error}") from None
    stored = source if isinstance(source, Stored) else open_stored(source)
    folder = base or stored.folder
    if folder is None or not (folder / "config.json").is_file():
        raise StoredError(
            f"{folder or stored.origin} has no config.json, so the model of these weights is unknown; pass a directory with "
            "a config and a tokenizer: --base DIR"
        )
    _refuse_target(out, stored, folder)
    names, left_out = select(stored, folder)
    plan = plan_merge(stored, names, dtype=target, max_shard_size=most)
    with _disk_in_words(out), begin(out, plan) as staging:
        staging.prepare()
        continued = sum(unit.num_bytes for unit in plan.units if unit.name in staging.done)
        _copy_all(plan, staging, continued=continued, progress=progress)
        facts, notes = run_facts(stored), (*left_out, *_notes(stored, plan))
        tensors = [stored.tensors[name] for name in names]
        dtypes = {written_dtype(one, target) for one in tensors}
        floats = [one for one in dtypes if one.is_floating_point]
        # Loaders take the dtype from config.json, which may differ from that of the stored shards.
        copy_config_files(stored, folder, staging.model, dtype=floats[0] if len(floats) == 1 else target)
        if (index := plan.index()) is not None:
            (staging.model / INDEX).write_text(index)
        num_parameters = sum(prod(one.shape) for one in tensors)
        text = card(stored, num_parameters=num_parameters, dtypes=sorted(dtypes, key=str), facts=facts, notes=notes)
        (staging.model / "README.md").write_text(text)
        staging.finish(out)
    return Merged(
        out=out,
        origin=stored.origin,
        kind=stored.kind,
        num_tensors=len(names),
        num_bytes=plan.num_bytes,
        num_files=len(plan.files),
        continued_bytes=continued,
        duration_s=time.monotonic() - started,
        facts=facts,
        notes=notes,
    )


@contextmanager
def _disk_in_words(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoredError(
            f"{out} cannot be written: {error.strerror or error}; free space or make the folder writable, and run the same "
            "command again: it continues where it stopped"
        ) from error


def _copy_all(plan: MergePlan, staging: Staging, *, continued: int, progress: Callable[[int, int], None]) -> None:
    total, copied = sum(unit.num_bytes for unit in plan.units), continued
    counting, stop = threading.Lock(), threading.Event()
    progress(copied, total)

    def advance(num: int) -> None:
        nonlocal copied
        if stop.is_set():
            raise CancelledError
        with counting:
            copied += num
            progress(copied, total)

    with staging.outs() as outs, ThreadPoolExecutor(max_workers=4) as pool:
        waiting = [unit for unit in plan.units if unit.name not in staging.done]
        running = {pool.submit(copy_unit, unit, outs, advance=advance): unit for unit in waiting}
        try:
            while running:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                staging.note([running.pop(future) for future in ended], outs)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _refuse_target(out: Path, stored: Stored, folder: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file())):
        raise StoredError(f"{out} exists and is not a model directory; choose another --out, or remove it yourself")
    if out.is_dir() and (other := not_of_a_model(out)) is not None:
        raise StoredError(
            f"{out} contains {other.relative_to(out)}, which is not part of a model and would be deleted; choose another --out, or "
            "remove it yourself"
        )
    target = out.resolve()
    for path in (folder, *stored.files):
        if path.resolve().is_relative_to(target):
            raise StoredError(f"{out} contains {path}, which the merge reads; choose another --out")


def _notes(stored: Stored, plan: MergePlan) -> list[str]:
    notes = []
    if stored.kind != ADAPTED and not all(unit.file.blake2b or unit.records for unit in plan.units):
        notes.append("the files have no checksums, so a changed byte in them would not be noticed")
    if stored.facts.get("has_critic"):
        notes.append("the critic is not part of the model; it stays in the checkpoint")
    return notes


def select(stored: Stored, folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the tensors to merge, and notes on what was left out or not checked. ``folder`` contains config.json."""
    if adapter := next((name for name in stored.tensors if any(part in name for part in ADAPTERS)), None):
        raise StoredError(
            f"{stored.origin} contains an adapter ({adapter}) in addition to a model; merge the adapter into its model first, with "
            "peft's merge_and_unload"
        )
    try:
        # Checked first, because transformers would build any number of layers
        fields = read_model_config(folder / "config.json")
    except ModelFilesError as error:
        raise StoredError(str(error)) from None
    outline = known_outline(fields) or outline_of(folder)
    if outline is None:
        note = "the installed transformers does not know this architecture, so names and shapes were not checked"
        return list(stored.tensors), [note]
    outline = outline.like(stored.tensors)
    others = [name for name in stored.tensors if name not in outline.shapes]
    heads = [name for name in others if name.startswith(VALUE_HEADS)]
    rotary = [name for name in others if name.endswith(ROTARY)]
    copies = {name: source for name, source in outline.tied.items() if {name, source} <= stored.tensors.keys()}
    for name, source in copies.items():
        if not stored.are_equal(name, source):
            raise StoredError(
                f"{stored.origin}: config.json ties {name} to {source}, but their stored values differ; correct "
                "tie_word_embeddings in config.json, or use files from the same model"
            )
    names = [name for name in stored.tensors if name not in {*copies, *heads, *rotary}]
    wanted = {name: shape for name, shape in outline.shapes.items() if name not in outline.tied}
    # A tied tensor may be stored under either name.
    there = {outline.tied.get(name, name): stored.tensors[name].shape for name in names}
    if faults := other_tensors(wanted=wanted, found=there):
        both = f"{stored.origin} does not match {folder / 'config.json'}"
        raise StoredError(f"{both}: {faults}. Use files from the same model")
    if "quantization_config" not in fields:
        refuse_whole_numbers(stored.types, names, origin=stored.origin)
    notes = [f"{head} is a value head, not part of the model, and was left out" for head in heads]
    if rotary:
        notes.append(f"{rotary[0]} was left out, because the model computes it when it is loaded")
    return names, notes


@contextmanager
def whole_model(source: Path, *, out: Path) -> Iterator[Stored | None]:
    """Write the full model for the adapter at ``source`` to a file next to the target, and yield its tensors. The file is removed
    when the block ends. Yields None if ``source`` is not an adapter."""
    folder = adapter_folder(source) if source.is_dir() else None
    if folder is None:
        yield None
        return
    import torch
    from safetensors.torch import save_file

    from rollcall.model.load import bases_of, load_causal_lm, outline_causal_lm

    space = out.with_name(f".adapter-{out.name}")  # left behind by a killed merge, and used again by the next one
    with locked(space, out):
        try:
            _refuse_changed(folder)
            for base in bases_of(folder, where=str(source)):
                model = Path(base).expanduser()
                if model.is_dir() and model.resolve().is_relative_to(out.resolve()):
                    what = f"{base}, the adapter's model, which the merge reads"
                    raise StoredError(f"{out} contains {what}; choose another --out")
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
        except ModelFilesError as error:
            raise StoredError(str(error)) from None
        finally:
            shutil.rmtree(space, ignore_errors=True)


def _refuse_changed(folder: Path) -> None:
    """Raise if the checkpoint's files have changed. The code that reads them later does not know their checksums."""
    checkpoint = checkpoint_of(folder)
    if checkpoint is None or checkpoint / "model" != folder:
        return
    for name, file in read_manifest(checkpoint).files.items():
        if name.startswith("model/") and (not file.path.is_file() or file_checksum(file.path) != file.blake2b):
            advice = "copy it again from its source, or use another checkpoint"
            raise StoredError(f"{file} has changed since it was written (its checksum differs); {advice}")
