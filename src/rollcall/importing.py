"""Imports of large libraries, and what they print."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which would scan the loaded modules again and again: a quarter of an import's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def calm_transformers() -> None:
    """No bars and no advice of transformers, which speak to others."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()  # the line above turns these off too, and a download takes minutes
