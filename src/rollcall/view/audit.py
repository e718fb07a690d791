"""Counts errors in a run directory: draws that were skipped, trained twice or generated twice, and torn files.

``audit`` reads the journal, the record of trained steps, the checkpoints and the JSONL files. It does not change any file, and it does
not rely on earlier counts. A killed run's files may have torn ends until the run is resumed. When a run has finished, all error counts
are 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollcall.base.append_file import lines_end, parse_row
from rollcall.base.journal import ATTEMPTS, StepFile, inspect, is_trained_row
from rollcall.base.words import are, counted
from rollcall.checkpoint.run_dir import ATOMIC_FOLDERS
from rollcall.checkpoint.store import Checkpoint, store_of
from rollcall.loop.supply import Cursor
from rollcall.view.reader import RunReader

TRAINED = "trained.jsonl"
FARTHEST = 10_000  # how many draws a run can leave out for each trained or journaled draw


class Torn(NamedTuple):
    path: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The counts, and the data that they come from. Lists of draws are ascending."""

    checkpoints: tuple[Checkpoint, ...]  # oldest first, with verified checksums
    trained: tuple[tuple[int, list[int]], ...]  # steps with their draws in training order, including replays
    groups: dict[int, int]  # step -> finished groups in the journal
    steps: int  # number of trained steps
    skipped: tuple[int, ...]  # untrained draws that came before trained draws
    trained_twice: tuple[int, ...]  # draws that more than one step trained on
    regenerated: tuple[int, ...]  # draws with more than one record
    remade: tuple[int, ...]  # draws with an episode that has more than one record
    torn: tuple[Torn, ...]

    @property
    def is_clean(self) -> bool:
        return not (self.skipped or self.trained_twice or self.regenerated or self.remade or self.torn)

    def counts(self) -> dict[str, int]:
        return {
            "steps": self.steps,
            "prompts_skipped": len(self.skipped),
            "trained_twice": len(self.trained_twice),
            "groups_regenerated": len(self.regenerated),
            "episodes_regenerated": len(self.remade),
            "files_torn": len(self.torn),
        }


def audit(run_dir: Path) -> Audit:
    run_dir = Path(run_dir)
    if not (run_dir / "journal").is_dir():
        why = "has no journal, so it is not a run directory" if run_dir.is_dir() else "is not a directory"
        raise ValueError(f"{run_dir} {why}; pass the directory of a run (run.dir)")
    files = inspect(run_dir / "journal")
    attempts = inspect(run_dir / "journal", ATTEMPTS)
    records = Counter(draw for file in files for draw in file.draws)
    episodes = Counter(place for file in attempts for place in file.places)
    rows = [json.loads(line) for line, good in judge_file(run_dir / "journal" / TRAINED) if good]
    trained = tuple((row["step"], row["draws"]) for row in rows)
    # A step that was trained again after a crash has several rows.
    steps_of = Counter(draw for _, draw in {(step, draw) for step, draws in trained for draw in draws})
    repeats = {draw for _, draws in trained for draw, count in Counter(draws).items() if count > 1}
    checkpoints = tuple(store_of(run_dir).inspect())
    return Audit(
        checkpoints=checkpoints,
        trained=trained,
        groups={file.step: len(set(file.draws)) for file in files},
        steps=len({step for step, _ in trained}),
        skipped=tuple(sorted(_skipped(run_dir, set(steps_of), set(records), checkpoints))),
        trained_twice=tuple(sorted(repeats | {draw for draw, num_steps in steps_of.items() if num_steps > 1})),
        regenerated=tuple(sorted(draw for draw, count in records.items() if count > 1)),
        remade=tuple(sorted({draw for (draw, _), count in episodes.items() if count > 1})),
        torn=tuple(find_torn(run_dir, files=[*files, *attempts], checkpoints=checkpoints)),
    )


def find_torn(run_dir: Path, *, files: Sequence[StepFile], checkpoints: Sequence[Checkpoint]) -> list[Torn]:
    """Return everything that a killed write may have left incomplete."""
    bad_bytes = [(file.path, file.num_bad_bytes) for file in files if file.num_bad_bytes]
    torn = [Torn(path, f"{counted(num, 'byte')} {are(num)} not a complete record") for path, num in bad_bytes]
    for name in (f"journal/{TRAINED}", "metrics.jsonl", "events.jsonl"):
        if bad := sum(not good for _, good in judge_file(run_dir / name)):
            torn.append(Torn(run_dir / name, f"{counted(bad, 'line')} {are(bad)} incomplete"))
    torn += [Torn(state.path, state.reason) for state in checkpoints if state.reason]
    torn += [
        Torn(path, "left over from a write that was killed")
        for folder in (run_dir, *(run_dir / name for name in ("checkpoints", *ATOMIC_FOLDERS)))
        for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if path.name.startswith((".tmp-", ".trash-"))
        # An old checkpoint that was replaced. If nothing has replaced it, it is still the current checkpoint.
        or (path.name.startswith(".old-") and path.with_name(path.name.removeprefix(".old-")).exists())
    ]
    return torn


def judge_file(path: Path) -> list[tuple[bytes, bool]]:
    """Return each line and whether it is intact. An intact line is a JSON object; in the file of trained steps, it also names a step's
    draws.

    A last line without a line break is not intact. A missing file has no lines.
    """
    data = path.read_bytes() if path.is_file() else b""
    end = lines_end(data)
    rows = [(line + b"\n", parse_row(line)) for line in data[:end].split(b"\n")[:-1]]
    judged = [(line, row is not None and (path.name != TRAINED or is_trained_row(row))) for line, row in rows]
    return judged + ([(data[end:], False)] if end < len(data) else [])


def _skipped(run_dir: Path, trained: set[int], journaled: set[int], checkpoints: Sequence[Checkpoint]) -> set[int]:
    """Return the untrained draws below the highest trained draw.

    With ``algorithm.dynamic_sampling`` or ``trainer.order: as_completed``, a run may leave out draws on purpose or train on them later.
    In such a run, a draw counts as skipped only if it came before the newest checkpoint, is not pending in that checkpoint, and is not in
    the journal.
    """
    last = max(trained, default=-1)
    if last > FARTHEST * (len(trained) + len(journaled)) + FARTHEST:
        raise ValueError(
            f"{run_dir / 'journal' / TRAINED} names draw {last}, but the run has only {len(trained)} trained draws; the file is "
            "damaged: restore it, or remove that line if its step will be trained again"
        )
    missing = set(range(last + 1)) - trained
    run = RunReader(run_dir)
    may_leave_out = run.setting("algorithm", "dynamic_sampling") or run.setting("trainer", "order") == "as_completed"
    if not missing or not may_leave_out:
        return missing
    whole = [state for state in checkpoints if not state.reason]
    if not whole:
        return set()
    cursor = Cursor.of(whole[-1].state, where=str(whole[-1].path))
    return {draw for draw in missing - journaled - set(cursor.pending) if draw < cursor.next_draw}
