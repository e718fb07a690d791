"""Atomic checkpoints: each is either complete or does not exist.

The process that owns the store saves to ``.tmp-step-000020-<random>``, adds a manifest with every file's size and checksum, flushes
everything to disk, and only then renames the folder to ``step-000020``. ``latest`` accepts a checkpoint only if its files match its
manifest; otherwise it falls back to the previous one. Only one process saves; any number may read.

The store does not read files again that other processes have written and described (``Written``). Such files may be on those processes'
nodes, outside the folder; the manifest then records the node and the path. A reader checks the files that exist on its own node.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollcall.base.atomic import fsync_tree, staging, swap_in, write_atomic
from rollcall.base.errors import CheckpointError
from rollcall.base.patience import persist
from rollcall.base.wait import warn
from rollcall.model.stored.files import StoredError, StoredFile, file_checksum
from rollcall.model.stored.find import MANIFEST, STEP_NAME, missing_file, read_manifest

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The checkpoint files that a process has written, and its facts for the manifest."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: size, blake2b, kind, node, host, place
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder in the store, complete or torn."""

    path: Path
    step: int
    manifest: dict[str, Any] | None  # None if it is torn
    reason: str  # why it is torn; empty if it is complete
    files: Sequence[StoredFile] = ()  # files that must be on this node

    @property
    def score(self) -> float | None:
        return None if self.manifest is None else self.manifest["score"]

    @property
    def state(self) -> dict[str, Any]:
        """The run's state. Only complete checkpoints have it."""
        return json.loads((self.path / STATE).read_bytes())


class CheckpointStore:
    """A run's checkpoints. ``guard`` is called before a checkpoint is put in place, and raises if this process must no longer write."""

    def __init__(self, dir: Path, *, keep_last: int, keep_best: int, guard: Callable[[], None] = lambda: None) -> None:
        self.dir = Path(dir)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._guard = guard
        # Torn checkpoints that were reported, because each attempt looks for the newest checkpoint again
        self._warned: set[Path] = set()

    def save(
        self,
        step: int,
        *,
        write: Callable[[Path], Written | None],
        state: dict[str, Any],
        score: float | None,
        scores: Mapping[str, float] | None = None,
        best_by: str | None = None,
    ) -> Path:
        """Let ``write`` fill a folder, then make that folder the checkpoint for ``step``, in place of any earlier one. ``write`` returns
        a description of files that other processes wrote.

        The best checkpoints are those with the highest ``score``. If later saves may rank by something else, ``best_by`` selects the
        entry of ``scores`` to rank by.
        """
        self.clean()  # at every save: a lost worker may still have written to the folder of a failed save after its removal
        if score is not None and math.isnan(score):
            score = None
        final = self.dir / f"step-{step:06d}"

        def attempt() -> None:
            self._guard()
            with staging(final) as tmp:
                written = write(tmp) or Written()
                (tmp / STATE).write_text(json.dumps(state, indent=1))
                files = _all_files(tmp, written=written)
                about = {"step": step, "score": score, "scores": dict(scores or {}), "weight_version": step}
                (tmp / MANIFEST).write_text(json.dumps({**about, **written.facts, "files": files}, indent=1))
                fsync_tree(tmp)
                self._guard()
                swap_in(tmp, final)

        persist(attempt, path=final, what="the checkpoint", refuse=CheckpointError)
        self.clean()  # if the folder was not writable for a while, failed attempts could not clean up
        self._prune(just_saved=final, best_by=best_by)
        return final

    def add_scores(self, step: int, *, scores: Mapping[str, float], best_by: str) -> None:
        """Add scores to a checkpoint that was saved before its evaluation. The next save uses them for ranking."""
        entry = next((one for one in self._entries() if one.step == step and one.manifest is not None), None)
        if entry is None or entry.manifest is None or not scores:
            return
        data = json.dumps({**entry.manifest, "score": scores.get(best_by), "scores": dict(scores)}, indent=1)
        path = entry.path / MANIFEST

        def attempt() -> None:
            self._guard()
            write_atomic(path, data)

        persist(attempt, path=path, what=f"the scores of step {step}", refuse=CheckpointError)

    def latest(
        self, *, before: int | None = None, missing: Callable[[Path], str] = lambda path: ""
    ) -> Checkpoint | None:
        """Return the newest checkpoint (with a step below ``before``) whose files are all intact. Warns about torn checkpoints and
        skips them. ``missing`` describes a file that is on no node, or returns an empty string if there is none."""
        for entry in reversed(self._entries()):
            if before is not None and entry.step >= before:
                continue
            reason = entry.reason or _changed_file(entry) or missing(entry.path)
            if not reason:
                return entry
            if entry.path not in self._warned:
                warn(f"checkpoint {entry.path} is torn ({reason}) and is skipped")
            self._warned.add(entry.path)
        return None

    def inspect(self, *, checksums: bool = True) -> list[Checkpoint]:
        """Return all checkpoints, oldest first. Compares the files with the manifest, by checksum or, without ``checksums``, by size."""
        entries = self._entries()
        return [replace(one, reason=one.reason or _changed_file(one)) for one in entries] if checksums else entries

    def places(self) -> list[str]:
        """Return the paths of all checkpoint files on the nodes' own disks. Files with other paths are no longer needed."""
        files = [facts for entry in self._entries() if entry.manifest for facts in entry.manifest["files"].values()]
        return sorted(facts["place"] for facts in files if facts.get("place") is not None)

    def clean(self) -> None:
        """Remove what a killed or failed save left behind. Only the saving process may call this."""
        for path in sorted(self.dir.iterdir()) if self.dir.is_dir() else []:
            kind, _, name = path.name.partition("-")
            if kind == ".old" and not (self.dir / name).exists():
                warn(f"checkpoint {name} was being replaced when the process was killed; the old one is restored")
                path.rename(self.dir / name)
            elif kind in (".tmp", ".old", ".trash"):
                warn(f"checkpoint folder {self.dir}: removing {path.name}, left by an unfinished save")
                try:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                except OSError as error:
                    warn(f"{path} cannot be removed: {error}")

    def _entries(self) -> list[Checkpoint]:
        """Return all checkpoints, oldest first. Checks their files only by name and size."""
        found: dict[int, Path] = {}
        # If the process was killed between the two renames of a replacement, only .old-step-N is left. It sorts before step-N.
        for path in sorted(self.dir.iterdir()) if self.dir.is_dir() else []:
            match = STEP_NAME.fullmatch(path.name.removeprefix(".old-"))
            if match and path.is_dir():
                found[int(match.group(1))] = path
        return [_read_entry(found[step], step=step) for step in sorted(found)]

    def _prune(self, *, just_saved: Path, best_by: str | None) -> None:
        entries = self._entries()
        valid = [entry for entry in entries if entry.manifest is not None]
        scored = [(_score(entry.manifest or {}, best_by), entry.step, entry.path) for entry in valid]
        best = sorted(item for item in scored if item[0] is not None)[::-1][: self.keep_best]
        keep = {just_saved, *(entry.path for entry in valid[-self.keep_last :]), *(path for _, _, path in best)}
        step = next(entry.step for entry in entries if entry.path == just_saved)
        for entry in entries:
            if entry.path in keep or (entry.manifest is None and entry.step > step):
                continue
            trash = self.dir / f".trash-{entry.path.name}"
            try:
                entry.path.rename(trash)
                shutil.rmtree(trash)
            except OSError as error:
                warn(f"old checkpoint {entry.path} cannot be removed: {error}")


