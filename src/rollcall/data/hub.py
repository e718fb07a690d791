"""Rows of a dataset of the hub, or of a folder laid out as one: ``hub:openai/gsm8k``, ``hub:./my_dataset``.

The ``datasets`` library reads them. It is not among the core dependencies; ``pip install 'rollcall-rl[hub]'`` brings it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rollcall.config.checks import HUB
from rollcall.data.columns import DataError
from rollcall.wait import is_silent


def default_name(source: str, *, split: str) -> str:
    """What the ids of its rows begin with."""
    return f"{Path(source.removeprefix(HUB)).name}-{split}"


def read_dataset(source: str, *, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """The rows of one split, downloaded once and then read from the cache."""
    name = source.removeprefix(HUB)
    _check_name(name, source)
    datasets = _library(source)
    hides_bars = is_silent() and not datasets.utils.are_progress_bars_disabled()
    try:
        if hides_bars:
            datasets.disable_progress_bars()
        found = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # noqa: BLE001 - of the network, of files, of names: the library raises its own of each
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise DataError(
            f"{source} cannot be read (data.subset={subset or 'null'}, split {split}): {type(error).__name__}: {first}"
        ) from error
    finally:
        if hides_bars:
            datasets.enable_progress_bars()
    yield from found


def _check_name(name: str, source: str) -> None:
    """Refuse what is neither a folder by its own name nor a name that the hub accepts: of ``..`` every file below would be read."""
    from huggingface_hub.utils import validate_repo_id

    try:
        if Path(name).is_dir() and os.path.basename(name.rstrip("/")) not in ("", ".", ".."):
            return
        validate_repo_id(name)
    except (OSError, ValueError):
        raise DataError(
            f"{source} names no dataset; write OWNER/NAME as the hub has it, such as hub:openai/gsm8k, or the dataset's own folder, "
            "such as hub:../my_dataset"
        ) from None


def _library(source: str) -> Any:
    try:
        return import_module("datasets")
    except ImportError:
        raise DataError(
            f"{source} needs the datasets library, which is not installed; run: pip install 'rollcall-rl[hub]'"
        ) from None
