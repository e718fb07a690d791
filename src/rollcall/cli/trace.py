"""`rollcall trace`: the timeline of a run as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollcall.cli import Json, RunDir, answer
from rollcall.wait import say
from rollcall.words import counted

LONG = 8 << 20  # bytes of calls; reading and writing all of them takes more than some seconds


def trace(
    run_dir: RunDir,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")] = Path("trace.json"),
    first_step: Annotated[int | None, typer.Option("--from", metavar="STEP", min=0, help="First step.")] = None,
    last_step: Annotated[int | None, typer.Option("--to", metavar="STEP", min=0, help="Last step.")] = None,
    as_json: Json = False,
) -> None:
    """Write what the controller and every worker did over time, as a Chrome trace: open it on ui.perfetto.dev.

    It works during a run and after it. It prints how much of the time each worker did nothing.

    \b
    Examples:
      rollcall trace runs/gsm8k --out trace.json
      rollcall trace runs/gsm8k --from 100 --to 110 --out slow_steps.json
    """
    from rollcall.observe.calls import CALLS
    from rollcall.observe.events import EVENTS
    from rollcall.observe.timeline import idle_shares, read_timeline
    from rollcall.observe.trace import write_trace
    from rollcall.view.reader import open_run

    open_run(run_dir)
    if first_step is not None and last_step is not None and last_step < first_step:
        raise ValueError(f"--from {first_step} --to {last_step} names no step; --to is the last one")
    calls = run_dir / CALLS
    if first_step is None and last_step is None and calls.exists() and calls.stat().st_size > LONG:
        size = calls.stat().st_size >> 20
        say(f"{calls} has {size:,} MiB, so all steps take long and much memory; --from and --to choose some")
    found = read_timeline(run_dir, first_step=first_step, last_step=last_step)
    if not found.spans:
        raise ValueError(
            f"{run_dir} has no phase of these steps in events.jsonl; `rollcall status {run_dir}` shows what it has"
        )
    if found.num_bytes_left_out:
        say(
            f"{run_dir / EVENTS} is too long to be read as a whole: its first {found.num_bytes_left_out:,} bytes are left out"
        )
    write_trace(out, found, name=run_dir.resolve().name)
    shown = {
        "out": str(out),
        "lanes": list(found.lanes),
        "spans": len(found.spans),
        "marks": len(found.marks),
        "idle": {lane: round(share, 4) for lane, share in idle_shares(found).items()},
    }
    answer(shown, _show, as_json=as_json)


def _show(shown: dict[str, Any]) -> None:
    what = f"{counted(shown['spans'], 'span')} of {counted(len(shown['lanes']), 'lane')}, {counted(shown['marks'], 'mark')}"
    print(f"{shown['out']}: {what}; open it on ui.perfetto.dev")
    for lane, share in shown["idle"].items():
        print(f"  {lane:<32} idle {share:.0%}")
