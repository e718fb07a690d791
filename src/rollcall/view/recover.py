"""Describes a run directory after a crash or damage, and what `rollcall train` would do with it.

``look`` changes nothing and may be used while the run is running. ``repair`` moves torn files to ``RUN_DIR/set-aside/`` and
deletes nothing: if part of a file is intact, it moves the original there and keeps the intact part in its place. A run repairs
itself when it is resumed. Use this module to look first, or if something other than a crash damaged the directory.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.base.append_file import is_count
from rollcall.base.atomic import fsync, write_atomic
from rollcall.base.journal import ATTEMPTS, GROUPS, whole_records
from rollcall.base.lease import WATCH_S, Holder, hold
from rollcall.base.wait import say
from rollcall.base.words import all_of, counted, span
from rollcall.checkpoint.store import Checkpoint
from rollcall.view.audit import Audit, Torn, audit, judge_file
from rollcall.view.reader import RunReader, RunState, holder_as_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    run: RunReader
    audit: Audit
    holder: Holder | None
    state: RunState

    @property
    def last(self) -> Checkpoint | None:
        """The newest intact checkpoint."""
        return next((one for one in reversed(self.audit.checkpoints) if not one.reason), None)

    @property
    def groups(self) -> dict[int, int]:
        """Steps after the checkpoint, with their number of finished groups."""
        return {step: count for step, count in self.audit.groups.items() if step > self.start_step}

    @property
    def replayed(self) -> list[int]:
        """Steps after the checkpoint that were trained and will be trained again, on the same groups."""
        return sorted({step for step, _ in self.audit.trained if step > self.start_step})

    @property
    def start_step(self) -> int:
        return self.last.step if self.last else 0

    def next(self) -> list[str]:
        """Describe what the next `rollcall train` will do."""
        holder = self.holder
        if holder is None or holder.is_gone:
            lines = ["start at once: no process holds the run directory"]
        elif holder.is_here:
            lines = [f"refuse: {holder} holds the run directory and is running"]
        else:
            lines = [f"watch {holder} for {WATCH_S:g} s, take over if its counter does not move, refuse if it does"]
        num_steps, prompts_per_step = self.run.num_steps, self.run.setting("data", "prompts_per_step")
        if num_steps is not None and self.start_step >= num_steps:
            done = "the model is in model/" if (self.run.dir / "model").exists() else "write the model"
            return [*lines, f"find {all_of(num_steps, 'step')} trained; {done}"]
        lines.append(f"start from {'the checkpoint of step ' + str(self.start_step) if self.last else 'the beginning'}")
        if self.replayed:
            steps = span(self.replayed[0], self.replayed[-1])
            lines.append(f"train {steps} again, on the same groups and with the same result")
        for step, count in self.groups.items():
            if step not in self.replayed:
                missing = prompts_per_step - count if is_count(prompts_per_step) else 0
                rest = f", generate the other {missing}" if missing > 0 else ""
                lines.append(f"take {counted(count, 'finished group')} of step {step} from the journal{rest}")
        if self.audit.torn:
            lines.append("move torn ends to set-aside/ and skip torn checkpoints; nothing intact is lost")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run.dir),
            "checkpoints": [
                {"step": at.step, "whole": not at.reason, "why": at.reason} for at in self.audit.checkpoints
            ],
            "last_checkpoint": self.last.step if self.last else None,
            "steps": self.run.num_steps,
            "finished_groups": self.groups,
            "replayed": self.replayed,
            "torn": [{"path": str(one.path), "why": one.why} for one in self.audit.torn],
            "audit": self.audit.counts(),
            "lease": holder_as_json(self.holder),
            "next": self.next(),
        }


def look(run_dir: Path) -> RunReport:
    run = RunReader(run_dir)
    return RunReport(run=run, audit=audit(run.dir), holder=run.holder(), state=run.state())


def repair(run_dir: Path) -> list[Path]:
    """Move torn files to ``set-aside/`` and return their new paths. Raises if a controller holds the run directory."""
    run_dir = Path(run_dir)
    with hold(run_dir):
        torn = audit(run_dir).torn
        if not torn:
            return []
        folder = run_dir / "set-aside" / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        while folder.exists():
            folder = folder.with_name(f"{folder.name}-again")
        moved = []
        for one in torn:
            target = folder / one.path.relative_to(run_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            _set_aside(one, target)
            say(f"{one.path}: {one.why}; moved to {target}")
            moved.append(target)
        return moved


def _set_aside(torn: Torn, target: Path) -> None:
    path = torn.path
    if path.is_dir() or path.name.startswith("."):
        path.rename(target)
        return
    if path.suffix in (f".{GROUPS}", f".{ATTEMPTS}"):
        whole = whole_records(path)
    else:
        whole = b"".join(line for line, good in judge_file(path) if good)
    # Copy the file instead of moving it, so that the run is never without the file, even if this process is killed.
    shutil.copy2(path, target)
    fsync(target)
    write_atomic(path, whole)
