"""Turns a run file into a trained model: starts or resumes the run, runs the controller in attempts, and writes the summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rollcall.base.atomic import write_atomic
from rollcall.base.errors import BatchTooLargeError, ConfigError, SizesUnknown, WorkerError
from rollcall.base.journal import Journal
from rollcall.base.lease import Lease, LeaseLostError, hold
from rollcall.base.patience import persist, refusing
from rollcall.base.process_table import refuse_few_files
from rollcall.base.redact import redact
from rollcall.base.stop import Stopped, heeded
from rollcall.base.wait import in_silence, on_stdout, say, speaking, warn
from rollcall.base.words import are, counted
from rollcall.checkpoint.exported import finished_summary
from rollcall.checkpoint.run_dir import (
    RUN_FILE,
    checkpoint_bytes,
    clear_leftovers,
    has_begun,
    move_aside,
    size_words,
    unless_begun,
)
from rollcall.checkpoint.store import Checkpoint, CheckpointStore
from rollcall.config import Config, dump_config
from rollcall.loop.attempts import Budget, Regrow, causes, closing, headline, loss_of, run_attempts
from rollcall.loop.callbacks import Callbacks
from rollcall.loop.controller import Controller
from rollcall.loop.phases import Bounds, Split
from rollcall.loop.record import Record
from rollcall.loop.resume import Change, changes_on_resume, refuse_changing_base
from rollcall.loop.step_metrics import peak_memory_gib
from rollcall.loop.workers import Workers
from rollcall.model.load import resolve_device, resolve_dtype
from rollcall.observe.calls import BusySpans
from rollcall.observe.console import Console, make_console
from rollcall.observe.events import EVENTS, Events, Mark, MarkKind
from rollcall.observe.headline import BY_METRIC
from rollcall.observe.live import CONTROLLER, REWARDS
from rollcall.observe.progress import Progress
from rollcall.observe.recorder import Recorder
from rollcall.observe.sinks import check_loggers, make_sinks, read_rows
from rollcall.observe.timeline import ATTEMPT_LOST, RUN_FAILED
from rollcall.plan.memory import GIB, element_size, read_sizes
from rollcall.plan.placement import needed_roles
from rollcall.process.debug.board import BOARD
from rollcall.process.debug.here import post_mortem, serve
from rollcall.process.groups.backend import Backend
from rollcall.process.groups.reachable import About, reachable
from rollcall.run.local import build_workers
from rollcall.run.origin import changed_code, code_of, note_origin, refuse_changed_base, sampled_weights
from rollcall.view.curves import learning_curve
from rollcall.view.growing import MetricsTable
from rollcall.view.summary import build_summary, finished, say_result, trained, write_summary

FAILURE = ("reward", "kind", "prompt", "completion", "why")  # fields of a reward failure in the summary


def train(
    config: Config,
    *,
    fresh: bool = False,
    quiet: bool = False,
    bounds: Bounds | None = None,
    backend: Backend | None = None,
    callbacks: Callbacks | None = None,
    is_bare: bool = False,
) -> dict[str, Any]:
    """Train, or continue the run in the directory. Returns the summary.

    ``backend`` runs the processes of a run with several slots, in place of the Ray cluster that this node belongs to. ``is_bare`` is for
    debugging: one reward process, no CUDA graphs.
    """
    bounds = bounds or Bounds()
    if bounds.split is Split.EVAL and config.data.val is None:
        raise ConfigError(
            "--split eval needs held-out prompts, but data.val is not set; set it, or leave out --split eval"
        )
    refuse_few_files()
    serve()
    with speaking(in_silence if quiet else on_stdout), hold(config.run.dir) as lease, BOARD.of_run(config.run.dir):
        old = move_aside(config.run.dir) if fresh else None
        if old is not None:
            say(f"the run that was in {config.run.dir} is now in {old}")
        # Without a cluster, this process has all roles.
        roles = () if _has_slots(config) else tuple(sorted(map(str, needed_roles(config))))
        about = About(title=CONTROLLER, roles=(CONTROLLER, *roles), run=str(config.run.dir.resolve()))
        with unless_begun(config.run.dir, old=old), reachable(about), _examining():
            return _Run(config, bounds, lease, backend, callbacks or Callbacks(), is_bare).finish(quiet=quiet)


@contextmanager
def _examining() -> Iterator[None]:
    """Open the debugger for exceptions in this process, if the user asked for it. An error from another process was already debugged
    there. Each error opens the debugger only once, so these blocks may be nested."""
    try:
        yield
    except Exception as error:
        if loss_of(error) is None and not any(isinstance(one, WorkerError) for one in causes(error)):
            post_mortem(error)
        raise


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose directory this process has leased."""

    config: Config
    bounds: Bounds
    lease: Lease
    backend: Backend | None
    callbacks: Callbacks
    is_bare: bool
    # section -> tokens per micro-batch, after a larger one did not fit
    smaller: dict[str, int] = field(default_factory=dict)

    def finish(self, *, quiet: bool) -> dict[str, Any]:
        """Train to the end, in as many attempts as needed. Returns the summary."""
        started = time.perf_counter()
        config, run_dir, trainer = self.config, self.config.run.dir, self.config.trainer
        check_loggers(config)
        changes: list[Change] = []
        begun = has_begun(run_dir)
        if begun or not (run_dir / RUN_FILE).exists():  # a failed start may have left another run's file
            changes = changes_on_resume(config, run_dir)  # refuses impossible changes before anything is loaded
        if not begun:
            refuse_changing_base(config)
        store = CheckpointStore(
            run_dir / "checkpoints", keep_last=trainer.keep_last, keep_best=trainer.keep_best, guard=self.lease.check
        )
        store.clean()
        clear_leftovers(run_dir)
        resume = store.latest()
        continued = (run_dir / "journal").exists()
        summary = finished_summary(run_dir, last=resume, num_steps=trainer.steps) if self.bounds.trains else None
        if summary is not None:
            say(finished(run_dir, summary))
            if changes:
                warn(
                    f"the run is finished, so these changes have no effect: {'; '.join(map(str, changes))}. `rollcall merge "
                    f"{run_dir} --out FOLDER` can write its model in another form"
                )
            return summary
        return self._train(store, resume, continued=continued, started=started, quiet=quiet)

    def _train(
        self, store: CheckpointStore, resume: Checkpoint | None, *, continued: bool, started: float, quiet: bool
    ) -> dict[str, Any]:
        config, run_dir, trainer = self.config, self.config.run.dir, self.config.trainer
        start_step = resume.step if resume else 0
        before = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"] <= start_step] if resume else []
        progress = Progress(name=config.run.name, num_steps=trainer.steps, start_step=start_step, rows=before)
        voice = in_silence if quiet else None
        with make_console(progress, quiet=quiet) as console, speaking(voice or console.note), ExitStack() as opened:
            if trainer.page:
                from rollcall.view.page_process import serving_page

                opened.enter_context(serving_page(run_dir, tell=say))
            try:
                controller, number = run_attempts(
                    lambda number: (self._attempt(store, console, number=number), number),
                    budget=Budget(most=trainer.max_restarts, window_s=trainer.restart_window_s),
                    reached=lambda: max((path.name for path in store.dir.glob("step-*")), default=""),
                    note=self._note_end,
                )
            except Exception as error:
                # If the lease is lost, another controller writes the events.
                if (run_dir / EVENTS).exists() and not any(isinstance(one, LeaseLostError) for one in causes(error)):
                    _mark(run_dir, RUN_FAILED, MarkKind.FAULT, reason=error)
                raise
            summary = build_summary(
                MetricsTable(run_dir),
                seconds=time.perf_counter() - started,
                resume_step=resume.step if resume else None,
                peak_gib=peak_memory_gib(),
                run=config.run.name,
                model_dir=str(run_dir / "model"),
                reward_failures=[
                    dict(zip(FAILURE, astuple(one), strict=True)) for one in controller.workers.scorer.failures
                ],
            )
            if not self.bounds.trains:
                return _say_rollout(run_dir, controller, summary)
            if (continued or number > 1) and summary["reward_errors"]:
                summary["reward_failures"] += _journaled_failures(run_dir / "journal", shown=summary["reward_failures"])
            picture, path = run_dir / "learning_curve.png", run_dir / "summary.json"
            draw = partial(learning_curve, MetricsTable(run_dir), picture, name=config.run.name)
            curve = persist(draw, path=picture, what="the learning curve")
            # Written last: a run with a summary is finished.
            persist(lambda: write_summary(path, summary), path=path, what="the summary")
            console.close()  # later output is printed below the last panel
            say_result(run_dir, summary, curve)
        return summary

    def _build(self) -> Workers:
        """Build all roles, in this process or on the cluster's slots. Reduced sizes apply only here, not in the run file."""
        config = self.config
        for name, tokens in self.smaller.items():
            section = getattr(config, name).model_copy(update={"tokens_per_microbatch": tokens})
            config = config.model_copy(update={name: section})
        if not _has_slots(config):
            return build_workers(config, is_bare=self.is_bare)
        from rollcall.run.on_cluster import build_workers_on_cluster

        return build_workers_on_cluster(config, backend=self.backend)

    def _note_end(self, reason: Exception) -> None:
        """Record in the events why another attempt is needed. If a micro-batch did not fit, the next attempt uses smaller ones."""
        run_dir = self.config.run.dir
        if isinstance(reason, Regrow):
            _mark(run_dir, "node back", MarkKind.RECOVERY, reason=reason)
        elif run_dir.is_dir():
            _mark(run_dir, ATTEMPT_LOST, MarkKind.FAULT, reason=reason)
        for one in causes(reason):
            if isinstance(one, BatchTooLargeError):
                self.smaller[one.section] = one.tokens

    @_examining()
    def _attempt(self, store: CheckpointStore, console: Console, *, number: int) -> Controller:
        """Build the workers and train to the end, from the newest checkpoint and the journal."""
        heeded().check()
        config, run_dir, resume = self.config, self.config.run.dir, store.latest()
        start_step = resume.step if resume else 0
        console.restart(start_step)
        code = code_of(config)
        other_code = changed_code(run_dir, code)
        workers = self._build()
        with closing(workers), ExitStack() as opened:
            if resume is not None and (why := workers.saving.missing(resume.path)):
                warn(f"checkpoint {resume.path} is incomplete ({why}) and is skipped")
                resume = store.latest(before=resume.step, missing=workers.saving.missing)
                start_step = resume.step if resume else 0
                console.restart(start_step)
            _check_lengths(config, workers)
            _say_size(config)
            changes = changes_on_resume(config, run_dir) if has_begun(run_dir) else []
            console.phase("reading the identity of the model")
            base = {**workers.saving.base(), "samples": sampled_weights(config)}
            refuse_changed_base(run_dir, base, path=config.model.path)
            if resume:
                console.phase(f"reading the checkpoint of step {start_step}")
                workers.saving.read(resume.path)
            console.phase(None)
            # Not earlier, because a refused run file must not replace this directory's run file.
            _claim(config, run_dir, continued=(run_dir / "journal").exists())
            _keep_tokenizer(workers.tokenizer, run_dir / "tokenizer.json")
            limit = config.eval.max_prompts
            note_origin(run_dir, train=workers.train, val=workers.val, limit=limit, base=base, code=code)
            sinks = make_sinks(config, run_dir, resume.step if resume else None)
            for sink in sinks:
                opened.callback(sink.close)
            journal = opened.enter_context(Journal(run_dir / "journal", guard=self.lease.check))
            events = Events(run_dir, show=console.phase)
            opened.callback(events.close)
            rewards = BusySpans(REWARDS)
            opened.callback(Recorder(run_dir, events=events, look=workers.look, rewards=rewards).close)
            kind = MarkKind.RECOVERY if number > 1 else MarkKind.NOTE
            events.mark(Mark(time.time(), f"attempt {number} begins", kind, None, f"from step {start_step}"))
            _say_changes(events, changes, step=start_step, code=other_code)
            if start_step or journal.steps():
                ahead = sum(len(journal.read(step)) for step in journal.steps() if step > start_step)
                groups = counted(ahead, "finished group")
                say(f"resuming {run_dir} from step {start_step}; {groups} {are(ahead)} waiting in the journal")
            controller = Controller(
                config,
                workers,
                journal=journal,
                record=Record(
                    run_dir,
                    config.trainer,
                    workers,
                    threshold=config.eval.threshold,
                    store=store,
                    sinks=sinks,
                    console=console,
                    callbacks=self.callbacks,
                ),
                console=console,
                resume=resume,
                events=events,
                bounds=self.bounds,
                lease=self.lease,
                stop=heeded(),
                rewards=rewards,
            )
            _drive(controller, grace_s=config.trainer.stop_grace_s)
        return controller


