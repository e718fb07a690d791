"""Commands that read run directories and need no cluster: `rollcall recover`, `status RUN_DIR`, `compare`, `trace`, `view`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from rollcall.base.wait import say
from rollcall.base.words import counted, span
from rollcall.cli import Json, RunDir, answer, print_rows

if TYPE_CHECKING:
    from rich.table import Table

    from rollcall.base.lease import Holder
    from rollcall.view.reader import RunState
    from rollcall.view.recover import RunReport

LONG = 8 << 20  # bytes of calls; reading and writing more than this takes more than a few seconds


def recover(
    run_dir: RunDir,
    repair: Annotated[bool, Option("--repair", help="Move torn files to RUN_DIR/set-aside/. Deletes nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Explain a run directory: last checkpoint, finished groups, torn files, its owner, and what a resume will do.

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
    if repair and not moved and not as_json:
        print("nothing to repair")
    answer(report.as_json() | {"set_aside": moved}, lambda _: _show(report), as_json=as_json)


def show_run(run_dir: Path, *, as_json: bool) -> None:
    """Print a run's state and its last steps."""
    from rollcall.observe.events import read_phases
    from rollcall.view.reader import holder_as_json, open_run
    from rollcall.view.summary import standing_rows

    run = open_run(run_dir)
    holder = run.holder()
    phases, state = read_phases(run_dir), run.state()
    steps = sorted({event.step for event in phases})[-3:]
    recent = [event for event in phases if event.step in steps]
    standing = run.standing(state)
    if as_json:
        shown = {
            "run_dir": str(run_dir),
            **standing,
            "state": state.word,
            "finished": state.word == "finished",
            "current": asdict(phases[-1]) if phases else None,
            "lease": holder_as_json(holder),
            "phases": [asdict(event) for event in recent],
        }
        print(json.dumps(shown))
        return
    progress = ", ".join(f"{label} {text}".strip() for label, text in standing_rows(standing))
    print_rows([*_about(run_dir, holder, state), ("progress", progress)], width=8)
    for step in steps:
        print(f"step {step}")
        for event in (event for event in recent if event.step == step):
            took = "-" if event.duration_s is None else f"{event.duration_s:.2f} s"
            notes = [f"waited for {event.waited_for}"] if event.waited_for else []
            notes += [event.result] if event.result else []
            if took == "0.00 s" and not notes:
                continue  # a phase with nothing to show, such as releasing an engine that needs no release
            print(f"  {event.phase:<20} {took:>10}  {'; '.join(notes)}".rstrip())


def _about(run_dir: Path, holder: Holder | None, state: RunState) -> list[tuple[str, str]]:
    from rollcall.view.reader import describe_holder

    now = "last" if state.is_over else "now"
    return [("run", str(run_dir)), ("held by", describe_holder(holder)), (now, _in_words(state))]


def _in_words(state: RunState) -> str:
    """Describe a run's state. If the run is over, begin with the state's name; otherwise add how long it has lasted."""
    clock = "" if state.since_s is None else time.strftime("%H:%M:%S", time.localtime(state.since_s))
    if state.is_over:
        when = "" if state.since_s is None else f" ({'begun ' if state.word == 'killed' else ''}at {clock})"
        return f"{state.word}; {state.text}{when}"
    if state.since_s is None:
        return state.text
    waits = "waiting " if state.word == "waiting" else ""
    return f"{state.text} ({waits}since {clock}, {time.time() - state.since_s:.0f} s)"


