"""The Python API: ``rollcall.train``, ``rollcall.evaluate``, ``rollcall.load_run`` and the ``Run`` class (docs/python.md).

The command line calls the same functions. Importing this module loads neither torch nor ray; they are loaded when a function needs them.
"""

# pyright: strict
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollcall.base.errors import ConfigError
from rollcall.base.importing import calm_transformers, uncollected
from rollcall.base.journal import Journal
from rollcall.base.redact import REDACTED
from rollcall.base.stop import heed_if_possible, outside_loop
from rollcall.base.types import Group
from rollcall.base.wait import in_silence, on_stdout, speaking
from rollcall.checkpoint.exported import exported_model
from rollcall.checkpoint.run_dir import run_file_of
from rollcall.checkpoint.store import store_of
from rollcall.config import Config, load_config
from rollcall.config.checks import say_unused
from rollcall.config.run import in_one_process
from rollcall.loop.callbacks import Callbacks, CheckpointSaved, EvaluationDone, StepDone
from rollcall.loop.phases import Bounds, Phase, Split
from rollcall.nodes.cluster import find_cluster
from rollcall.nodes.declared import environment
from rollcall.process.debug.here import POST_MORTEM
from rollcall.reward.given import name_functions, settle_functions
from rollcall.view.reader import RunReader, open_run

if TYPE_CHECKING:
    from rollcall.run.evaluation import EvalReport

__all__ = ["Run", "SavedCheckpoint", "evaluate", "load_run", "read_config", "train"]

_SAMPLES = re.compile(r"(train|val)-(\d+)\.jsonl")
_SAMPLE_COLUMNS = ("prompt_id", "prompt", "completion", "answer", "reward", "parts", "errors", "num_tokens", "finish")
_Choice = TypeVar("_Choice", Phase, Split)
Source = Config | Mapping[str, Any] | str | Path | None
Table = Any  # a ``pyarrow.Table``, which has no type hints


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    step: int
    path: Path
    problem: str  # why the checkpoint cannot be used; empty if it is intact

    @property
    def model_dir(self) -> Path | None:
        """The folder for ``AutoModelForCausalLM.from_pretrained``. None if the model was saved in parts; `rollcall merge` combines
        them."""
        model = self.path / "model"
        return model if (model / "model.safetensors").is_file() else None


