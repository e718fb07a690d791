"""The base class for every section of the run file. It allows only known keys, and its values cannot change. ``field`` pairs each
default with its description.

The class checks in every section that each number is finite and small enough to be written and read back exactly, and that each string
can be written to a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGEST_INT = 2**53  # above it, JSON readers that use floats lose digits
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-30, 1e9  # 0 is allowed too; results computed from such values stay finite in float32
LONGEST_S = 1e9  # seconds; the operating system still accepts such a long wait
Seconds = Annotated[float, Field(ge=0.001, le=LONGEST_S)]
OptionalCount = Annotated[int | None, Field(ge=1)]
NOT_FOR_FILES = re.compile("[\0\ud800-\udfff]")  # NUL, and lone surrogates, which UTF-8 cannot encode


class KeyProblem(ValueError):
    """A problem with one key in a section; the message begins with the key's name."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _no_yes_for_a_number(cls, data: Any) -> Any:
        """Refuse a boolean where a number belongs: YAML reads `on` and `yes` as true, which Python treats as 1. Also parse 1e3, which
        YAML reads as a string."""
        if not isinstance(data, dict):
            return data
        numbers = [
            key for key, info in cls.model_fields.items() if key in data and _takes_numbers_alone(info.annotation)
        ]
        for key in numbers:
            value = data[key]
            given = value if isinstance(value, list) else [value]
            if any(isinstance(each, bool) for each in given):
                raise KeyProblem(f"{key}={str(value).lower()} is a boolean; use a number")
        return {**data, **{key: read_number(data[key]) for key in numbers}}

    @model_validator(mode="after")
    def _can_be_written(self) -> Any:
        for key, info in type(self).model_fields.items():
            # Numbers in other fields may be passed to the user's own code.
            is_setting = _takes_numbers_alone(info.annotation)
            for where, value in _leaves(getattr(self, key), key):
                _check_leaf(where, value, is_setting=is_setting)
        return self


def _takes_numbers_alone(annotation: Any) -> bool:
    kinds = _scalars(annotation)
    return bool(kinds & {int, float}) and not kinds & {bool, str, Any}


def _scalars(annotation: Any) -> set[Any]:
    args = get_args(annotation)
    return set().union(*map(_scalars, args)) if args else {annotation}


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the scalar values in a field, each with its key. Inner sections check their own values."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield where, key
            yield from _leaves(each, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{where}.{index}")
    elif not isinstance(value, BaseModel):
        yield where, value


def _check_leaf(where: str, value: Any, *, is_setting: bool) -> None:
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise KeyProblem(
            f"{where} is an integer with {value.bit_length()} bits; the largest allowed value is {LARGEST_INT}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise KeyProblem(f"{where}={value} is not finite; use a finite number")
    if is_setting and isinstance(value, float) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        bounds = f"between {SMALLEST_FLOAT:g} and {LARGEST_FLOAT:g}"
        raise KeyProblem(f"{where}={value:g} is out of range; use 0, or a number whose absolute value is {bounds}")
    if (isinstance(value, str) or hasattr(value, "__fspath__")) and NOT_FOR_FILES.search(str(value)):
        raise KeyProblem(
            f"{where} contains a NUL character or half a surrogate pair, which cannot be written to a file; remove it"
        )


def field(default: Any, meaning: str, **kwargs: Any) -> Any:
    return Field(default, description=meaning, **kwargs)


def read_number(value: Any) -> Any:
    """Parse a number that YAML 1.1 reads as a string, such as 1e-5.

    >>> read_number("1e-5"), read_number("one"), read_number([1])
    (1e-05, 'one', [1])
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
