"""Merges a checkpoint into one directory: a plan of copies, threads that execute it, and one rename at the end.

Threads take units from the plan. Each reads its range of a stored file, verifies it and writes it. The calling thread flushes what
they have written to disk and records it. The first error, or Ctrl-C, stops the others. Finished units are kept for the next try.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rollcall.base.words import parse_size
from rollcall.checkpoint.merge.adapter import ADAPTED, whole_model
from rollcall.checkpoint.merge.card import card, copy_config_files, not_of_a_model, run_facts
from rollcall.checkpoint.merge.plan import MergePlan, copy_unit, plan_merge, written_dtype
from rollcall.checkpoint.merge.selection import select
from rollcall.checkpoint.merge.staging import Staging, begin
from rollcall.model.stored.files import StoredError
from rollcall.model.stored.open import open_stored
from rollcall.model.stored.safetensors import INDEX
from rollcall.model.stored.tensors import DTYPES as KINDS
from rollcall.model.stored.tensors import Stored

DTYPES = {
    **{short: KINDS[name] for short, name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"))},
    **{name: KINDS[name] for name in ("bfloat16", "float16", "float32")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge."""

    out: Path
    origin: str
    kind: str
    num_tensors: int
    num_bytes: int
    num_files: int
    continued_bytes: int  # already written by an earlier, interrupted merge
    duration_s: float
    facts: dict[str, str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "from": self.origin,
            "kind": self.kind,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "files": self.num_files,
            "continued_bytes": self.continued_bytes,
            "duration_s": round(self.duration_s, 3),
            "facts": self.facts,
            "notes": list(self.notes),
        }


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
    ``progress`` receives the number of bytes copied so far and the total."""
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
            f"{folder or stored.origin} has no config.json, so it is not known which model the weights are of; give a directory with "
            "config and tokenizer: --base DIR"
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
        # A loader takes the dtype of the weights from config.json, which may differ from the dtype of the shards.
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
            f"{out} holds {other.relative_to(out)}, which is not of a model and would be lost; choose another --out, or remove it "
            "yourself"
        )
    target = out.resolve()
    for path in (folder, *stored.files):
        if path.resolve().is_relative_to(target):
            raise StoredError(f"{out} holds {path}, which the merge reads; choose another --out")


def _notes(stored: Stored, plan: MergePlan) -> list[str]:
    notes = []
    checked = stored.kind == ADAPTED or all(unit.file.blake2b or unit.records for unit in plan.units)
    if not checked:
        notes.append(
            "the files have no checksums (their writer left none), so a changed byte in them would not be noticed"
        )
    if stored.facts.get("has_critic"):
        notes.append("the critic is not part of the model; it stays in the checkpoint")
    return notes
