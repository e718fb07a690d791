"""`rollcall plan`: which role sits on which slot, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollcall.cli import FAILED, Json, Overrides, RunFile, split_arguments


def plan(
    file: RunFile = None,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="Memory of one accelerator in GiB. Default: 80.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, if model.path is not on this machine.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the plan as a picture in this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show a run's placement: roles by node and slot, device meshes, memory per slot. Needs no GPU and no cluster.

    Exits with status 1 and the reason if the placement cannot work or does not fit the accelerator.

    \b
    Examples:
      rollcall plan examples/cluster_4x8.yaml
      rollcall plan run.yaml --gpu-memory 40 actor.tokens_per_microbatch=8192
      rollcall plan run.yaml 'cluster.component_placement={rollout: 0-19, inference: 20-23, actor: 24-31}'
      rollcall plan run.yaml --svg plan.svg
      rollcall plan run.yaml --json
    """
    from rollcall.config import load_config
    from rollcall.errors import PlacementError
    from rollcall.plan.judge import plan_run

    config = load_config(*split_arguments(file, overrides))
    try:
        run = plan_run(config, card_gib=gpu_memory, model_config=model_config)
    except PlacementError as error:
        if as_json:
            print(json.dumps({"ok": False, "problems": [str(error)]}))
            raise typer.Exit(FAILED) from None
        raise
    if svg is not None:
        from rollcall.plan.draw_svg import draw_svg

        svg.write_text(draw_svg(run))
    if as_json:
        print(json.dumps(run.as_json()))
    else:
        from rollcall.plan.draw import draw_text, make_console

        make_console().print(draw_text(run))
        if svg is not None:
            print(f"drawn in {svg}")
    if run.problems:
        raise typer.Exit(FAILED)
