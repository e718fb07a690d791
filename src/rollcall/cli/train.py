"""`rollcall train`: run a run file, or go on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollcall.cli import INTERRUPTED, Debug, Json, Overrides, RunFile, calm_libraries, complain, split_arguments
from rollcall.phases import Bounds, Phase, Split


def train(
    file: RunFile = None,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: an existing run directory is moved aside, not deleted.")
    ] = False,
    phase: Annotated[
        Phase,
        typer.Option(
            "--phase", help="rollout: fill the journal and stop; update: train on what it has and stop; both: the loop."
        ),
    ] = Phase.BOTH,
    split: Annotated[
        Split, typer.Option("--split", help="With --phase rollout; eval: only evaluate the newest checkpoint.")
    ] = Split.TRAIN,
    eval_interval: Annotated[
        int | None, typer.Option("--eval-interval", metavar="N", min=0, help="The same as trainer.eval_every=N.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model; the same command again goes on where the run stands.

    \b
    Examples:
      rollcall train
      rollcall train --fresh trainer.steps=50 run.dir=runs/short
      rollcall train examples/gsm8k.yaml model.path=MODEL actor.lr=2e-6
      rollcall train examples/arithmetic.yaml algorithm.name=dapo --json
      rollcall train run.yaml --phase rollout       then, here or elsewhere:
      rollcall train run.yaml --phase update
      rollcall train run.yaml --phase rollout --split eval
    """
    from rollcall.config import load_config

    bounds = Bounds(phase=phase, split=split)
    path, changes = split_arguments(file, overrides)
    if eval_interval is not None:
        changes = [*changes, f"trainer.eval_every={eval_interval}"]
    config = load_config(path, changes)
    try:
        calm_libraries()
        from rollcall.train import train as run

        summary = run(config, fresh=fresh, quiet=as_json, bounds=bounds)
    except KeyboardInterrupt:
        complain(_standing(config.run.dir, num_steps=config.trainer.steps))
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(summary, default=str))


def _standing(run_dir: Path, *, num_steps: int) -> str:
    """Where an interrupted run is, for the person who interrupted it."""
    from rollcall.observe.sinks import read_rows

    done = max((row["step"] for row in read_rows(run_dir / "metrics.jsonl") if "time/step_s" in row), default=0)
    saved = max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")), default=0)
    return (
        f"stopped by Ctrl-C after step {done} of {num_steps}; {run_dir} has a checkpoint of step {saved} and every group "
        "finished since: the same command continues (leave out --fresh)"
    )
