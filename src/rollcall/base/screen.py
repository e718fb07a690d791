"""The console that commands draw on. Only its own escape codes reach the terminal; those in text from files, users and models are
removed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rollcall.base.redact import harmless


class Screen(Console):
    def __init__(self, *, file: TextIO | None = None, stderr: bool = False, **options: Any) -> None:
        file = file or (sys.stderr if stderr else sys.stdout)
        super().__init__(file=getattr(file, "styled", file), highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)
