"""`rollcall doctor`: finds what would break a run on this machine or cluster, and says how to fix it."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcall.cli import FAILED, Json, Overrides, answer, calm_libraries, split_arguments
from rollcall.cli.cluster import Cluster


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Run file. Its placement, run directory and model are examined too."),
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the measurement of bandwidth.")] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Say what would break a run, before it starts.

    On a cluster: versions, disks, memory, shared folder, ports, GPUs and bandwidth of its nodes. Without one: torch,
    GPU, memory and disk of this machine, and with a run file its model, data and rewards.

    Each finding is a sentence: the node, the problem and the command that fixes it. Exits with status 1 if
    anything would break a run.

    \b
    Examples:
      rollcall doctor
      rollcall doctor run.yaml
      rollcall doctor run.yaml --quick
      rollcall doctor run.yaml run.dir=/shared/runs/x --json
    """
    from rollcall.config import load_config
    from rollcall.launch.doctor.examine import examine, examine_machine, show
    from rollcall.nodes.cluster import find_cluster, wished_cluster

    path, changes = split_arguments(file, overrides)
    config = load_config(path, changes) if path is not None or changes else None
    section = config.cluster if config is not None else None
    address = section.ray_address if section is not None else None
    if (section is None or section.num_slots == 1) and wished_cluster(cluster, ray_address=address) is None:
        calm_libraries()
        report = examine_machine(config)
    else:
        report = examine(find_cluster(cluster, ray_address=address), config=config, quick=quick)
    answer(report, show, as_json=as_json)
    if report.breaks:
        raise typer.Exit(FAILED)