class Run:
    """A run directory, as returned by ``rollcall.train`` and ``rollcall.load_run``."""

    def __init__(self, directory: Path, *, result: dict[str, Any] | None = None) -> None:
        self.dir = directory
        self._reader = RunReader(directory)
        self._result = result

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r}, step {self.step} of {self.config.trainer.steps})"

    @cached_property
    def config(self) -> Config:
        """The settings of the run's last start, without secrets."""
        return self._reader.read_config()

    @property
    def step(self) -> int:
        """The last trained step."""
        return self._reader.step

    @property
    def result(self) -> dict[str, Any]:
        """The result of the ``train`` call, as printed by `rollcall train --json`. For a loaded run: its summary."""
        return self.summary if self._result is None else self._result

    @property
    def summary(self) -> dict[str, Any]:
        """Results of the whole run, from ``summary.json``. Computed from the metrics so far if the run has not finished."""
        return self._reader.summary()

    @property
    def metrics(self) -> Table:
        """One row per step, in order, and one column per metric (docs/metrics.md). A metric that a step lacks is null."""
        self._reader.metrics.refresh()
        return _table(self._reader.metrics.whole_columns())

    @property
    def samples(self) -> Table:
        """Completions that the run saved for reading: the first groups at each checkpoint (``train``) and each evaluation (``val``)."""
        columns: dict[str, list[Any]] = {name: [] for name in ("step", "split", *_SAMPLE_COLUMNS)}
        folder = self.dir / "samples"
        paths = folder.iterdir() if folder.is_dir() else ()  # glob would hide an unreadable folder
        named = [(int(found[2]), found[1], path) for path in paths if (found := _SAMPLES.fullmatch(path.name))]
        for step, split, path in sorted(named):
            # Not splitlines: a completion may contain a separator that JSON does not escape, such as U+2028.
            for line in path.read_bytes().rstrip(b"\n").split(b"\n"):
                row: dict[str, Any] = json.loads(line)
                columns["step"].append(step)
                columns["split"].append(split)
                for name in _SAMPLE_COLUMNS:
                    value: Any = row.get(name)
                    if isinstance(value, str):  # Arrow does not accept a lone surrogate, so write its escape sequence
                        value = value.encode("utf-8", errors="backslashreplace").decode()
                    # Stored as a JSON string, because files may name different rewards.
                    columns[name].append(json.dumps(value or {}) if name in ("parts", "errors") else value)
        return _table(columns)

    def groups(self, step: int | None = None) -> Iterator[Group]:
        """Read the journal's groups, of all steps or of one: prompts, completions with tokens and log-probs, and scores."""
        folder = self.dir / "journal"
        if not folder.is_dir():
            return
        with Journal(folder) as journal:
            for one in journal.steps() if step is None else [step]:
                yield from journal.read(one)

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints on disk, oldest first. Reading this property verifies the checksum of every file."""
        found = store_of(self.dir).inspect()
        return [SavedCheckpoint(step=one.step, path=one.path, problem=one.reason) for one in found]

    @property
    def model_dir(self) -> Path | None:
        """The trained model, for ``AutoModelForCausalLM.from_pretrained``. None until the run has finished."""
        return exported_model(self.dir, last=store_of(self.dir).latest())


def load_run(directory: str | Path) -> Run:
    """Load the run in a directory. Raises an error if the directory contains no run."""
    return Run(open_run(_path_of(directory, what="the directory of a run (run.dir)")).dir)


def _path_of(given: object, *, what: str) -> Path:
    if not isinstance(given, str | Path):
        raise ConfigError(f"{given!r} is not a path; give {what}")
    return Path(given)


def _table(columns: Mapping[str, Sequence[Any]]) -> Table:
    pyarrow: Any = import_module("pyarrow")
    return pyarrow.table(columns)


def train(
    config: Source = None,
    *,
    fresh: bool = False,
    quiet: bool = False,
    phase: Phase | str = Phase.BOTH,
    split: Split | str = Split.TRAIN,
    on_step: Callable[[StepDone], None] | None = None,
    on_evaluation: Callable[[EvaluationDone], None] | None = None,
    on_save: Callable[[CheckpointSaved], None] | None = None,
    post_mortem: bool = False,
    local_debug: bool = False,
    **overrides: Any,
) -> Run:
    """Train until the last step, or continue the run in the run directory.

    ``config`` is a run file, a run directory, a mapping with the sections of a run file, or a ``Config``. Without it, the demo runs. Any
    other keyword overrides a key: ``trainer={"steps": 3}`` or ``**{"trainer.steps": 3}``. ``fresh`` starts over and moves an old
    run directory aside. ``quiet`` hides the progress. ``post_mortem`` opens the debugger when a worker, a reward or an environment
    raises. ``local_debug`` runs all roles in this process, with one reward process and one episode at a time, and without compilation
    (docs/debugging.md).
    """
    bounds = Bounds(phase=_choice(Phase, phase, name="phase"), split=_choice(Split, split, name="split"))
    callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_save=on_save)
    resolved = read_config(config, changes=overrides)
    are_given = "reward" in overrides or (isinstance(config, Mapping) and "reward" in config)
    settle_functions(resolved.run.dir, resolved.reward, are_given=are_given)
    resolved = in_one_process(resolved) if local_debug else resolved
    say_unused(resolved)
    cluster = resolved.cluster
    # A single slot needs no cluster, and neither does a finished run.
    if cluster is not None and cluster.num_slots > 1 and not (resolved.run.dir / "summary.json").exists():
        # If the cluster does not answer, fail before loading torch.
        find_cluster(ray_address=cluster.ray_address).knock()

    def work() -> dict[str, Any]:
        if not quiet:
            print("loading torch and transformers", flush=True)
        with uncollected():
            from rollcall.run.training import train as run
        calm_transformers()
        return run(resolved, fresh=fresh, quiet=quiet, bounds=bounds, callbacks=callbacks, is_bare=local_debug)

    with heed_if_possible(), environment({POST_MORTEM: "1"} if post_mortem else {}):
        result = outside_loop(work)
    return Run(resolved.run.dir, result=result)


def evaluate(
    target: Run | str | Path,
    *,
    data: str | Path | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_prompts: int | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> EvalReport:
    """Evaluate a run's newest model, or the model in a directory, on held-out prompts: on ``data``, or by default on the run's
    ``data.val``."""
    from rollcall.run.evaluation import plan_evaluation, run_evaluation

    plan = plan_evaluation(
        target.dir
        if isinstance(target, Run)
        else _path_of(target, what="a run, its directory or file, or the directory of a model"),
        overrides=[],
        changes=_with_paths(overrides),
        data=None if data is None else str(data),
        samples=samples,
        temperature=temperature,
        max_prompts=max_prompts,
    )
    if "reward" not in overrides:
        settle_functions(plan.config.run.dir, plan.config.reward, are_given=False)
    calm_transformers()
    with heed_if_possible(), speaking(in_silence if quiet else on_stdout):
        return outside_loop(partial(run_evaluation, plan, on_progress=lambda done, total: None))


def read_config(source: Source, *, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Config:
    """Read and validate a run's settings. ``overrides`` are command-line arguments (``trainer.steps=3``); ``changes`` maps keys to
    values."""
    if isinstance(source, Config):
        settings = source.model_dump(warnings=False)
        load_config(settings)  # pydantic does not validate model_copy or items appended to a list
        if not overrides and not changes:
            return source
        source = settings
    changes = _with_paths(changes or {})
    if source is None or isinstance(source, Mapping):
        source = None if source is None else _with_paths(source)
        return load_config(source, list(overrides), changes=changes)
    what = "a run file, the directory of a run, its sections as a map, or a Config"
    file, defaults = run_file_of(_path_of(source, what=what))
    if defaults and REDACTED in file.read_text(errors="replace"):
        raise ConfigError(
            f"{file} contains no secrets (they are written as {REDACTED}), so the run cannot continue from it; give the run file that "
            "you started the run with"
        )
    return load_config(file, list(overrides), defaults=defaults, changes=changes)


def _with_paths(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace each reward function with the name that a run file would use for it."""
    for key, value in values.items():
        if key.startswith("reward.") and callable(value):
            raise ConfigError(f"{key} cannot be a function; give all rewards in one list, such as reward=[my_function]")
    return {**values, "reward": name_functions(values["reward"])} if "reward" in values else values


def _choice(kind: type[_Choice], given: str, *, name: str) -> _Choice:
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(f"{name}={given!r} is not one of {', '.join(kind)}") from None