def _has_slots(config: Config) -> bool:
    """Whether the run needs processes in addition to this one."""
    return config.cluster is not None and config.cluster.num_slots > 1


def _mark(run_dir: Path, name: str, kind: MarkKind, *, reason: Exception) -> None:
    events = Events(run_dir)
    events.mark(Mark(time.time(), name, kind, None, redact(headline(loss_of(reason) or reason))))
    events.close()


def _drive(controller: Controller, *, grace_s: float) -> None:
    """Run the controller until it ends or this process is asked to stop. When asked to stop, save what was trained."""
    stop = controller.stop

    async def run() -> None:
        with stop.noting_interrupts():
            await controller.run()

    try:
        with stop.waiting(grace_s):
            asyncio.run(run())
        return
    except Stopped:
        pass
    except asyncio.CancelledError:  # the main thread, which waits for this one, cancelled it
        if stop.is_interrupted:
            raise KeyboardInterrupt from None
    except Exception as error:
        if stop.is_interrupted:
            say(f"stopped by Ctrl-C; this error occurred while stopping: {headline(error)}")
            raise KeyboardInterrupt from error
        if stop.asked is None:
            if loss_of(error) is None:  # so a checkpoint that is being written can be finished
                with _saying_why("the checkpoint that was being written is lost", known=error):
                    controller.record.saves.settle()
            raise
        # The other processes were also asked to stop, and have already ended.
        say(f"asked to stop by {stop.asked}; this error occurred while stopping: {headline(error)}")
    with _saying_why("the newest step cannot be saved"):
        controller.save_unsaved()
    raise Stopped(stop.asked)


