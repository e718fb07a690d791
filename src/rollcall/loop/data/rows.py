"""Reads rows as Python objects, numbered from 1, from a JSONL or Parquet file, a dataset (``hub:openai/gsm8k``, ``hub:./my_dataset``)
or a built-in task.

Files may come from a hub, so a row larger than ``MAX_ROW_BYTES`` is refused before it is parsed. Every error names the file and the row.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rollcall.base.errors import in_one_line
from rollcall.base.wait import is_silent
from rollcall.config import DataSection
from rollcall.config.checks import HUB, is_hub
from rollcall.loop.data.arithmetic import arithmetic
from rollcall.loop.data.columns import ColumnError, DataError, check_texts, listed, unique_keys

NO_DATA = "builtin:environment"  # the environment provides the tasks
MAX_ROW_BYTES = 1 << 26  # ten times the size of a prompt with a million tokens
_ROWS_PER_READ = 16  # for Parquet, where a 1 kB file can contain a string of megabytes that Arrow copies for every row
_UNPACKED_BYTES, _UNPACKED_TIMES = 1 << 31, 64  # a Parquet file may unpack to this, or to this many times its own size
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row as stored in the file."""

    where: str  # "train.jsonl, row 7"
    default_id: str
    columns: dict[str, Any]


def read_rows(source: str, *, split: Split = "train") -> Iterator[Row]:
    """Read the rows of a file or a built-in task, unchanged."""
    if source == "builtin:arithmetic":
        for number, columns in enumerate(arithmetic(split=split), start=1):
            yield Row(f"{source}, row {number}", f"arithmetic-{split}:{number}", columns)
        return
    if source.startswith("builtin:"):
        raise DataError(f"{source} is not a built-in task; the built-in tasks are builtin:arithmetic and {NO_DATA}")
    path = Path(source)
    if path.is_dir():
        found = ", ".join(sorted(each.name for each in path.iterdir() if each.suffix in READERS)) or "no data file"
        raise DataError(f"{source} is a directory; name a file in it (it contains {found})")
    if path.suffix not in READERS:
        raise DataError(f"{source} is not a data file: the name must end in .jsonl, .json (JSON lines) or .parquet")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would block, and a device has no end
            raise DataError(f"data file {source} is a pipe or a device; write the rows to a regular file")
        for number, columns in READERS[path.suffix](path):
            row = Row(f"{source}, row {number}", f"{path.stem}:{number}", columns)
            _check_columns(row)
            yield row
    except FileNotFoundError:
        raise DataError(
            f"data file {source} does not exist; `rollcall data arithmetic --out DIR` creates a small one"
        ) from None
    except OSError as error:
        raise DataError(f"data file {source} cannot be read: {error}") from None


def section_rows(source: str, *, data: DataSection, split: Split) -> Iterator[Row]:
    """Read the rows that the data section selects, and rename their columns as ``data.columns`` says."""
    rows = _dataset_rows(source, data=data, split=split) if is_hub(source) else read_rows(source, split=split)
    for row in rows:
        yield replace(row, columns=_renamed(row, data.columns)) if data.columns else row


def _renamed(row: Row, names: Mapping[str, str]) -> dict[str, Any]:
    """Rename a row's columns. ``names`` maps a column in the data to its new name."""
    columns = {name: value for name, value in row.columns.items() if name not in names}
    for before, after in names.items():
        if before not in row.columns and after in columns:
            continue  # data.train and data.val may differ, and this row already has the new name
        if before not in row.columns:
            raise DataError(
                f"{row.where} has no column {before!r}, which data.columns renames; its columns are {listed(row.columns)}"
            )
        if after in columns:
            raise DataError(
                f"{row.where} already has a column {after!r}, but data.columns renames {before!r} to the same name; rename the existing "
                f"column as well, for example {after}: {after}_before"
            )
        columns[after] = row.columns[before]
    return columns


def _check_columns(row: Row) -> None:
    for column, value in row.columns.items():
        of_column(row, "a column's name", check_texts, column)
        of_column(row, column, check_texts, value)


