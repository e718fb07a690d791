"""`rollcall init`, `config`, `plan`, `simulate`, `doctor`, `prepare`, `fetch-model`: commands for a run file before a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcall.base.words import counted
from rollcall.cli import FAILED, Json, Overrides, RunFile, answer, calm_libraries, read_run, split_arguments
from rollcall.cli.cluster import Cluster

if TYPE_CHECKING:
    from rollcall.run.simulate import Verdict


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("run.yaml"),
) -> None:
    """Write a short run file with comments. Unchanged, it trains the demo. Never overwrites a file.

    \b
    Examples:
      rollcall init
      rollcall init runs/mine.yaml
      rollcall init && rollcall train run.yaml trainer.steps=20
    """
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in file.stem).strip("-")
    name = "mine" if kept in ("", "run") else kept
    text = (files("rollcall.config") / "init.yaml").read_text().replace("NAME", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise ValueError(f"{file} exists and was not changed; give another name, or move the file away") from None
    print(f"wrote {file}; look at it with `rollcall config {file}`, train it with `rollcall train {file}`")


def config(file: RunFile = None, overrides: Overrides = None) -> None:
    """Print the resolved run file: every key with its value.

    \b
    Examples:
      rollcall config > run.yaml
      rollcall config examples/gsm8k.yaml actor.lr=2e-6 reward.0.weight=0.5
    """
    from rollcall.config import dump_config
    from rollcall.config.checks import say_unused

    resolved = read_run(file, overrides)
    say_unused(resolved)
    print(dump_config(resolved), end="")


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
    from rollcall.base.errors import PlacementError
    from rollcall.plan.judge import plan_run

    try:
        run = plan_run(read_run(file, overrides), card_gib=gpu_memory, model_config=model_config)
    except PlacementError as error:
        if as_json:
            print(json.dumps({"ok": False, "problems": [str(error)]}))
            raise typer.Exit(FAILED) from None
        raise
    from rollcall.plan.draw import draw_text, make_console

    answer(run, lambda _: make_console().print(draw_text(run)), as_json=as_json)
    if run.problems:
        raise typer.Exit(FAILED)


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
    from rollcall.run.simulate import simulate as rehearse

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


def prepare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file.")],
    overrides: Overrides = None,
    once: Annotated[
        bool, typer.Option("--once", help="Run prepare.once too: what one node does for all of them.")
    ] = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True, help="Give up if stdin ends meanwhile.")] = False,
) -> None:
    """Run the commands of `prepare.each_node` on this machine and fetch the models of the run.

    `rollcall launch` does this on every node before the run.

    \b
    Examples:
      rollcall prepare run.yaml
      rollcall prepare run.yaml --once
    """
    from rollcall.config import load_config
    from rollcall.launch.jobs.prepare import prepare_node
    from rollcall.nodes.machine import tied_to_stdin

    with tied_to_stdin() if tied else nullcontext():
        prepare_node(load_config(file, overrides or []), once=once)


def fetch_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, such as Qwen/Qwen2.5-0.5B-Instruct.")],
) -> None:
    """Download a model from the hub into this machine's cache, and print where it is.

    \b
    Example:
      rollcall fetch-model Qwen/Qwen2.5-0.5B-Instruct
    """
    from rollcall.model.fetch import fetch_model

    print(fetch_model(model, key="model"))


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
    from rollcall.launch.doctor.examine import examine, examine_machine
    from rollcall.launch.doctor.show import show
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