@contextmanager
def _saying_why(what: str, *, known: Exception | None = None) -> Iterator[None]:
    """If the block raises, only print the error, because the user will see another error (``known``) or the end of the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - there is no time to retry, whatever it is
        if error is not known:
            say(f"{what}: {headline(error)}")


def _claim(config: Config, run_dir: Path, *, continued: bool) -> None:
    """Create the directory and write its run file. If that fails, a new run raises at once; a continued run waits and retries."""

    def write() -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / RUN_FILE, dump_config(config))

    if continued:
        persist(write, path=run_dir / RUN_FILE, what="the run file")
    else:
        with refusing(run_dir, folder=run_dir):
            write()


def _keep_tokenizer(tokenizer: Any, path: Path) -> None:
    """Save the fast tokenizer, so that readers can decode the journal's token ids. `model/` contains all tokenizer files."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not path.exists():
        persist(lambda: write_atomic(path, fast.to_str()), path=path, what="the tokenizer")


def _check_lengths(config: Config, workers: Workers) -> None:
    """Refuse prompts that are too long for the engine. Otherwise the engine would refuse them later, perhaps after hours."""
    answer, positions, room = config.rollout.max_response_tokens, workers.max_positions, config.rollout.kv_tokens
    for prompts in filter(None, (workers.train, workers.val)):
        longest = max((len(prompt.token_ids) for prompt in prompts.prompts), default=0)
        wanted = longest + answer
        makes = f"{prompts.source} has a prompt of {longest} tokens{prompts.with_template}; with rollout.max_response_tokens={answer} that makes {wanted}"
        if wanted > positions:
            raise ConfigError(
                f"{makes} positions, but the model has {positions}: lower rollout.max_response_tokens, or lower "
                "data.max_prompt_tokens to leave out such prompts"
            )
        if room is not None and wanted > room:
            raise ConfigError(
                f"{makes}, but the KV cache has room for only {room} tokens (rollout.kv_tokens); set it to {wanted} or more, or leave it out"
            )


