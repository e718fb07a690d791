"""Gathers, merges, verifies and uploads a run's newest checkpoint.

Steps that are already done are skipped. ``finish.json`` in the run directory records the inputs of the merge and the upload, and
``verified.json`` in the model directory records what was verified. If the checkpoint, a setting or a file
has changed, the step runs again, and so do all later steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rollcall.base.atomic import write_atomic
from rollcall.base.words import counted, size
from rollcall.checkpoint.merge.merge import DTYPES, merge
from rollcall.checkpoint.run_dir import run_file_of
from rollcall.checkpoint.store import describe_files
from rollcall.checkpoint.verify import mark_of, verify, why_not_verified
from rollcall.config import Config, load_config
from rollcall.launch.finish.gather import OnBytes, gather, is_here, parts_elsewhere
from rollcall.launch.finish.nodes_of import find_nodes
from rollcall.launch.finish.upload import Uploaded, upload
from rollcall.model.stored.find import checkpoint_of
from rollcall.model.stored.tensors import StoredError

NOTES = "finish.json"  # in the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    name: str
    state: Literal["done", "was done", "would be done", "not asked for"]
    words: str  # what was done, or why it was not done


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    run_dir: Path
    checkpoint: Path
    model: Path
    steps: tuple[FinishStep, ...]
    uploaded: Uploaded | None  # None if this call did not upload it

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps": {step.name: {"state": step.state, "words": step.words} for step in self.steps}}


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest complete one in a run directory or its ``checkpoints`` folder."""
    if (found := checkpoint_of(path)) is None:
        raise StoredError(
            f"{path} is neither a checkpoint nor a run directory that contains one; use the path of one or the other"
        )
    return found.absolute()


def finish(
    run: Path,
    *,
    overrides: Sequence[str] = (),
    hosts: Sequence[str] = (),
    dry_run: bool = False,
    progress: OnBytes = lambda done, total: None,
) -> FinishedRun:
    """Finish a run. ``run``: a run directory or run file. ``hosts``: hosts to ask for parts over ssh, as in ``find_nodes``."""
    file, values = run_file_of(run)
    config = load_config(file, list(overrides), defaults=dict(values))
    work = _Work(config, hosts=hosts, dry_run=dry_run, progress=progress)
    # The order matters: each step uses the result of the one before it.
    steps = (work.gather(), work.merge(), work.verify(), work.upload())
    return FinishedRun(
        run_dir=work.run_dir, checkpoint=work.checkpoint, model=work.model, steps=steps, uploaded=work.uploaded
    )


class _Work:
    def __init__(self, config: Config, *, hosts: Sequence[str], dry_run: bool, progress: OnBytes) -> None:
        self.run_dir = config.run.dir.absolute()
        self.checkpoint = checkpoint_at(self.run_dir)
        self.model = self.run_dir / "merged"
        self.section, self.hosts, self.dry_run, self.progress = config.finish, hosts, dry_run, progress
        self.uploaded: Uploaded | None = None
        self.begun = False  # whether an earlier step runs in this call; if so, all later steps run too
        try:
            self.notes: dict[str, Any] = json.loads((self.run_dir / NOTES).read_bytes())
        except (OSError, ValueError):  # the steps run again
            self.notes = {}

    def gather(self) -> FinishStep:
        parts = parts_elsewhere(self.checkpoint, kinds=("weights",))
        missing = [part for part in parts if not is_here(self.checkpoint, part)]
        if not missing:
            return FinishStep(name="gather", state="was done", words=f"all weights are in {self.checkpoint}")
        nodes = ", ".join(sorted({f"{part.node} ({part.host})" for part in missing}))
        words = f"{counted(len(missing), 'part')} ({size(sum(part.size for part in missing))}) from node {nodes}"

        def work() -> None:
            find = partial(find_nodes, self.run_dir, hosts=self.hosts)
            gather(self.checkpoint, find, kinds=("weights",), progress=self.progress)

        return self._step("gather", words, work)

    def merge(self) -> FinishStep:
        options = self.section.model_dump(include={"dtype", "max_shard_size"})
        manifest = hashlib.sha256((self.checkpoint / "manifest.json").read_bytes()).hexdigest()
        wanted = {"checkpoint": self.checkpoint.name, "manifest": manifest, **options}
        noted = self.notes.get("merge", {})
        same = not self.begun and {**noted, **wanted} == noted and (self.model / "config.json").is_file()
        if same and noted.get("weights") == _weights(self.model):  # a different merge may have written there
            return FinishStep(
                name="merge", state="was done", words=f"{self.checkpoint.name} is already merged into {self.model}"
            )

        def work() -> None:
            merge(self.checkpoint, self.model, **options, progress=self.progress)
            self._note("merge", {**wanted, "weights": _weights(self.model)})

        return self._step("merge", f"{self.checkpoint.name} into {self.model}, dtype {self.section.dtype}", work)

    def verify(self) -> FinishStep:
        wanted = DTYPES.get(self.section.dtype)
        dtype = None if wanted is None else wanted.name
        if not self.begun and not why_not_verified(self.model):
            return FinishStep(
                name="verify", state="was done", words=f"{self.model} has not changed since it was verified"
            )
        words = f"{self.model} against the log-probs of the trained model"
        return self._step("verify", words, lambda: verify(self.model, dtype=dtype).words)

    def upload(self) -> FinishStep:
        section = self.section.upload
        if section is None:
            return FinishStep(name="upload", state="not asked for", words="the run file has no finish.upload")
        from huggingface_hub import constants

        wanted = {**section.model_dump(), "endpoint": constants.ENDPOINT, "files": self._files()}
        if not self.begun and self.notes.get("upload", {}).get("of") == wanted:
            return FinishStep(name="upload", state="was done", words=f"{self.notes['upload'].get('url')}")

        def work() -> None:
            self.uploaded = upload(self.model, section.repo, private=section.private, revision=section.revision)
            self._note("upload", {"of": {**wanted, "files": self._files()}, "url": self.uploaded.url})

        return self._step("upload", f"{self.model} to {section.repo} ({section.revision or 'main'})", work)

    def _step(self, name: str, words: str, work: Callable[[], str | None]) -> FinishStep:
        """Do the step, unless this is a dry run. ``work`` may return a description that replaces ``words``."""
        self.begun = True
        if self.dry_run:
            return FinishStep(name=name, state="would be done", words=words)
        return FinishStep(name=name, state="done", words=work() or words)

    def _files(self) -> str | None:
        """Return one checksum for all files of the verified model."""
        mark = mark_of(self.model)
        return None if mark is None else hashlib.sha256(json.dumps(mark["files"], sort_keys=True).encode()).hexdigest()

    def _note(self, name: str, value: Any) -> None:
        self.notes[name] = value
        write_atomic(self.run_dir / NOTES, json.dumps(self.notes, indent=1))


def _weights(model: Path) -> dict[str, Any]:
    others = [path.relative_to(model).as_posix() for path in model.rglob("*") if path.suffix != ".safetensors"]
    return describe_files(model, leave_out=others)
