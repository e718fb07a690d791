"""Metric sinks: always ``metrics.jsonl``, and TensorBoard and Weights & Biases if configured.

A resumed run repeats the steps after its checkpoint, so each sink first removes their rows.
"""

from __future__ import annotations

import importlib
import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rollcall.base.append_file import AppendFile, lines_end, parse_row
from rollcall.base.atomic import write_atomic
from rollcall.base.patience import persist
from rollcall.base.wait import warn
from rollcall.config import Config, public_dump
from rollcall.observe.metrics import check_names


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Writes one line per call and refuses undocumented metrics. ``resume_step=k`` keeps the rows up to step k;
    None starts with an empty file."""

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [row for row in read_rows(self.path) if row["step"] <= resume_step]

        def start() -> AppendFile:
            if kept or self.path.exists():
                write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            return AppendFile(self.path, good_end=lines_end)

        self._file = persist(start, path=self.path, what="the metrics of earlier steps")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        check_names(metrics)
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            row[name] = number if math.isfinite(number) else None
        line = (json.dumps(row) + "\n").encode()
        persist(lambda: self._file.append(line), path=self.path, what=f"the metrics of step {step}")
        self._file.forget_unsynced()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    def __init__(self, dir: Path, *, resume_step: int | None) -> None:
        self._dir = dir
        self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = self._make(str(dir), purge_step=0 if resume_step is None else resume_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        def write() -> None:
            try:
                if self._writer is None:
                    # Try a plain file first, because a TensorBoard writer that fails prints a traceback from its thread.
                    probe = self._dir / ".probe"
                    write_atomic(probe, bytes(1 << 16))
                    probe.unlink()
                    self._writer = self._make(str(self._dir))
                for name, value in metrics.items():
                    self._writer.add_scalar(name, float(value), step)
                self._writer.flush()
            except OSError:
                self._writer = None  # the error ended the writer's thread; the next writer adds another file
                raise

        persist(write, path=self._dir, what=f"the TensorBoard curves of step {step}")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """Weights & Biases. The run id is stored in the run directory, so a resumed run continues the same page."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        wandb, id_file = _wandb(), run_dir / "wandb_id"
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex[:8])
        try:
            self._run = wandb.init(
                project="rollcall", name=config.run.name, id=id_file.read_text().strip(), resume="allow", dir=str(run_dir),
                config=public_dump(config),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001
            # Show only the type, because a login error message may contain a key.
            raise ValueError(
                f"wandb could not start ({type(error).__name__}); run `wandb login`, set WANDB_MODE=offline, or remove "
                "wandb from trainer.loggers"
            ) from None
        # wandb drops rows whose step goes backwards, as in a replay. It keeps them if we log the step as a metric.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def check_loggers(config: Config) -> None:
    """Raise an error if a logger is not installed, before the run loads or writes anything."""
    if "wandb" in config.trainer.loggers:
        _wandb()


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError(
            "trainer.loggers contains wandb, which is not installed; run: pip install wandb, or remove it from trainer.loggers"
        ) from None


def make_sinks(config: Config, run_dir: Path, resume_step: int | None) -> list[Sink]:
    """Create the sinks that the run file asks for. ``resume_step`` is the checkpoint's step, or None for a fresh run."""
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)]
    if "tensorboard" in config.trainer.loggers:
        try:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step=resume_step))
        except ImportError:
            warn("TensorBoard is not installed, so its curves are not written; run: pip install tensorboard")
    if "wandb" in config.trainer.loggers:
        sinks.append(WandbSink(config, run_dir))
    return sinks


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, one row per step in ascending order. A later row for the same step is merged into the earlier one."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        row = parse_row(line)
        if row is None:
            # The last line has no newline if the process was killed while writing it; the replay writes it again.
            warn(f"{path}, line {number} is not a row of metrics and is skipped: {line!r:.60}")
            continue
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]
