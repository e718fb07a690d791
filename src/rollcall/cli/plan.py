"""`rollcall plan` and `rollcall simulate`: which role sits on which slot and whether it fits, by arithmetic and by a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.cli import FAILED, Json, Overrides, RunFile, answer, calm_libraries, read_run
from rollcall.words import counted

if TYPE_CHECKING:
    from rollcall.plan.judge import RunPlan
    from rollcall.simulate import Verdict


def plan(
    file: RunFile = None,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="Memory of one accelerator in GiB. Default: 80.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, if model.path is not on this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a run's placement: roles by node and slot, device meshes, memory per slot. Needs no GPU and no cluster.

    Exits with status 1 and the reason if the placement cannot work or does not fit the accelerator.

    \b
    Examples:
      rollcall plan examples/cluster_4x8.yaml
      rollcall plan run.yaml --gpu-memory 40 actor.tokens_per_microbatch=8192
      rollcall plan run.yaml 'cluster.component_placement={rollout: 0-19, inference: 20-23, actor: 24-31}'
      rollcall plan run.yaml --json
    """
    from rollcall.errors import PlacementError
    from rollcall.plan.judge import plan_run

    try:
        run = plan_run(read_run(file, overrides), card_gib=gpu_memory, model_config=model_config)
    except PlacementError as error:
        if as_json:
            print(json.dumps({"ok": False, "problems": [str(error)]}))
            raise typer.Exit(FAILED) from None
        raise
    answer(run, _show_plan, as_json=as_json)
    if run.problems:
        raise typer.Exit(FAILED)


def _show_plan(run: RunPlan) -> None:
    from rollcall.plan.draw import draw_text, make_console

    make_console().print(draw_text(run))


def simulate(file: RunFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Rehearse a run on this machine: its nodes, slots and placement, with a tiny model, for two steps.

    Needs no GPU and no data. Exits with status 1 and the reason if the run does not work.

    \b
    Examples:
      rollcall simulate examples/cluster_4x8.yaml
      rollcall simulate run.yaml cluster.num_nodes=2 cluster.num_gpus_per_node=2
      rollcall simulate run.yaml --json
    """
    config = read_run(file, overrides)
    calm_libraries()
    from rollcall.simulate import simulate as rehearse

    verdict = rehearse(config)
    answer(verdict, _show_verdict, as_json=as_json)
    if not verdict.ok:
        raise typer.Exit(FAILED)


def _show_verdict(verdict: Verdict) -> None:
    roles = ", ".join(f"{role} x {count}" for role, count in verdict.roles.items())
    sizes = ((verdict.num_nodes, "node"), (verdict.num_slots, "slot"), (verdict.num_processes, "process"))
    print(f"{', '.join(counted(*size) for size in sizes)}: {roles}")
    if not verdict.ok:
        print(f"verdict: it does not run. {verdict.why}")
        return
    print(
        f"verdict: it runs. {counted(verdict.steps, 'step')} in {verdict.seconds:.0f} s with bring-up; engine and "
        f"learner differ by {verdict.logprob_mismatch:.1e} nats a token"
    )
