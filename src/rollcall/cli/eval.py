"""`rollcall eval`: how good a model is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.text import Text

from rollcall.cli import Json, Overrides, answer, calm_libraries
from rollcall.observe.console import samples_table
from rollcall.observe.headline import REWARD
from rollcall.screen import Screen
from rollcall.stop import heed
from rollcall.wait import say, speaking
from rollcall.words import counted

if TYPE_CHECKING:
    from rollcall.evaluation import EvalReport


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN.yaml|RUN_DIR|MODEL_DIR|CHECKPOINT", help="What to evaluate.")],
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="JSONL or Parquet file. Default: the run's data.val.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per prompt. More than one gives pass@k.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature. 0 is greedy.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Evaluate on the first N prompts only.")] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy, pass@k and lengths, and show samples.

    For a run file or a run directory, this evaluates the trained model, else the newest checkpoint, else the model that
    the run starts from. A model directory or a checkpoint needs --data. Its reward is the exact answer, unless you give reward=[...].

    \b
    Examples:
      rollcall eval runs/arithmetic
      rollcall eval runs/gsm8k --samples 8 --temperature 0.8 --max-prompts 200
      rollcall eval MODEL --data data/gsm8k/test.parquet 'reward=[{type: math}]'
      rollcall eval runs/gsm8k/checkpoints/step-000040 --data data/gsm8k/test.parquet 'reward=[{type: math}]'
    """
    say("loading torch and transformers")
    with heed():
        calm_libraries()
        from rollcall.evaluation import plan_evaluation, run_evaluation

        plan = plan_evaluation(
            target,
            overrides=overrides or [],
            data=data,
            samples=samples,
            temperature=temperature,
            max_prompts=max_prompts,
        )
        with _Shown() as shown, speaking(shown.note):
            report = run_evaluation(plan, on_progress=shown.progress)
    answer(report, _show, as_json=as_json)


class _Shown:
    """What the evaluation does, on stderr: a line that changes in place on a terminal, a line now and then in a log."""

    def __init__(self) -> None:
        self._console = Screen(stderr=True)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._status = self._console.status(Text("getting ready"))
        self._started = self._printed = time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def progress(self, done: int, total: int, num_tokens: int) -> None:
        now = time.monotonic()
        text = f"{done:,} of {counted(total, 'prompt')} answered, {num_tokens:,} tokens, {now - self._started:.0f} s"
        if self._live:
            self._status.update(Text(text))
        elif now - self._printed >= 5.0:
            self._printed = now
            self.note(text)

    def __enter__(self) -> Self:
        if self._live:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._status.stop()


def _show(report: EvalReport) -> None:
    console = Screen(soft_wrap=True)
    evaluation, section = report.evaluation, report.plan.config.eval
    how = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    means = f"   (share with a first reward of at least {section.threshold:g})" if report.headline is REWARD else ""
    accuracy = [
        ("accuracy", f"{evaluation.accuracy:.3f}{means}"),
        *((f"pass@{k}", f"{value:.3f}") for k, value in evaluation.pass_at.items() if k > 1),
    ]
    reward = [("mean reward", f"{evaluation.reward_mean:.3f}")]
    limit = f"at most {report.max_response_tokens:,}"
    rows = [
        ("model", f"{report.plan.model_path}   ({report.plan.origin})"),
        (
            "data",
            f"{report.source}   {counted(len(evaluation.groups), 'prompt')} x {section.samples_per_prompt}, {how}",
        ),
        *([*reward, *accuracy] if report.headline is REWARD else [*accuracy, *reward]),
        (
            "mean length",
            f"{evaluation.response_length_mean:.1f} tokens ({limit}), {evaluation.truncated_fraction:.1%} cut off",
        ),
        ("time", f"{report.seconds:.1f} s"),
    ]
    if report.num_overlong:
        rows.append(("left out", f"{counted(report.num_overlong, 'prompt')} longer than data.max_prompt_tokens"))
    if report.num_unscored:
        first = report.failures[0]
        rows.append(("not scored", f"{report.num_unscored}, the first by {first.reward} on {first.prompt_id}"))
    console.print(samples_table("samples", report.samples))
    for label, value in rows:
        console.print(Text.assemble((f"{label:<12}", "dim"), value))
