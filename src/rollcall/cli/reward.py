"""`rollcall reward`: tries a run's rewards before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from rollcall.base.screen import Screen
from rollcall.base.words import visible
from rollcall.cli import FAILED, Json, Overrides, RunFile, answer, calm_libraries, read_run, reported

if TYPE_CHECKING:
    from rollcall.run.reward_trial import Trial


def test(
    file: RunFile = None,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of data.train to score.")] = 3,
    as_json: Json = False,
) -> None:
    """Score a few rows before training, each with three completions: its own answer, nothing, and an unrelated text.

    Shows scores, times, errors, and the limits on reward processes on this machine. Exits with status 1 if a reward cannot
    be loaded or fails on everything.

    \b
    Examples:
      rollcall reward test run.yaml
      rollcall reward test run.yaml --rows 20 reward.0.timeout_s=5
    """
    calm_libraries()
    from rollcall.run.reward_trial import try_run

    trial = try_run(read_run(file, overrides), num_rows=rows)
    answer(trial, _show, as_json=as_json)
    if trial.broken:
        raise typer.Exit(FAILED)


def _show(trial: Trial) -> None:
    # No markup and no emoji: a row's text is shown as it is.
    console = Screen(markup=False, emoji=False, soft_wrap=True)
    if trial.scored:
        console.print(_table(trial))
    for scored in trial.scored:
        for name, said in scored.notes.items():
            console.print(f"{name} on {scored.row}, {scored.completion}:")
            console.print("".join(f"  {line}\n" for line in visible(said).splitlines()), end="")
    for name, told in trial.in_force.items():
        console.print(f"{name} runs with " + ", ".join(f"{thing}: {state}" for thing, state in told.items()))
    for name in trial.left_out:
        console.print(f"{name} needs the policy, so it is not tried here")
    first = {(failure.reward, failure.kind): failure for failure in reversed(trial.failures)}
    for failure in first.values():
        console.print(f"\n{failure.reward} {failure.kind} on {failure.prompt_id}:\n{failure.why}")
    if trial.broken:
        console.print(f"\n{', '.join(trial.broken)} failed on everything: training would stop in its first step")
    elif trial.gives_answers_nothing:
        console.print(
            "\nthe rows' own answers score 0 or less: see whether the reward reads them as your model writes them"
        )
    elif trial.is_constant:
        console.print("\nevery completion gets the same score, so nothing could be learned: look at the reward")


def _table(trial: Trial) -> Table:
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


reward = typer.Typer(
    name="reward", help="Try a run's rewards before training.", no_args_is_help=True, rich_markup_mode=None
)


@reward.callback()
def _top() -> None:  # typer leaves out the name of a single command
    return None


reward.command("test")(reported(test))
