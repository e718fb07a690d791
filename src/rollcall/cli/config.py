"""Commands to use before a run.

`rollcall init`, `config`, `plan`, `simulate`, `prepare`, `fetch-model`, `doctor`, `data` and `reward test`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from typer import Argument, Option

from rollcall.base.screen import Screen
from rollcall.base.words import counted, visible
from rollcall.cli import (
    FAILED,
    Json,
    Overrides,
    RunFile,
    answer,
    calm_libraries,
    progress_bar,
    read_run,
    reported,
    split_arguments,
)
from rollcall.cli.cluster import Cluster
from rollcall.loop.data.make import TaskRows, make_task, write_parquet

if TYPE_CHECKING:
    from rollcall.run.reward_trial import Trial
    from rollcall.run.simulate import Verdict


def init(file: Annotated[Path, Argument(metavar="[FILE]", help="File to write.")] = Path("run.yaml")) -> None:
    """Write a short run file with comments. Without changes, it trains the demo. Never overwrites a file.

    \b
    Examples:
      rollcall init
      rollcall init runs/mine.yaml
      rollcall init && rollcall train run.yaml trainer.steps=20
    """
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in file.stem).strip("-")
    text = (files("rollcall.config") / "init.yaml").read_text().replace("NAME", "mine" if kept in ("", "run") else kept)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as out:
            out.write(text)
    except FileExistsError:
        raise ValueError(f"{file} exists and was not changed; choose another name, or move the file away") from None
    print(f"wrote {file}; look at it with `rollcall config {file}`, and train with `rollcall train {file}`")


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
    gpu_memory: Annotated[float | None, Option(min=1, help="Memory of one accelerator in GiB. Default: 80.")] = None,
    model_config: Annotated[
        Path | None, Option(help="The model's config.json, if model.path is not on this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a run's placement: roles by node and slot, device meshes, memory per slot. Needs no GPU and no cluster.

    Prints the reason and exits with status 1 if the placement cannot work or does not fit the accelerator.

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

    answer(run, lambda _: make_console().print(draw_text(run)), as_json=as_json, failed=run.problems)


def simulate(file: RunFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Rehearse a run on this machine: its nodes, slots and placement, with a tiny model, for two steps.

    Needs no GPU and no data. Prints the reason and exits with status 1 if the run does not work.

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
    answer(verdict, _show_verdict, as_json=as_json, failed=not verdict.ok)


def _show_verdict(verdict: Verdict) -> None:
    roles = ", ".join(f"{role} x {count}" for role, count in verdict.roles.items())
    sizes = ((verdict.num_nodes, "node"), (verdict.num_slots, "slot"), (verdict.num_processes, "process"))
    print(f"{', '.join(counted(*size) for size in sizes)}: {roles}")
    if not verdict.ok:
        print(f"verdict: it does not run. {verdict.why}")
        return
    print(
        f"verdict: it runs. {counted(verdict.steps, 'step')} in {verdict.seconds:.0f} s, including startup; engine and "
        f"learner differ by {verdict.logprob_mismatch:.1e} nats per token"
    )


def prepare(
    file: Annotated[Path, Argument(metavar="FILE", help="Run file.")],
    overrides: Overrides = None,
    once: Annotated[bool, Option("--once", help="Also run prepare.once, which one node runs for all nodes.")] = False,
    tied: Annotated[bool, Option("--tied", hidden=True, help="Stop if stdin closes before the end.")] = False,
) -> None:
    """Run the commands of `prepare.each_node` on this machine and fetch the run's models.

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
    model: Annotated[str, Argument(metavar="MODEL", help="Hub name, such as Qwen/Qwen2.5-0.5B-Instruct.")],
) -> None:
    """Download a model from the hub into this machine's cache, and print its path.

    \b
    Example:
      rollcall fetch-model Qwen/Qwen2.5-0.5B-Instruct
    """
    from rollcall.model.fetch import fetch_model

    print(fetch_model(model, key="model"))


