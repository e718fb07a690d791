"""A run directory as Python values: settings, metrics as a table, samples, groups, checkpoints. It only reads, also while the
run goes on, and each look reads the files again."""

# pyright: strict
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rollcall.checkpoint.exported import exported_model
from rollcall.checkpoint.run_dir import RUN_FILE, is_run
from rollcall.checkpoint.store import store_of
from rollcall.config import Config, load_saved_run
from rollcall.durable.journal import Journal
from rollcall.errors import ConfigError
from rollcall.observe.sinks import read_rows
from rollcall.observe.summary import build_summary
from rollcall.types import Group

_SAMPLES = re.compile(r"(train|val)-(\d+)\.jsonl")
_SAMPLE_COLUMNS = ("prompt_id", "prompt", "completion", "answer", "reward", "parts", "errors", "num_tokens", "finish")


class Table(Protocol):
    """What is used most of a ``pyarrow.Table``, which has no types of its own and is what one gets."""

    @property
    def num_rows(self) -> int: ...

    @property
    def column_names(self) -> list[str]: ...

    def __getitem__(self, column: str) -> Any: ...

    def select(self, columns: list[str]) -> Table: ...

    def to_pydict(self) -> dict[str, list[Any]]: ...

    def to_pylist(self) -> list[dict[str, Any]]: ...

    def to_pandas(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    step: int
    path: Path
    problem: str  # why it cannot be used; empty: it is whole

    @property
    def model_dir(self) -> Path | None:
        """For ``AutoModelForCausalLM.from_pretrained``; None: the model is in parts, which `rollcall merge` puts together."""
        model = self.path / "model"
        return model if (model / "model.safetensors").is_file() else None


class Run:
    """A run directory. ``rollcall.train`` and ``rollcall.load_run`` give one."""

    def __init__(self, directory: Path, *, result: dict[str, Any] | None = None) -> None:
        self.dir = directory
        self._result = result

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r}, step {self.step} of {self.config.trainer.steps})"

    @cached_property
    def config(self) -> Config:
        """The settings that the run was last started with, secrets left out."""
        try:
            return load_saved_run(self.dir / RUN_FILE)
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nThe settings of a run are only in this file; restore it to read them"
            ) from None

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return max((row["step"] for row in self._rows() if "time/step_s" in row), default=0)

    @property
    def result(self) -> dict[str, Any]:
        """What the call of ``train`` came to, as `rollcall train --json` prints it; of a loaded run, its summary."""
        return self.summary if self._result is None else self._result

    @property
    def summary(self) -> dict[str, Any]:
        """Whole-run numbers: those of ``summary.json``, or, before the run has ended, those of its metrics so far."""
        step = self.step
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # a damaged one is as good as none
            summary: dict[str, Any] = json.loads((self.dir / "summary.json").read_text())
            if summary["steps"] >= step:  # else a run that had ended trains further
                return summary
        return build_summary(self.dir / "metrics.jsonl", seconds=0.0, resume_step=step, run=self.config.run.name)

    @property
    def metrics(self) -> Table:
        """One row for each step in order, one column for each metric (docs/metrics.md); null where a step does not have it."""
        rows = self._rows()
        names = dict.fromkeys(name for row in rows for name in row)
        return _table({name: [row.get(name) for row in rows] for name in names})

    @property
    def samples(self) -> Table:
        """The completions that were kept to read: the first groups of each checkpoint (``train``) and evaluation (``val``)."""
        columns: dict[str, list[Any]] = {"step": [], "split": []}
        columns |= {name: [] for name in _SAMPLE_COLUMNS}
        for step, split, path in sorted(self._sample_files()):
            # Not splitlines: a completion may hold a separator that JSON leaves as it is, such as U+2028.
            for line in path.read_bytes().rstrip(b"\n").split(b"\n"):
                row: dict[str, Any] = json.loads(line)
                columns["step"].append(step)
                columns["split"].append(split)
                for name in _SAMPLE_COLUMNS:
                    value: Any = row.get(name)
                    if isinstance(value, str):  # half a surrogate pair, which a table does not take, as it was written
                        value = value.encode("utf-8", errors="backslashreplace").decode()
                    # As text: the rewards, and with them the keys, may differ from file to file.
                    columns[name].append(json.dumps(value or {}) if name in ("parts", "errors") else value)
        return _table(columns)

    def groups(self, step: int | None = None) -> Iterator[Group]:
        """Every group in the journal, or those made for one step: prompt, completions with tokens and log-probs, scores."""
        folder = self.dir / "journal"
        if not folder.is_dir():
            return
        with Journal(folder) as journal:
            for one in journal.steps() if step is None else [step]:
                yield from journal.read(one)

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """Those that are kept, oldest first, every file compared with its checksum."""
        found = store_of(self.dir).inspect()
        return [SavedCheckpoint(step=one.step, path=one.path, problem=one.reason) for one in found]

    @property
    def model_dir(self) -> Path | None:
        """The trained model, for ``AutoModelForCausalLM.from_pretrained``; None: the run has not come to its end."""
        return exported_model(self.dir, last=store_of(self.dir).latest())

    def _rows(self) -> list[dict[str, Any]]:
        return read_rows(self.dir / "metrics.jsonl")

    def _sample_files(self) -> Iterator[tuple[int, str, Path]]:
        folder = self.dir / "samples"
        for path in folder.iterdir() if folder.is_dir() else ():
            if found := _SAMPLES.fullmatch(path.name):
                yield int(found[2]), found[1], path


def path_of(given: object, *, what: str) -> Path:
    if not isinstance(given, str | Path):
        raise ConfigError(f"{given!r} is not a path; give {what}")
    return Path(given)


def load_run(directory: str | Path) -> Run:
    """The run in a directory; refused if there is none."""
    path = path_of(directory, what="the directory of a run (run.dir)")
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; give the directory of a run (run.dir)")
    if not is_run(path):
        raise ConfigError(
            f"{path} holds no run (no {RUN_FILE}, journal or metrics); give the directory of a run (run.dir)"
        )
    return Run(path)


def _table(columns: dict[str, list[Any]]) -> Table:
    pyarrow: Any = import_module("pyarrow")
    return pyarrow.table(columns)