def _say_size(config: Config) -> None:
    try:
        sizes = read_sizes(config.model.path)
    except SizesUnknown:
        return  # another check refuses unknown architectures, with a message that names them
    width = element_size(config)
    if not _has_slots(config):
        width = resolve_dtype(config.model.dtype, resolve_device(config.model.device)).itemsize
    checkpoint, lora = checkpoint_bytes(config, sizes, width=width), config.model.lora
    model = sizes.num_parameters if lora is None or lora.export == "merged" else sizes.adapter_parameters(lora)
    if words := size_words(config, checkpoint=checkpoint, model=model * width):
        say(words)
    if not _has_slots(config) and checkpoint > (available := psutil.virtual_memory().available):
        warn(
            f"a save copies {checkpoint / GIB:,.1f} GiB to host memory, but only {available / GIB:,.1f} GiB is available, so this "
            "process would be killed; train an adapter (model.lora.rank=16), keep the optimizer's state in bfloat16 "
            "(actor.optimizer.state=bfloat16), or train a smaller model"
        )


def _say_changes(events: Events, changes: list[Change], *, step: int, code: list[str]) -> None:
    """Report what this resume changes. The events record it too, because the run file keeps only the newest values."""
    for line in code:
        warn(line)
        events.mark(Mark(time.time(), "code changed", MarkKind.NOTE, None, line))
    if not changes:
        return
    meaning = (
        "groups in the journal were generated with the old values; steps after the checkpoint are trained with the new values, and the "
        "learning rate may differ where it depends on them"
    )
    say("\n".join(["settings that this resume changes:", *(f"  {change}" for change in changes), meaning]))
    events.write(
        {"resumed_at_step": step, "changed": {change.key: [change.before, change.after] for change in changes}}
    )


