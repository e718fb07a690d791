"""Row values: which values are allowed, and how values without a JSON type are written.

A prompt's other columns go to rewards and into the journal as JSON. Dates and times become ISO strings, durations become seconds,
decimals become strings of digits, bytes become base64 strings, and NaN (a gap in pandas) becomes null. Other values are refused; the
error names the column.
"""

from __future__ import annotations

import base64
import datetime
import difflib
import json
import math
import re
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_COLUMNS_SHOWN = 20
# Names that other tools use for these two columns.
_OTHER_NAMES = {
    "answer_key": ("solution", "target", "ground_truth", "label"),
    "prompt_key": ("question", "problem", "instruction", "query", "input", "messages"),
}
MAX_DEPTH = 50  # of nested lists and mappings


class DataError(ValueError):
    """A data file or dataset is wrong or cannot be built; the message says where and what to do."""


class ColumnError(ValueError):
    """A value cannot be used; the message continues a sentence that begins with the name of its column."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its pairs. Refuses a duplicate key, because parsers disagree on which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ColumnError(f"the key {twice[:60]!r} twice in one object; remove one of them")
    return found


def check_texts(value: Any, *, depth: int = 0) -> None:
    """Refuse lone surrogates, which JSON can express but no file or tokenizer accepts, and excessive nesting."""
    if depth > MAX_DEPTH:
        raise ColumnError(f"has lists and maps nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        if half := _HALF_A_PAIR.search(value):
            shown = half[0].encode("unicode_escape").decode()
            raise ColumnError(
                f"contains half a surrogate pair ({shown}), which is not a character; write the whole pair"
            )
    elif isinstance(value, list | tuple):
        for each in value:
            check_texts(each, depth=depth + 1)
    elif isinstance(value, dict):
        for key, each in value.items():
            check_texts(key, depth=depth + 1)
            check_texts(each, depth=depth + 1)


def plain(value: Any) -> Any:
    """Convert the value to one that JSON can write and read back."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ColumnError("is infinite; use a finite number, or leave the column out")
        return None if math.isnan(value) else value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise ColumnError(f"is a {type(value).__name__}, which JSON cannot represent; leave the column out")


def answer_text(value: Any) -> str:
    """Convert an answer to a string, with ``true`` and ``false`` as in JSON. Refuses NaN and infinity."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ColumnError(f"is {value}, which no completion can equal; give the row an answer, or leave the row out")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # a column of integers with gaps is read as floats
    if isinstance(value, str | int | float | Decimal):
        return str(value)
    raise ColumnError(f"is {type(value).__name__} ({str(value)[:60]}); it must be text or a number")


def row_name(value: Any) -> str:
    """Convert a row's id to a string."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ColumnError(f"is {value}; give every row an id, or leave the column out")
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str | int | float | Decimal | uuid.UUID | datetime.date):
        return str(value)
    raise ColumnError(f"is {type(value).__name__} ({str(value)[:60]}); it must be text or a number")


def nearest(key: str, columns: Mapping[str, Any], option: str) -> str:
    """List the existing columns, and suggest the one that the user probably meant by ``key``."""
    names = [name for name in list(columns)[:1000] if len(name) < 60]
    near = [name for name in _OTHER_NAMES.get(option, ()) if name in names]
    near += difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if option == "columns":
        hint = f"rename one of them, for example with data.columns: {{{near[0] if near else 'NAME'}: {key}}}"
    elif near:
        hint = f"did you mean {near[0]!r}? set data.{option}={near[0]}"
    else:
        hint = f"set data.{option} to the right column"
    return f"its columns are {listed(columns)}; {hint}"


def listed(columns: Mapping[str, Any]) -> str:
    listed = [str(name)[:60] for name in list(columns)[:_COLUMNS_SHOWN]]
    listed += [f"{len(columns) - _COLUMNS_SHOWN:,} more"] if len(columns) > _COLUMNS_SHOWN else []
    return ", ".join(listed) or "none"
