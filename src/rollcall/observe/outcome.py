"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollcall.observe.headline import BY_METRIC
from rollcall.observe.signal import ADVICE, no_signal
from rollcall.stored.find import ADAPTER_CONFIG
from rollcall.wait import say, warn
from rollcall.words import all_of, are, counted


def trained(num_steps: int) -> str:
    return f"{all_of(num_steps, 'step')} {are(num_steps)} trained"


def _course(summary: dict[str, Any]) -> str | None:
    """The headline, from the first evaluation to the last; None: the run has no evaluation."""
    headline = BY_METRIC[summary["headline"]]
    course = summary["eval"][headline.key]
    if course["first"] is None:
        return None
    return f"{headline.words} {course['first']:.3f} -> {course['last']:.3f}"


def _no_signal(run_dir: Path, summary: dict[str, Any]) -> str | None:
    found = summary.get("no_signal") or {"steps": 0, "of": 0}  # summaries of older versions have none
    words = no_signal(found["steps"], num_steps=found["of"])
    if words is None:
        return None
    return (
        f"{words}. {ADVICE}. {run_dir / 'samples'} has answers with their rewards, and `rollcall reward test "
        f"{run_dir / 'run.yaml'}` tries the reward"
    )


def finished(run_dir: Path, summary: dict[str, Any]) -> str:
    course = _course(summary)
    return (
        f"{run_dir} is finished: {trained(summary['steps'])}{f', {course}' if course else ''}, and the model is in "
        f"{run_dir / 'model'}\nto train further: rollcall train {run_dir} trainer.steps={2 * summary['steps']}; to start over: "
        "the same command with --fresh" + (f"\n{told}" if (told := _no_signal(run_dir, summary)) else "")
    )


def say_result(run_dir: Path, summary: dict[str, Any], curve: Path | None) -> None:
    if course := _course(summary):
        say(f"{course} in {summary['seconds']:.0f} s")
    if summary["reward_errors"]:
        say(f"{counted(summary['reward_errors'], 'completion')} could not be scored and counted as 0; the first ones:")
        for failure in summary["reward_failures"][:3]:
            say(f"  {failure['reward']} {failure['kind']} on {failure['prompt']}: {failure['why'].splitlines()[-1]}")
    if told := _no_signal(run_dir, summary):
        warn(told)
    if not (run_dir / "model").exists():
        say(f"trained to step {summary['steps']}; go on with --phase rollout, or with --phase both")
        return
    opens = "peft's PeftModel" if (run_dir / "model" / ADAPTER_CONFIG).exists() else "AutoModelForCausalLM"
    say(f"model          {run_dir / 'model'}   (for {opens}.from_pretrained)")
    if curve is not None:
        say(f"learning curve {curve}")
    say(f"metrics        {run_dir / 'metrics.jsonl'}\nsummary        {run_dir / 'summary.json'}")
