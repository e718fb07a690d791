"""The output of `rollcall train` while it runs: a live panel on a terminal, plain lines in a log, nothing with `--json`.

A console receives metrics like any other sink, and the name of each phase. It has no signal handlers: interrupts pass
through, and ``close`` (or leaving the ``with`` block) restores the terminal. Any thread may call it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollcall.base.screen import Screen
from rollcall.observe.headline import ACCURACY
from rollcall.observe.progress import Progress, format_duration
from rollcall.process.debug.stopped import lend_terminal

SampleRow = tuple[str, str, str, float]  # prompt, completion, answer, reward
_LINE_EVERY_S = 5.0
_PHASE_AFTER_S = 2.0  # shorter phases are not worth a line
_MAX_CELL = 400


class Console:
    """Prints nothing. Used with `--json`, where the only output is the summary; subclasses print more."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.update(step, metrics)

    def restart(self, step: int) -> None:
        """Note that a new attempt continues from this step. Later steps will be repeated."""
        self.progress.restart(step)

    def phase(self, text: str | None) -> None:
        """Set the current phase, or None between phases."""
        self.progress.phase(text)

    def note(self, text: str) -> None: ...

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None:
        """Stop updating. The last panel stays on the screen, and notes may still appear below it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def make_console(progress: Progress, *, quiet: bool = False) -> Console:
    """Create the right console for this terminal. ``quiet`` is the `--json` mode."""
    if quiet:
        return Console(progress)
    rich = Screen()
    return LiveConsole(progress, rich=rich) if rich.is_terminal and not rich.is_dumb_terminal else LineConsole(progress)


class LiveConsole(Console):
    """A panel that is redrawn in place. Other output, including that of child processes, appears above it."""

    def __init__(self, progress: Progress, *, rich: Screen) -> None:
        super().__init__(progress)
        self._rich = rich
        self._is_closed = False
        self._keep_off = lend_terminal(self._away)
        self._live = Live(console=rich, get_renderable=self._draw, refresh_per_second=4)
        self._live.start()

    def note(self, text: str) -> None:
        self._rich.print(Text(text))

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        self._rich.print(samples_table(title, rows))

    def close(self) -> None:
        was_closed, self._is_closed = self._is_closed, True
        self.progress.phase(None)
        self._live.stop()
        if not was_closed:
            self._keep_off()

    @contextmanager
    def _away(self) -> Iterator[None]:
        """Hide the panel while a debugger prompt is on the screen."""
        self._live.transient = True
        self._live.stop()
        try:
            yield
        finally:
            self._live.transient = False
            self._live.start()

    def __exit__(self, kind: object = None, *exc: object) -> None:
        if kind is not None:
            # The messages that follow say how far the run got, and an old panel would contradict them.
            self._live.transient = True
        self.close()

    def _draw(self) -> RenderableType:
        progress = self.progress
        # A grid, because a progress bar by itself does not end with a line break, and the next line would join it.
        body = Table.grid(expand=True)
        body.add_row(ProgressBar(total=max(progress.num_steps, 1), completed=progress.step, width=None))
        for line in _lines(progress.fields(), width=self._rich.width - 4):  # the border and its padding
            body.add_row(line)
        if not self._is_closed:  # otherwise this is the last panel
            doing = progress.current
            seconds = progress.elapsed_s - doing.since_s if doing else 0.0
            shown = f"{doing.text}, {format_duration(seconds)}" if doing and seconds >= 1 else ""
            body.add_row(Text(shown, style="dim"))
        panel = Panel(body, title=Text(progress.name), title_align="left", box=box.ROUNDED, padding=(0, 1))
        # At the right edge of a panel, the ^C of Ctrl-C would wrap to a new line, and erasing the panel would then miss a line.
        return panel if self._is_closed else Group(panel, Text())


class LineConsole(Console):
    """Prints a line every few seconds and for each evaluation, which suits a log file. A thread reports long phases."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._rich = Screen(width=110)
        self._printed_s: float | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="phases", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.progress.update(step, metrics)
            is_last = step >= self.progress.num_steps
            is_due = self._printed_s is None or self.progress.elapsed_s - self._printed_s >= _LINE_EVERY_S
            if ACCURACY.metric in metrics or ("train/reward_mean" in metrics and (is_due or is_last)):
                self._printed_s = self.progress.elapsed_s
                self._print("  ".join(f"{label} {value}" for label, value in self.progress.fields()))

    def note(self, text: str) -> None:
        with self._lock:
            self._print(text)

    def show_samples(self, title: str, rows: Sequence[SampleRow]) -> None:
        with self._rich.capture() as capture:
            self._rich.print(samples_table(title, rows))
        self.note("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self.progress.phase(None)

    def _watch(self) -> None:
        """Report long phases: all of them until the first step is done, and afterwards only while nothing else is printed."""
        said = None
        while not self._closed.wait(0.5):
            with self._lock:
                doing, now_s = self.progress.current, self.progress.elapsed_s
                silent_s = now_s - (self._printed_s or 0.0)
                quiet_s = _LINE_EVERY_S if "time/step_s" in self.progress.metrics else 0.0
                if doing is None or doing is said or now_s - doing.since_s < _PHASE_AFTER_S or silent_s < quiet_s:
                    continue
                said, self._printed_s = doing, now_s
                self._print(f"{doing.text}: {format_duration(now_s - doing.since_s)} so far")

    def _print(self, text: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        # Printing to a log on a machine without a UTF-8 locale must not stop the run.
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)


def _lines(fields: Sequence[tuple[str, str]], *, width: int) -> list[Text]:
    """Wrap fields into as many lines as the width requires, keeping each label with its value."""
    lines = [Text()]
    for label, value in fields:
        field = Text.assemble((f"{label} ", "dim"), (value, "bold"))
        if lines[-1] and lines[-1].cell_len + 3 + field.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1] else "").append_text(field)
    return lines


def samples_table(title: str, rows: Sequence[SampleRow]) -> Table:
    lines = any("\n" in row[1] for row in rows)
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_lines=lines)
    table.add_column("prompt", ratio=3, overflow="fold")
    table.add_column("completion", ratio=4, overflow="fold")
    table.add_column("answer", ratio=1, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    for prompt, completion, answer, reward in rows:
        texts = [text.strip("\n") for text in (prompt, completion, answer)]
        # Text, not str: model output must not be interpreted as rich markup. The start of a long text is cut off, because the answer is
        # at the end.
        cells = [Text(text if len(text) <= _MAX_CELL else "…" + text[1 - _MAX_CELL :]) for text in texts]
        table.add_row(*cells, Text(f"{reward:.2f}", style="green" if reward > 0 else "red"))
    return table
