"""The base of every section of the run file: known keys, finite numbers, values that do not change, a meaning with each default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

LONGEST_S = 1e9  # seconds; the operating system still accepts a wait of this length


class KeyProblem(ValueError):
    """Of one key of a section: its message follows the key's name."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}{text}")


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _no_yes_for_a_number(cls, data: Any) -> Any:
        """Refuse true where a number is needed (YAML reads `on` and `yes` as true, which passes for 1), and read 1e3, a text in YAML."""
        if not isinstance(data, dict):
            return data
        numbers = [
            key for key, info in cls.model_fields.items() if key in data and _takes_numbers_alone(info.annotation)
        ]
        for key in numbers:
            value = data[key]
            given = value if isinstance(value, list) else [value]
            if any(isinstance(each, bool) for each in given):
                raise KeyProblem(key, f"={str(value).lower()} is yes or no; give a number")
        return {**data, **{key: read_number(data[key]) for key in numbers}}


def _takes_numbers_alone(annotation: Any) -> bool:
    kinds = set(_scalars(annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, str, Any}


def _scalars(annotation: Any) -> Iterator[Any]:
    if args := get_args(annotation):
        for arg in args:
            yield from _scalars(arg)
    else:
        yield annotation


def field(default: Any, meaning: str, **kwargs: Any) -> Any:
    return Field(default, description=meaning, **kwargs)


def read_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text.

    >>> read_number("1e-5"), read_number("one"), read_number([1])
    (1e-05, 'one', [1])
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