def doctor(
    file: Annotated[
        str | None, Argument(metavar="FILE", help="Run file. Its placement, run directory and model are examined too.")
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[bool, Option("--quick", help="Do not measure bandwidth.")] = False,
    cluster: Cluster = None,
    as_json: Json = False,
) -> None:
    """Find problems that would break a run, before it starts.

    On a cluster, this checks the versions, disks, memory, shared folder, ports, GPUs and bandwidth of its nodes. Without a
    cluster, it checks torch, GPU, memory and disk of this machine and, with a run file, its model, data and rewards.

    Each finding is a sentence with the node, the problem and the command that fixes it. Exits with status 1 if
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
    answer(report, show, as_json=as_json, failed=report.breaks)


def data(
    task: Annotated[str, Argument(metavar="TASK", help="arithmetic, countdown, gsm8k, math or reasoning-gym:TASK.")],
    out: Annotated[Path, Option(help="Directory for train.parquet and test.parquet.")],
    num: Annotated[
        int | None, Option(min=1, help="Number of training rows. Generated tasks add a tenth as many test rows.")
    ] = None,
    seed: Annotated[
        int, Option(min=0, help="Seed for generated rows and splits. For arithmetic, it sets only the order.")
    ] = 0,
    source: Annotated[
        Path | None,
        Option(
            help="For gsm8k and math, instead of the hub: a folder with train and test files, or a JSONL or Parquet file, of "
            "which a tenth is held out."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create the data files for a task.

    \b
    Examples:
      rollcall data arithmetic --out data/sums
      rollcall data countdown --num 20000 --seed 1 --out data/countdown
      rollcall data gsm8k --source gsm8k/ --out data/gsm8k
      rollcall data reasoning-gym:chain_sum --num 2000 --out data/chain_sum
    """
    made = make_task(task, num=num, seed=seed, source=source)
    written, example = _write_rows(made, out)
    files = [{"path": str(path), "rows": rows} for path, rows in written.items()]
    found = {"task": task, "files": files, "reward": made.reward, "example": example}
    answer(found, lambda _: _show_rows(written, example, made.reward), as_json=as_json)


def _write_rows(made: TaskRows, out: Path) -> tuple[dict[Path, int], dict[str, Any]]:
    """Write the files. Returns the number of rows in each file, and the first row overall."""
    example: dict[str, Any] = {}
    written: dict[Path, int] = {}
    numbers = count(1)
    with progress_bar("making rows", unit="rows") as progress:

        def watched(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            for row in rows:
                if not example:
                    example.update(row)
                yield row
                progress(next(numbers), made.num_rows)

        for split, rows in (("train", made.train), ("test", made.test)):
            path = out / f"{split}.parquet"
            written[path] = write_parquet(watched(rows), path)
    return written, example


def _show_rows(written: dict[Path, int], example: dict[str, Any], reward: str) -> None:
    for path, rows in written.items():
        print(f"wrote {path}  {counted(rows, 'row')}")
    print("example")
    for column, value in example.items():
        text = value if isinstance(value, str) else json.dumps(value)
        text = text if len(text) <= 400 else text[:397] + "..."
        print(f"  {column}  {text.replace(chr(10), chr(10) + '    ')}")
    train, test = written
    print(f"use\n  data:   {{train: {train}, val: {test}}}\n  reward: [{{type: {reward}}}]")


def test_reward(
    file: RunFile = None,
    overrides: Overrides = None,
    rows: Annotated[int, Option(min=1, help="Number of rows of data.train to score.")] = 3,
    as_json: Json = False,
) -> None:
    """Score a few rows before training, each with three completions: the row's own answer, an empty text, and a text without an answer.

    Shows scores, times, errors, and the limits on reward processes on this machine. Exits with status 1 if a reward cannot
    be loaded or fails on every completion.

    \b
    Examples:
      rollcall reward test run.yaml
      rollcall reward test run.yaml --rows 20 reward.0.timeout_s=5
    """
    calm_libraries()
    from rollcall.run.reward_trial import try_run

    trial = try_run(read_run(file, overrides), num_rows=rows)
    answer(trial, _show_trial, as_json=as_json, failed=trial.broken)


def _show_trial(trial: Trial) -> None:
    # Markup and emoji codes are off, so that a row's text is shown as it is.
    console = Screen(markup=False, emoji=False, soft_wrap=True)
    if trial.scored:
        console.print(_trial_table(trial))
    for scored in trial.scored:
        for name, said in scored.notes.items():
            console.print(f"{name} on {scored.row}, {scored.completion}:")
            console.print("".join(f"  {line}\n" for line in visible(said).splitlines()), end="")
    for name, told in trial.in_force.items():
        console.print(f"{name} runs with " + ", ".join(f"{thing}: {state}" for thing, state in told.items()))
    for name in trial.left_out:
        console.print(f"{name} needs the policy, so it is not tested")
    first = {(failure.reward, failure.kind): failure for failure in reversed(trial.failures)}
    for failure in first.values():
        console.print(f"\n{failure.reward} {failure.kind} on {failure.prompt_id}:\n{failure.why}")
    if trial.broken:
        console.print(f"\n{', '.join(trial.broken)} failed on every completion: training would stop in its first step")
    elif trial.gives_answers_nothing:
        advice = "check that the reward accepts answers in the form that your model writes"
        console.print(f"\nthe rows' own answers score 0 or less; {advice}")
    elif trial.is_constant:
        console.print("\nevery completion gets the same score, so the model cannot learn anything; check the reward")


def _trial_table(trial: Trial) -> Table:
    names = list(trial.scored[0].parts)
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("row", "completion", *(names if len(names) > 1 else ()), "score", "seconds", "error"):
        table.add_column(title, overflow="fold", no_wrap=title == "row")
    for scored in trial.scored:
        parts = [f"{scored.parts[name]:.3f}" for name in names] if len(names) > 1 else []
        text = scored.text if len(scored.text) <= 24 else f"{scored.text[:23]}…"
        shown = f"{scored.completion}: {text}" if scored.text else scored.completion
        error = "; ".join(f"{name} {why}" for name, why in scored.errors.items())
        numbers = (*parts, f"{scored.score:.3f}", f"{scored.seconds:.3f}")
        table.add_row(scored.row, visible(shown), *numbers, visible(error[:200]))
    return table


reward = typer.Typer(help="Try a run's rewards before training.", no_args_is_help=True, rich_markup_mode=None)


@reward.callback()
def _reward() -> None:  # typer leaves out the name of a single command
    return None


reward.command("test")(reported(test_reward))