def store_of(run_dir: Path) -> CheckpointStore:
    """Open a run's checkpoints for reading only."""
    return CheckpointStore(run_dir / "checkpoints", keep_last=1, keep_best=0)


def _score(manifest: dict[str, Any], best_by: str | None) -> float | None:
    return manifest["score"] if best_by is None else manifest.get("scores", {}).get(best_by)


def describe_files(root: Path, *, leave_out: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of every file below ``root``, keyed by relative path."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    paths = [path for path in paths if path.relative_to(root).as_posix() not in leave_out]
    return {
        path.relative_to(root).as_posix(): {"size": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(paths, _digests(paths), strict=True)
    }


def _all_files(root: Path, *, written: Written) -> dict[str, dict[str, Any]]:
    """Describe all files of a checkpoint. Trusts the checksums in ``written``, but raises if those files are missing on this node."""
    for name, facts in written.files.items():
        path = root / name
        if "place" not in facts and (not path.is_file() or path.stat().st_size != facts["size"]):
            raise CheckpointError(
                f"a process on node {facts['node']} ({facts['host']}) wrote {path}, but on this node the file is missing or "
                "incomplete; put run.dir on a folder that all nodes share"
            )
    own = describe_files(root, leave_out=written.files)
    described = {name: {**facts, "kind": "state"} for name, facts in own.items()}
    return dict(sorted({**described, **written.files}.items()))


def _digests(paths: list[Path]) -> list[str]:
    # hashlib releases the GIL, so threads help.
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(file_checksum, paths))


def _read_entry(path: Path, *, step: int) -> Checkpoint:
    try:
        read = read_manifest(path)
    except StoredError as error:
        return Checkpoint(path=path, step=step, manifest=None, reason=str(error))
    reason = missing_file(read.here)
    return Checkpoint(path=path, step=step, manifest=None if reason else read.fields, reason=reason, files=read.here)


def _changed_file(entry: Checkpoint) -> str:
    """Describe the first file whose checksum differs. Empty if all match."""
    try:
        pairs = zip(entry.files, _digests([file.path for file in entry.files]), strict=True)
    except OSError as error:
        return f"cannot be read: {error}"
    return next((f"checksum of {file} differs" for file, digest in pairs if file.blake2b != digest), "")
