"""Verbs that read run directories, without a cluster: `rollcall recover`, `rollcall status RUN_DIR`, `rollcall compare`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from rollcall.cli import Json, RunDir, answer
from rollcall.screen import Screen
from rollcall.words import counted, span

if TYPE_CHECKING:
    from rollcall.view.compare import Comparison
    from rollcall.view.reader import RunState
    from rollcall.view.recover import RunReport


def recover(
    run_dir: RunDir,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move torn files to RUN_DIR/set-aside/. Deletes nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Explain a run directory: last checkpoint, finished groups, torn files, its owner, what a resume will do.

    \b
    Examples:
      rollcall recover runs/arithmetic
      rollcall recover runs/arithmetic --json
      rollcall recover runs/arithmetic --repair
    """
    from rollcall.view.recover import look
    from rollcall.view.recover import repair as set_aside

    moved = set_aside(run_dir) if repair else []
    report = look(run_dir)
    if as_json:
        print(json.dumps(report.as_json() | {"set_aside": [str(path) for path in moved]}))
        return
    if repair and not moved:
        print("nothing to repair")
    _show(report)


def show_run(run_dir: Path, *, as_json: bool) -> None:
    """What a run does now, and what its last steps did."""
    from rollcall.checkpoint.run_dir import is_run
    from rollcall.observe.events import read_phases
    from rollcall.view.reader import RunReader, describe_holder, holder_as_json

    run = RunReader(run_dir)
    holder = run.holder()
    if not run_dir.is_dir() and (holder is None or holder.is_gone):
        raise ValueError(
            f"{run_dir} does not exist. A run makes it some seconds after its start; otherwise give the run.dir of a run, or nothing "
            "to see the cluster"
        )
    if holder is None and not is_run(run_dir):
        raise ValueError(f"{run_dir} holds no file of a run; give the run.dir of a run, or nothing to see the cluster")
    phases, state = read_phases(run_dir), run.state()
    steps = sorted({event.step for event in phases})[-3:]
    recent = [event for event in phases if event.step in steps]
    stands = run.standing(state)
    if as_json:
        shown = {
            "run_dir": str(run_dir),
            **stands.as_json(),
            "state": state.word,
            "finished": state.word == "finished",
            "current": asdict(phases[-1]) if phases else None,
            "lease": holder_as_json(holder),
            "phases": [asdict(event) for event in recent],
        }
        print(json.dumps(shown))
        return
    print(f"run      {run_dir}\nheld by  {describe_holder(holder)}")
    print(f"{'last' if state.is_over else 'now':<8} {_in_words(state)}")
    print(f"{'stands':<8} {', '.join(f'{label} {text}' for label, text in stands.rows())}")
    for step in steps:
        print(f"step {step}")
        for event in (event for event in recent if event.step == step):
            took = "-" if event.duration_s is None else f"{event.duration_s:.2f} s"
            notes = [f"waited for {event.waited_for}"] if event.waited_for else []
            notes += [event.result] if event.result else []
            if took == "0.00 s" and not notes:
                continue  # such as a release of an engine that needs none
            print(f"  {event.phase:<20} {took:>10}  {'; '.join(notes)}".rstrip())


def _in_words(state: RunState) -> str:
    """A state that lasts with its time so far; one that has ended with its word."""
    clock = "" if state.since_s is None else time.strftime("%H:%M:%S", time.localtime(state.since_s))
    if state.is_over:
        when = "" if state.since_s is None else f" ({'begun ' if state.word == 'killed' else ''}at {clock})"
        return f"{state.word}; {state.text}{when}"
    if state.since_s is None:
        return state.text
    waits = "waiting " if state.word == "waiting" else ""
    return f"{state.text} ({waits}since {clock}, {time.time() - state.since_s:.0f} s)"


def _runs_of(groups: dict[int, int]) -> list[str]:
    """One line for consecutive steps with the same number of groups.

    >>> _runs_of({3: 48, 4: 48, 5: 48, 6: 7})
    ['steps 3 to 5: 48 finished groups each', 'step 6: 7 finished groups']
    """
    runs: list[tuple[int, int, int]] = []
    for step, count in sorted(groups.items()):
        if runs and (runs[-1][1] + 1, runs[-1][2]) == (step, count):
            runs[-1] = (runs[-1][0], step, count)
        else:
            runs.append((step, step, count))
    return [
        f"{span(first, last)}: {counted(count, 'finished group')}{'' if first == last else ' each'}"
        for first, last, count in runs
    ]


def _show(report: RunReport) -> None:
    from rollcall.view.reader import describe_holder

    rows = [
        ("run", str(report.run_dir)),
        ("held by", describe_holder(report.holder)),
        ("last" if report.state.is_over else "now", _in_words(report.state)),
    ]
    whole = "none" if report.last is None else f"step {report.last.step}, all files as they were written"
    rows.append(("checkpoint", whole))
    rows += [("journal", text) for text in _runs_of(report.groups)]
    rows += [("torn", f"{one.path}: {one.why}") for one in report.audit.torn]
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in report.audit.counts().items())
    rows.append(("audit", counts))
    for label, text in rows:
        print(f"{label:<11} {text}")
    print("the next `rollcall train` would")
    for line in report.next():
        print(f"  - {line}")


def compare(first: RunDir, second: RunDir, as_json: Json = False) -> None:
    """Compare two runs: settings that differ, accuracy, reward, lengths, speed.

    \b
    Examples:
      rollcall compare runs/grpo runs/dapo
      rollcall compare runs/grpo runs/dapo --json
    """
    from rollcall.view.compare import compare as side_by_side
    from rollcall.view.reader import open_run

    answer(side_by_side(open_run(first), open_run(second)), _show_both, as_json=as_json)


def _show_both(comparison: Comparison) -> None:
    console = Screen(soft_wrap=True)
    settings = _table("setting", comparison)
    for key, pair in comparison.settings.items():
        settings.add_row(*(Text(str(value)) for value in (key, *pair)))
    if comparison.settings:
        console.print(settings)
    else:
        console.print("all settings are the same")
    numbers = _table("number", comparison)
    numbers.add_column("second/first", justify="right")
    for line in comparison.lines:
        shown = ["-" if value is None else f"{value:,.{line.digits}f}" for value in line.values]
        numbers.add_row(line.name, *shown, "" if line.ratio is None else f"{line.ratio:.2f}")
    console.print(numbers)


def _table(what: str, comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(what)
    right: Any = "right" if what == "number" else "left"
    for name in comparison.runs:
        table.add_column(Text(name), justify=right, overflow="fold")
    return table