def _runs_of(groups: dict[int, int]) -> list[str]:
    """Summarise consecutive steps with the same number of groups in one line.

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
    whole = "none" if report.last is None else f"step {report.last.step}, all files unchanged since they were written"
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in report.audit.counts().items())
    rows = [
        *_about(report.run.dir, report.holder, report.state),
        ("checkpoint", whole),
        *(("journal", text) for text in _runs_of(report.groups)),
        *(("torn", f"{one.path}: {one.why}") for one in report.audit.torn),
        ("audit", counts),
    ]
    print_rows(rows, width=11)
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


def _show_both(comparison: dict[str, Any]) -> None:
    from rich.text import Text

    from rollcall.base.screen import Screen

    console = Screen(soft_wrap=True)
    settings = _table("setting", comparison)
    for key, pair in comparison["settings"].items():
        settings.add_row(*(Text(str(value)) for value in (key, *pair)))
    if comparison["settings"]:
        console.print(settings)
    else:
        console.print("all settings are the same")
    numbers = _table("number", comparison)
    numbers.add_column("second/first", justify="right")
    for name, (first, second) in comparison["numbers"].items():
        digits = 3 if "accuracy" in name or "reward" in name else 2 if "(" in name else 1 if "length" in name else 0
        shown = ["-" if value is None else f"{value:,.{digits}f}" for value in (first, second)]
        numbers.add_row(name, *shown, f"{second / first:.2f}" if first and second is not None else "")
    console.print(numbers)


def _table(what: str, comparison: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(what)
    right: Any = "right" if what == "number" else "left"
    for name in comparison["runs"]:
        table.add_column(Text(name), justify=right, overflow="fold")
    return table


def trace(
    run_dir: RunDir,
    out: Annotated[Path, Option(metavar="FILE", help="File to write.")] = Path("trace.json"),
    first_step: Annotated[int | None, Option("--from", metavar="STEP", min=0, help="First step.")] = None,
    last_step: Annotated[int | None, Option("--to", metavar="STEP", min=0, help="Last step.")] = None,
    as_json: Json = False,
) -> None:
    """Write a Chrome trace of what the controller and every worker did over time. Open it on ui.perfetto.dev.

    This works during a run and afterwards. It also prints the share of time for which each worker was idle.

    \b
    Examples:
      rollcall trace runs/gsm8k --out trace.json
      rollcall trace runs/gsm8k --from 100 --to 110 --out slow_steps.json
    """
    from rollcall.base.atomic import write_atomic
    from rollcall.observe.calls import CALLS
    from rollcall.observe.timeline import chrome_trace, idle_shares, read_timeline
    from rollcall.view.reader import open_run

    open_run(run_dir)
    if first_step is not None and last_step is not None and last_step < first_step:
        raise ValueError(f"--from {first_step} --to {last_step} selects no step; --to must not come before --from")
    calls = run_dir / CALLS
    if first_step is None and last_step is None and calls.exists() and calls.stat().st_size > LONG:
        size = f"{calls.stat().st_size >> 20:,} MiB"
        say(f"{calls} is {size}, so tracing all steps takes much time and memory; select some with --from and --to")
    found = read_timeline(run_dir, first_step=first_step, last_step=last_step)
    if not found.spans:
        hint = f"`rollcall status {run_dir}` shows its last steps"
        raise ValueError(f"{run_dir} has no phases for these steps in events.jsonl; {hint}")
    write_atomic(out, json.dumps(chrome_trace(found, name=run_dir.resolve().name)))
    shown = {
        "out": str(out),
        "lanes": list(found.lanes),
        "spans": len(found.spans),
        "marks": len(found.marks),
        "idle": {lane: round(share, 4) for lane, share in idle_shares(found).items()},
    }
    answer(shown, _show_trace, as_json=as_json)


def _show_trace(shown: dict[str, Any]) -> None:
    what = f"{counted(shown['spans'], 'span')} of {counted(len(shown['lanes']), 'lane')}, {counted(shown['marks'], 'mark')}"
    print(f"{shown['out']}: {what}; open it on ui.perfetto.dev")
    for lane, share in shown["idle"].items():
        print(f"  {lane:<32} idle {share:.0%}")


def view(
    runs: Annotated[
        list[Path] | None, Argument(metavar="RUN_DIR|FOLDER", help="Run directories or folders of runs. Default: runs/")
    ] = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port on this machine. Default: a free port.")] = 0,
    open_browser: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on a page: curves, samples, tokens, timeline, cluster. It works during a run and afterwards.

    Only this machine can open the page, and each printed address works once. The page reads run directories and changes
    nothing in them. To open it from another machine, use ssh -L PORT:127.0.0.1:PORT HOST. Ctrl-C stops the server.

    \b
    Examples:
      rollcall view                        every run in runs/
      rollcall view runs/gsm8k --open
      rollcall view runs/grpo runs/dapo    two runs, to compare
      rollcall view /shared/runs --port 8080
    """
    from rollcall.view.page_process import refuse_without_packages

    refuse_without_packages()
    from rollcall.view.api import ShownRuns
    from rollcall.view.server import serve

    serve(ShownRuns(runs or []), port=port, open_browser=open_browser, tell=say)
