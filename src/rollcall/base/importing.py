"""Imports large libraries quietly, and imports what a run file names as ``module:name``."""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn off the garbage collector while the block runs. Otherwise its scans of the loaded modules take a quarter of the time of an
    import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def calm_transformers() -> None:
    """Turn off the progress bars and advice that transformers prints."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()  # the line above turns these off too, but users need them for downloads, which take minutes


def load_named(path: str, *, key: str, what: str, example: str) -> Any:
    """Import ``module:name``, where ``what`` is "function" or "class". Raises a ValueError that explains what is wrong.

    This module imports only the standard library, because processes that run user code must start fast.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{key}={path!r} does not have the form module:{what}; write for example {example}")
    try:
        target: Any = importlib.import_module(module_name)
    except BaseException as error:  # noqa: BLE001 - a module may raise anything, even SystemExit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if module_name.endswith(".py"):
            raise ValueError(f"{key}={path!r}: {module_name} is a file; write {module_name[:-3]}:{attribute}") from None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{key}={path!r}: there is no module {missing!r}; run the command from the directory that contains it, or install it"
            ) from None
        raise ValueError(f"{key}={path!r}: importing {module_name} failed\n{traceback.format_exc()}") from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if callable(getattr(target, name, None)) and not name.startswith("_")]
            raise ValueError(
                f"{key}={path!r}: module {module_name!r} has no {attribute!r}; it defines {', '.join(names[:20]) or f'no {what}'}"
            )
        target = getattr(target, part)
    return target
