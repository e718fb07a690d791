"""`rollcall simulate`: rehearse a run's cluster on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from rollcall.cli import FAILED, Json, Overrides, RunFile, calm_libraries, split_arguments
from rollcall.words import counted


def simulate(file: RunFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Rehearse a run on this machine: its nodes, slots and placement, with a tiny model, for two steps.

    Needs no GPU and no data. Exits with status 1 and the reason if the run does not work.

    \b
    Examples:
      rollcall simulate examples/cluster_4x8.yaml
      rollcall simulate run.yaml cluster.num_nodes=2 cluster.num_gpus_per_node=2
      rollcall simulate run.yaml --json
    """
    from rollcall.config import load_config

    config = load_config(*split_arguments(file, overrides))
    calm_libraries()
    from rollcall.simulate import simulate as rehearse

    verdict = rehearse(config)
    if as_json:
        print(json.dumps(asdict(verdict)))
    else:
        roles = ", ".join(f"{role} x {count}" for role, count in verdict.roles.items())
        sizes = ((verdict.num_nodes, "node"), (verdict.num_slots, "slot"), (verdict.num_processes, "process"))
        print(f"{', '.join(counted(*size) for size in sizes)}: {roles}")
        if verdict.ok:
            print(
                f"verdict: it runs. {counted(verdict.steps, 'step')} in {verdict.seconds:.0f} s with bring-up; engine and "
                f"learner differ by {verdict.logprob_mismatch:.1e} nats a token"
            )
        else:
            print(f"verdict: it does not run. {verdict.why}")
    if not verdict.ok:
        raise typer.Exit(FAILED)
