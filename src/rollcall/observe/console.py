"""What `rollcall train` shows while it runs: a live panel on a terminal, plain lines in a log, nothing with `--json`.

A console takes metrics like any other sink. It holds no signal handlers: an interrupt passes through, and ``close`` (or
leaving the ``with`` block) gives the terminal back.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SampleRow = tuple[str, str, str, float]  # prompt, completion, answer, reward
_LINE_EVERY_S = 5.0
_PLAIN_WIDTH = 110
_MAX_CELL = 400


class Console(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def make_console(
    *,
    name: str,
    num_steps: int,
    start_step: int = 0,
    first_accuracy: float | None = None,
    quiet: bool = False,
    file: TextIO | None = None,
) -> Console:
    """``start_step`` is the step resumed from, ``first_accuracy`` the run's; ``quiet`` is the `--json` mode."""
    if quiet:
        return QuietConsole()
    rich = RichConsole(file=file, highlight=False)
    progress = Progress(name=name, num_steps=num_steps, start_step=start_step)
    progress.first_accuracy = first_accuracy
    if rich.is_terminal and not rich.is_dumb_terminal:
        return LiveConsole(progress, rich=rich)
    return LineConsole(progress, file=file)


class Progress:
    """The numbers on display; knows nothing of how they are drawn."""

    def __init__(
        self, *, name: str, num_steps: int, start_step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.num_steps = num_steps
        self.step = start_step
        self.first_accuracy: float | None = None
        self.last_accuracy: float | None = None
        self.metrics: dict[str, float] = {}
        self._clock = clock
        self._started = clock()
        # Recent steps only: the first ones compile and warm up, and lengths drift.
        self._marks: deque[tuple[int, float]] = deque([(start_step, self._started)], maxlen=21)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.step:
            self._marks.append((step, self._clock()))
        elif len(self._marks) == 1:
            self._marks[0] = (step, self._clock())  # loading and the first evaluation are no part of the pace
        self.step = max(step, self.step)
        self.metrics.update(metrics)
        accuracy = metrics.get("eval/accuracy")
        if accuracy is not None:
            self.first_accuracy = accuracy if self.first_accuracy is None else self.first_accuracy
            self.last_accuracy = accuracy

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the recent pace; None before the first step."""
        (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return None
        since = self._clock() - last_s
        return max(0.0, (last_s - first_s) / (last_step - first_step) * (self.num_steps - self.step) - since)

    def fields(self) -> list[tuple[str, str]]:
        """Label and value of each number there is."""
        found = [("step", f"{self.step}/{self.num_steps}")]
        if self.first_accuracy is not None and self.last_accuracy is not None:
            found.append(("accuracy", f"{self.first_accuracy:.3f} → {self.last_accuracy:.3f}"))
        for label, key, form in (
            ("reward", "train/reward_mean", "{:.3f}"),
            ("tok/s", "rollout/tokens_per_s", "{:,.0f}"),
            ("s/step", "time/step_s", "{:.2f}"),
        ):
            if key in self.metrics:
                found.append((label, form.format(self.metrics[key])))
        if self.left_s is not None and self.step < self.num_steps:
            found.append(("left", format_duration(self.left_s)))
        else:
            found.append(("elapsed", format_duration(self.elapsed_s)))
        return found


class LiveConsole:
    """One panel that redraws itself in place."""

    def __init__(self, progress: Progress, *, rich: RichConsole) -> None:
        self.progress = progress
        self._rich = rich
        self._live = Live(console=rich, get_renderable=self._draw, refresh_per_second=4)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.update(step, metrics)

    def note(self, text: str) -> None:
        self._rich.print(Text(text))

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        self._rich.print(samples_table(title, rows))

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _draw(self) -> Panel:
        progress = self.progress
        bar = ProgressBar(total=max(progress.num_steps, 1), completed=progress.step, width=None)
        line = Text()
        for label, value in progress.fields():
            line.append(f"{label} ", style="dim")
            line.append(value, style="bold")
            line.append("   ")
        # A grid, because a bar alone ends without a line break and would swallow what follows.
        body = Table.grid(expand=True)
        body.add_row(bar)
        body.add_row(line)
        return Panel(body, title=Text(progress.name), title_align="left", box=box.ROUNDED, padding=(0, 1))


class LineConsole:
    """A line every few seconds, and for each evaluation: what a log file wants."""

    def __init__(self, progress: Progress, *, file: TextIO | None) -> None:
        self.progress = progress
        self._rich = RichConsole(file=file, width=_PLAIN_WIDTH, highlight=False)
        self._file = file
        self._printed_s: float | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.update(step, metrics)
        now = self.progress.elapsed_s
        due = self._printed_s is None or now - self._printed_s >= _LINE_EVERY_S
        if due or "eval/accuracy" in metrics or step >= self.progress.num_steps:
            self._printed_s = now
            self.note("  ".join(f"{label} {value}" for label, value in self.progress.fields()))

    def note(self, text: str) -> None:
        file = self._file or sys.stdout
        encoding = getattr(file, "encoding", None) or "utf-8"
        # A log on a machine without a UTF-8 locale must not end the run.
        print(text.encode(encoding, errors="replace").decode(encoding), file=file, flush=True)

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        with self._rich.capture() as capture:
            self._rich.print(samples_table(title, rows))
        self.note("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def close(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class QuietConsole:
    """Prints nothing; for `--json`, whose only output is the summary."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def note(self, text: str) -> None:
        return None

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        return None

    def close(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def samples_table(title: str, rows: Sequence[SampleRow]) -> Table:
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_lines=any("\n" in row[1] for row in rows)
    )
    table.add_column("prompt", ratio=3, overflow="fold")
    table.add_column("completion", ratio=4, overflow="fold")
    table.add_column("answer", ratio=1, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    for prompt, completion, answer, reward in rows:
        # Text, not str: model output must not be read as rich markup.
        cells = [Text(_shown(text)) for text in (prompt, completion, answer)]
        table.add_row(*cells, Text(f"{reward:.2f}", style="green" if reward > 0 else "red"))
    return table


def format_duration(seconds: float) -> str:
    """42s, 3m 05s, 2h 10m, 3d 04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def _shown(text: str) -> str:
    """Cut from the left for a long text (the end is where the answer is), control characters made harmless."""
    text = text.strip("\n")
    if len(text) > _MAX_CELL:
        text = "…" + text[1 - _MAX_CELL :]
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)
