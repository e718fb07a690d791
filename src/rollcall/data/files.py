"""The rows of a JSONL or a Parquet file, numbered from 1, as Python objects.

Files come from hubs: a row larger than ``MAX_ROW_BYTES`` is refused before it becomes objects.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollcall.data.columns import ColumnError, DataError, unique_keys

MAX_ROW_BYTES = 1 << 26  # a prompt of a million tokens has a tenth of it
_ROWS_PER_READ = 16  # of Parquet: a file of a kilobyte can hold a text of megabytes that Arrow copies for every row


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            if len(line) > MAX_ROW_BYTES:
                raise DataError(
                    f"{path}, row {number} has more than {MAX_ROW_BYTES >> 20} MiB; each line holds one JSON object"
                )
            try:
                columns = json.loads(line, object_pairs_hook=unique_keys)
            except ColumnError as error:
                raise DataError(f"{path}, row {number} has {error}") from None
            except RecursionError:
                raise DataError(f"{path}, row {number} has lists or maps too deep in each other to be read") from None
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}, row {number} is not JSON: {error}; each line holds one JSON object") from None
            except ValueError:  # the only other one that json raises
                raise DataError(
                    f"{path}, row {number} has a number too long to be read, of more than {sys.get_int_max_str_digits():,} digits; "
                    "write it as text, in quotes"
                ) from None
            if not isinstance(columns, dict):
                raise DataError(
                    f"{path}, row {number} is a {type(columns).__name__}; each line holds one JSON object, "
                    'such as {"prompt": "12+34=", "answer": "46"}'
                )
            yield number, columns


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for batch in _record_batches(path):
        step = _ROWS_PER_READ if _unpacked_bytes(batch.to_struct_array()) <= MAX_ROW_BYTES else 1
        for first in range(0, batch.num_rows, step):
            rows = batch.slice(first, step)
            if step == 1 and _unpacked_bytes(rows.to_struct_array()) > MAX_ROW_BYTES:
                raise DataError(
                    f"{path}, row {number + 1} has more than {MAX_ROW_BYTES >> 20} MiB when unpacked; shorten it, or leave it out"
                )
            for columns in _objects(rows, path, number):
                number += 1
                yield number, columns


def _record_batches(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if twice := sorted(name for name, count in Counter(file.schema_arrow.names).items() if count > 1):
                raise DataError(f"{path} has the column {twice[0]!r} twice; leave one of them out")
            for batch in file.iter_batches(batch_size=_ROWS_PER_READ):
                yield batch
                number += batch.num_rows
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{path}: this machine has too little memory to read past row {number}: {error}") from None
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        # A damaged file shows itself at its footer or at any page of it.
        where = f"{path} is not a Parquet file" if not number else f"{path} cannot be read past row {number}"
        raise DataError(f"{where}: {_first_line(error)}") from None


def _unpacked_bytes(array: Any) -> int:
    """The least memory that its Python objects take: 8 bytes for each value's place in a list or a map, and the value's own bytes.
    Arrow's ``nbytes`` counts a shared text once, a truth value as a bit and a null as nothing."""
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


def _objects(rows: Any, path: Path, number: int) -> list[dict[str, Any]]:
    """The record batch, which follows row ``number``. Text that is not UTF-8 and dates that Python does not have show themselves
    here."""
    import pyarrow

    faults = (pyarrow.ArrowException, LookupError, ValueError, OverflowError)
    try:
        return rows.to_pylist()
    except faults:
        for place in range(rows.num_rows):
            for name, column in zip(rows.schema.names, rows.columns, strict=True):
                try:
                    column[place].as_py()
                except faults as error:
                    raise DataError(f"{path}, row {number + place + 1}: {name} {_why(column.type, error)}") from None
        raise


def _why(kind: Any, error: Exception) -> str:
    if isinstance(error, LookupError) or "pytz" in str(error):  # with pytz, and without it
        return f"has a time zone that this machine does not know ({kind}); convert the column to UTC"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error}; convert the column, or leave it out"
    return f"has a value that Python cannot hold ({kind}): {_first_line(error)}; correct it, or leave the column out"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
