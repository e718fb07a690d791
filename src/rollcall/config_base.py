"""What every section of the run file is: keys that are known, values that do not change, a meaning beside each default."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)


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
