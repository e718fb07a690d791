"""The working folder of a merge, next to its target. It is kept after an interruption, and the complete model is moved to the target with
a single rename.

``.merging-NAME/`` contains the output files in ``model/``, the plan's fingerprint, one line for each finished unit, and a
lock. The same command finds the folder and continues. A merge with different inputs or outputs starts over.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollcall.base.append_file import parse_row
from rollcall.base.atomic import fsync, fsync_tree, swap_in, take_lock, write_atomic
from rollcall.base.patience import free_bytes
from rollcall.checkpoint.merge.plan import MergePlan, Unit
from rollcall.model.stored.files import StoredError

PLAN, PROGRESS = "plan.json", "done.jsonl"


class Staging:
    """Created by ``begin``, which holds the lock. ``done`` contains the names of finished units."""

    def __init__(self, folder: Path, plan: MergePlan) -> None:
        self.model = folder / "model"
        self._folder, self._plan = folder, plan
        self._progress = folder / PROGRESS
        self.done: set[str] = set()

    def prepare(self) -> None:
        """Continue with the files of an earlier try if they belong to the same plan; otherwise start over."""
        kept = self._folder / PLAN
        try:
            same = json.loads(kept.read_bytes()) == {"fingerprint": self._plan.fingerprint}
        except (OSError, ValueError):
            same = False
        sizes = {self.model / out.name: out.size for out in self._plan.files}
        same = same and all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
        if same:
            lines = self._progress.read_bytes().splitlines() if self._progress.is_file() else []
            # The last line may be torn.
            self.done = {str(row.get("unit")) for row in map(parse_row, lines) if row is not None}
        else:
            for path in (kept, self._progress):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.model, ignore_errors=True)
        written = sum(path.stat().st_blocks * 512 for path in sizes if path.is_file())
        needed = sum(sizes.values()) - written + (64 << 20)  # plus the tokenizer, configs and file system overhead
        free = free_bytes(self._folder)
        if free is not None and free < needed:
            room = f"only {free / 1e9:,.2f} GB are free"
            raise OSError(errno.ENOSPC, f"{room}, and the merge needs {needed / 1e9:,.2f} GB more")
        if not same:
            self.model.mkdir()
            for out in self._plan.files:
                with (self.model / out.name).open("wb") as file:
                    file.write(out.header)
                    file.truncate(out.size)
            fsync_tree(self.model)
            self._progress.touch()
            # From now on, a later try can see that the files belong to this plan.
            write_atomic(kept, json.dumps({"fingerprint": self._plan.fingerprint}))

    @contextmanager
    def outs(self) -> Iterator[list[int]]:
        with ExitStack() as opened:
            files = [opened.enter_context((self.model / out.name).open("r+b")) for out in self._plan.files]
            yield [file.fileno() for file in files]

    def note(self, units: Sequence[Unit], outs: Sequence[int]) -> None:
        """Flush the written data to disk and record that these units are done."""
        for fd in outs:
            os.fdatasync(fd)
        with self._progress.open("a") as file:
            file.writelines(json.dumps({"unit": unit.name}) + "\n" for unit in units)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, out: Path) -> None:
        fsync_tree(self.model)
        swap_in(self.model, out)


@contextmanager
def begin(out: Path, plan: MergePlan) -> Iterator[Staging]:
    """Lock the staging folder for a target. If the block is interrupted, the folder stays for the next try. If the block raises
    ``StoredError``, the folder is removed."""
    folder = out.with_name(f".merging-{out.name}")
    with locked(folder, out):
        try:
            yield Staging(folder, plan)
        except StoredError:
            shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)
    fsync(out.parent)


@contextmanager
def locked(folder: Path, out: Path) -> Iterator[None]:
    """Create a folder, and lock it so that only this process uses it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = take_lock(folder / "lock")
            break
        except FileNotFoundError:
            continue  # another merge has just finished and removed the folder
    if lock is None:
        raise StoredError(f"another merge is writing {out} ({folder / 'lock'} is locked); wait until it has finished")
    with lock:
        yield