def _journaled_failures(directory: Path, *, shown: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the first failure of each kind that is in the journal but not in ``shown``. An earlier process of the run encountered
    these."""
    known = {(failure["reward"], failure["kind"]) for failure in shown}
    found: dict[tuple[str, str], dict[str, str]] = {}
    with Journal(directory) as journal:
        for group in (group for step in journal.steps() for group in journal.read(step)):
            for completion, score in zip(group.completions, group.scores, strict=True):
                for reward, error in score.errors.items():
                    kind, _, why = error.partition(": ")
                    if (reward, kind) not in known:
                        values = (reward, kind, group.prompt.id, completion.text, why)
                        found.setdefault((reward, kind), dict(zip(FAILURE, values, strict=True)))
    return list(found.values())


def _say_rollout(run_dir: Path, controller: Controller, summary: dict[str, Any]) -> dict[str, Any]:
    """Report the result of a command that only generated completions."""
    done = {"run": summary["run"], "step": controller.start_step}
    if controller.bounds.split is Split.EVAL:
        headline = BY_METRIC[summary["headline"]]
        last = {key: course["last"] for key, course in summary["eval"].items()}
        say(
            f"{headline.words} of step {controller.start_step}: {last[headline.key]:.3f}; the answers are in {run_dir / 'samples'}"
        )
        return {**done, "headline": headline.metric, "eval": last}
    counts = {step: len(controller.journal.read(step)) for step in controller.steps_ahead}
    ready = ", ".join(f"step {step}: {counted(count, 'group')}" for step, count in counts.items())
    say(
        f"the journal has groups that are ready for training ({ready}); train on them with --phase update"
        if ready
        else f"{trained(controller.start_step)}, so there is nothing to generate; raise trainer.steps to continue"
    )
    return {**done, "groups": counts}
