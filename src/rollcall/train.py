"""One training run from a run file to a model directory: resume or start, run the controller, sum up."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rollcall.attempts import Budget, closing, run_attempts
from rollcall.checkpoint.store import CheckpointStore, write_atomic
from rollcall.cluster.local import build_workers
from rollcall.config import Config, ConfigError, dump_config, load_saved_run
from rollcall.controller import Controller, Workers
from rollcall.journal import Journal
from rollcall.lease import Lease, hold
from rollcall.observe.console import Console, make_console
from rollcall.observe.events import Events
from rollcall.observe.plot import learning_curve
from rollcall.observe.sinks import make_sinks, read_rows
from rollcall.observe.summary import build_summary, write_summary
from rollcall.patience import persist
from rollcall.phases import Bounds, Split
from rollcall.reward.scorer import Scorer

RUN_FILE = "run.yaml"
# What must not change between a run and its resumption: with another value the journal would not fit.
FIXED = ("run.seed", "model.path", "model.dtype", "data", "rollout.samples_per_prompt", "algorithm.name", "reward")


def train(config: Config, *, fresh: bool = False, quiet: bool = False, bounds: Bounds | None = None) -> dict[str, Any]:
    """Train, or go on where the run directory stands; returns the summary."""
    if bounds and bounds.split is Split.EVAL and config.data.val is None:
        raise ConfigError(
            "--split eval needs held-out prompts, and data.val is not set; set it, or leave out --split eval"
        )
    with hold(config.run.dir, say=lambda text: print(text, file=sys.stderr, flush=True)) as lease:
        return _train(config, fresh=fresh, quiet=quiet, bounds=bounds or Bounds(), lease=lease)


def _train(config: Config, *, fresh: bool, quiet: bool, bounds: Bounds, lease: Lease) -> dict[str, Any]:
    started = time.perf_counter()
    run_dir = config.run.dir
    if fresh:
        move_aside(run_dir)
    _check_same_run(config, run_dir)
    trainer = config.trainer
    store = CheckpointStore(
        run_dir / "checkpoints", keep_last=trainer.keep_last, keep_best=trainer.keep_best, guard=lease.check
    )
    resume = store.latest()
    continued = (run_dir / "journal").exists()
    start_step = resume.step if resume else 0
    before = (row["eval/accuracy"] for row in read_rows(run_dir / "metrics.jsonl") if "eval/accuracy" in row)
    with make_console(
        name=config.run.name,
        num_steps=trainer.steps,
        start_step=start_step,
        first_accuracy=next(before, None) if resume else None,
        quiet=quiet,
    ) as console:
        controller, number = run_attempts(
            lambda number: (_attempt(config, store=store, console=console, bounds=bounds, lease=lease), number),
            budget=Budget(most=trainer.max_restarts, window_s=trainer.restart_window_s),
            say=console.note,
            reached=lambda: max((path.name for path in store.dir.glob("step-*")), default=""),
        )
        summary = build_summary(
            run_dir / "metrics.jsonl",
            seconds=time.perf_counter() - started,
            resume_step=resume.step if resume else None,
            run=config.run.name,
            model_dir=str(run_dir / "model"),
            reward_failures=_failures(controller.workers.scorer),
        )
        if not bounds.trains:
            return _say_rollout(console, run_dir, controller, summary)
        if (continued or number > 1) and summary["reward_errors"]:
            summary["reward_failures"] += _journaled_failures(run_dir / "journal", shown=summary["reward_failures"])
        path, picture = run_dir / "summary.json", run_dir / "learning_curve.png"
        persist(lambda: write_summary(path, summary), path=path, what="the summary")
        draw = partial(learning_curve, run_dir / "metrics.jsonl", picture, name=config.run.name)
        curve = persist(draw, path=picture, what="the learning curve")
        _say_result(console, run_dir, summary, curve)
    return summary


def _attempt(config: Config, *, store: CheckpointStore, console: Console, bounds: Bounds, lease: Lease) -> Controller:
    """Build the workers and train from where the run directory stands to the end."""
    run_dir, resume = config.run.dir, store.latest()
    workers = _build(config, say=console.note)
    with closing(workers, say=console.note), ExitStack() as opened:
        _check_lengths(config, workers)
        # Not before: a run file that is refused must not lay claim to the directory.
        _claim(config, run_dir, continued=(run_dir / "journal").exists())
        sinks = make_sinks(config, run_dir, resume.step if resume else None)
        for sink in sinks:
            opened.callback(sink.close)
        journal = opened.enter_context(Journal(run_dir / "journal", guard=lease.check))
        events = Events(run_dir)
        opened.callback(events.close)
        if resume:
            workers.read_checkpoint(resume.path)
        _say_where(console, run_dir, resume.step if resume else 0, journal)
        controller = Controller(
            config,
            workers,
            run_dir=run_dir,
            journal=journal,
            store=store,
            sinks=sinks,
            console=console,
            resume=resume,
            events=events,
            bounds=bounds,
            lease=lease,
        )
        asyncio.run(controller.run())
    return controller


def _claim(config: Config, run_dir: Path, *, continued: bool) -> None:
    """The directory and its run file. A directory that cannot be written is refused at once when the run is new, and
    waited for when it is not."""

    def write() -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / RUN_FILE, dump_config(config))

    if continued:
        persist(write, path=run_dir / RUN_FILE, what="the run file")
    else:
        write()


def move_aside(run_dir: Path) -> None:
    """``runs/x`` becomes ``runs/x.old-1`` (or the next free number)."""
    if not run_dir.exists():
        return
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    run_dir.rename(target)


def _build(config: Config, *, say: Callable[[str], None]) -> Workers:
    """All roles in this process, unless the run file places them on several slots."""
    if config.cluster is None or config.cluster.num_slots == 1:
        return build_workers(config, say=say)
    from rollcall.cluster.remote import build_remote_workers

    return build_remote_workers(config, say=say)


def _check_same_run(config: Config, run_dir: Path) -> None:
    """A run directory belongs to one run: refuse to continue it with what would contradict its journal."""
    path = run_dir / RUN_FILE
    if not path.exists():
        if run_dir.exists() and any(run_dir.iterdir()):
            raise ConfigError(
                f"run.dir={run_dir} has files in it but no {RUN_FILE}, so it is not a run; choose another run.dir, or "
                "move it aside with --fresh"
            )
        return
    old = load_saved_run(path)
    for key in FIXED:
        before, now = _lookup(old, key), _lookup(config, key)
        if before != now:
            raise ConfigError(
                f"run.dir={run_dir} holds a run with {key}={before}, the run file now says {now}; choose another run.dir, "
                "or start over with --fresh (the old directory is moved aside)"
            )


def _check_lengths(config: Config, workers: Workers) -> None:
    """Refuse now what the engine would refuse when the longest prompt comes up, perhaps after hours."""
    for prompts in (workers.train, workers.val):
        longest = max((len(prompt.token_ids) for prompt in prompts.prompts), default=0) if prompts else 0
        wanted, positions = longest + config.rollout.max_response_tokens, workers.max_positions
        if prompts and wanted > positions:
            raise ConfigError(
                f"{prompts.source} has a prompt of {longest} tokens; with "
                f"rollout.max_response_tokens={config.rollout.max_response_tokens} that makes {wanted} positions, and the model "
                f"has {positions}: lower rollout.max_response_tokens, or data.max_prompt_tokens to leave such prompts out"
            )
        room = config.rollout.kv_tokens
        if prompts and room is not None and wanted > room:
            raise ConfigError(
                f"{prompts.source} has a prompt of {longest} tokens; with "
                f"rollout.max_response_tokens={config.rollout.max_response_tokens} that makes {wanted}, and the KV cache has room "
                f"for rollout.kv_tokens={room}: use {wanted} or more, or leave it out"
            )


def _lookup(config: Config, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def _say_where(console: Console, run_dir: Path, start_step: int, journal: Journal) -> None:
    if start_step or journal.steps():
        ahead = sum(len(journal.read(step)) for step in journal.steps() if step > start_step)
        console.note(f"resuming {run_dir} from step {start_step}; {ahead} finished groups wait in the journal")


def _failures(scorer: Scorer) -> list[dict[str, str]]:
    return [
        {
            "reward": failure.reward,
            "kind": failure.kind,
            "prompt": failure.prompt_id,
            "completion": failure.completion,
            "why": failure.why,
        }
        for failure in scorer.failures
    ]


def _journaled_failures(directory: Path, *, shown: list[dict[str, str]]) -> list[dict[str, str]]:
    """The first failures of kinds that only an earlier process of this run met."""
    known = {(failure["reward"], failure["kind"]) for failure in shown}
    found: dict[tuple[str, str], dict[str, str]] = {}
    with Journal(directory) as journal:
        for group in (group for step in journal.steps() for group in journal.read(step)):
            for completion, score in zip(group.completions, group.scores, strict=True):
                for reward, error in score.errors.items():
                    kind, _, why = error.partition(": ")
                    if (reward, kind) not in known:
                        failure = {"prompt": group.prompt.id, "completion": completion.text, "why": why}
                        found.setdefault((reward, kind), {"reward": reward, "kind": kind, **failure})
    return list(found.values())


def _say_rollout(console: Console, run_dir: Path, controller: Controller, summary: dict[str, Any]) -> dict[str, Any]:
    """Of a command that only generated."""
    done = {"run": summary["run"], "step": controller.start_step}
    if controller.bounds.split is Split.EVAL:
        accuracy = summary["eval"]["accuracy"]["last"]
        console.note(f"accuracy of step {controller.start_step}: {accuracy:.3f}; {run_dir / 'samples'} has the answers")
        return {**done, "eval": {"accuracy": accuracy}}
    counts = {step: len(controller.journal.read(step)) for step in controller.steps_ahead}
    ready = (
        ", ".join(f"step {step}: {count} groups" for step, count in counts.items()) or "nothing: all steps are trained"
    )
    console.note(f"the journal has {ready}; train on it with --phase update")
    return {**done, "groups": counts}


def _say_result(console: Console, run_dir: Path, summary: dict[str, Any], curve: Path | None) -> None:
    say: Callable[[str], None] = console.note
    accuracy = summary["eval"]["accuracy"]
    if accuracy["first"] is not None:
        say(f"held-out accuracy {accuracy['first']:.3f} -> {accuracy['last']:.3f} in {summary['seconds']:.0f} s")
    if summary["reward_errors"]:
        say(f"{summary['reward_errors']} completions could not be scored and counted as 0; the first ones:")
        for failure in summary["reward_failures"][:3]:
            say(f"  {failure['reward']} {failure['kind']} on {failure['prompt']}: {failure['why'].splitlines()[-1]}")
    if not (run_dir / "model").exists():
        say(f"trained to step {summary['steps']}; go on with --phase rollout, or with --phase both")
        return
    say(f"model          {run_dir / 'model'}   (opens with AutoModelForCausalLM.from_pretrained)")
    if curve is not None:
        say(f"learning curve {curve}")
    say(f"metrics        {run_dir / 'metrics.jsonl'}   summary {run_dir / 'summary.json'}")