def of_column(row: Row, column: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ColumnError as error:
        raise DataError(f"{row.where}: {column} {error}") from None


# Datasets, read with the ``datasets`` library, which is not a core dependency


def _dataset_rows(source: str, *, data: DataSection, split: Split) -> Iterator[Row]:
    """Read the rows of one split. They are downloaded once and then read from the cache."""
    name, part = source.removeprefix(HUB), data.split if split == "train" else data.val_split
    _check_name(name, source)
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise DataError(
            f"{source} needs the datasets library, which is not installed; run: pip install 'rollcall-rl[hub]'"
        ) from None
    hides_bars = is_silent() and not datasets.utils.are_progress_bars_disabled()
    try:
        if hides_bars:
            datasets.disable_progress_bars()
        found = datasets.load_dataset(name, data.subset, split=part)
    except Exception as error:  # noqa: BLE001 - the library raises its own errors for networks, files and names
        raise DataError(
            f"{source} cannot be read (data.subset={data.subset or 'null'}, split {part}): {type(error).__name__}: {in_one_line(error)}"
        ) from error
    finally:
        if hides_bars:
            datasets.enable_progress_bars()
    for number, columns in enumerate(found, start=1):
        row = Row(f"{source} ({part}), row {number}", f"{Path(name).name}-{part}:{number}", dict(columns))
        _check_columns(row)
        yield row


def _check_name(name: str, source: str) -> None:
    """Refuse a name that is neither a named folder nor valid on the hub. For ``..``, the library would read every file below the parent
    folder."""
    from huggingface_hub.utils import validate_repo_id

    try:
        if Path(name).is_dir() and os.path.basename(name.rstrip("/")) not in ("", ".", ".."):
            return
        validate_repo_id(name)
    except (OSError, ValueError):
        raise DataError(
            f"{source} is not the name of a dataset; write OWNER/NAME as on the hub, such as hub:openai/gsm8k, or the dataset's own "
            "folder, such as hub:../my_dataset"
        ) from None


# Files


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            if len(line) > MAX_ROW_BYTES:
                raise DataError(
                    f"{path}, row {number} is larger than {MAX_ROW_BYTES >> 20} MiB; each line must contain one JSON object"
                )
            try:
                columns = json.loads(line, object_pairs_hook=unique_keys)
            except ColumnError as error:
                raise DataError(f"{path}, row {number} has {error}") from None
            except (ValueError, RecursionError) as error:  # RecursionError: from deeply nested lists
                raise DataError(
                    f"{path}, row {number} is not valid JSON: {error}; each line must contain one JSON object"
                ) from None
            if not isinstance(columns, dict):
                raise DataError(
                    f"{path}, row {number} is a {type(columns).__name__}; each line must contain one JSON object, "
                    'such as {"prompt": "12+34=", "answer": "46"}'
                )
            yield number, columns


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number, unpacked = 0, 0
    most = max(_UNPACKED_BYTES, _UNPACKED_TIMES * path.stat().st_size)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if twice := sorted(name for name, count in Counter(file.schema_arrow.names).items() if count > 1):
                raise DataError(f"{path} has the column {twice[0]!r} twice; remove one of them")
            for batch in file.iter_batches(batch_size=_ROWS_PER_READ):
                size = _unpacked_bytes(batch.to_struct_array())
                unpacked += size
                if unpacked > most:
                    raise DataError(
                        f"{path} unpacks to more than {most >> 20:,} MiB by row {number + 1}, because it repeats a long text in many "
                        "rows and each "
                        "row would get its own copy; leave that column out, or put a text that all prompts share in data.system"
                    )
                step = _ROWS_PER_READ if size <= MAX_ROW_BYTES else 1
                for rows in (batch.slice(first, step) for first in range(0, batch.num_rows, step)):
                    if step == 1 and _unpacked_bytes(rows.to_struct_array()) > MAX_ROW_BYTES:
                        raise DataError(
                            f"{path}, row {number + 1} is larger than {MAX_ROW_BYTES >> 20} MiB when unpacked; shorten or remove it"
                        )
                    for cells in zip(*rows.columns, strict=True):
                        number += 1
                        columns = zip(rows.schema.names, cells, strict=True)
                        yield number, {name: _object(cell, f"{path}, row {number}: {name}") for name, cell in columns}
    except DataError:
        raise
    except (pyarrow.ArrowException, MemoryError, ValueError, OverflowError) as error:
        # A file may be damaged in its footer or in any page.
        raise DataError(f"{path} cannot be read past row {number}: {in_one_line(error)}") from None


def _unpacked_bytes(array: Any) -> int:
    """Estimate the minimum memory that the array's Python objects need: 8 bytes per reference, plus each value's own bytes.
    Arrow's ``nbytes`` would count a shared string once, a boolean as a bit and a null as nothing."""
    import pyarrow
    from pyarrow.compute import call_function

    places = 8 * len(array)
    if isinstance(array, pyarrow.ExtensionArray):
        return _unpacked_bytes(array.storage)
    if isinstance(array, pyarrow.DictionaryArray):
        lengths = call_function("binary_length", [array.dictionary]).take(array.indices)
        return places + (call_function("sum", [lengths]).as_py() or 0)
    if isinstance(array, pyarrow.StructArray):
        return places + sum(map(_unpacked_bytes, array.flatten()))
    if isinstance(array, pyarrow.MapArray):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return places + sum(_unpacked_bytes(each.slice(first, last - first)) for each in (array.keys, array.items))
    if array.type.num_fields:  # a list of any kind
        return places + _unpacked_bytes(array.flatten())
    return places + array.nbytes


def _object(cell: Any, where: str) -> Any:
    """Convert an Arrow value to a Python object. Raises ``DataError`` on invalid UTF-8, unknown time zones, and dates that Python cannot
    represent."""
    import pyarrow

    try:
        return cell.as_py()
    except (pyarrow.ArrowException, LookupError, ValueError, OverflowError) as error:
        raise DataError(
            f"{where} has a value that Python cannot represent ({cell.type}): {in_one_line(error)}; convert the column, or leave it out"
        ) from None


READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
