"""Tools: schemas from hints and docstrings, and arguments as the hints want them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcall.environments.tools import WrongArguments, check_arguments, tool_of, tools_of_class


def every_type(
    a: int,
    b: float,
    c: str,
    d: bool,
    e: list[int],
    f: dict[str, float],
    g: Literal["x", "y"],
    h: Optional[int] = None,  # noqa: UP045 - as users write it
    i: Union[int, str] = 1,
    j: list[list[str]] | None = None,
    k: tuple[int, str] = (1, ""),
    m: Any = None,
    n: dict = {},  # noqa: B006
    o: int | list[int] = 0,
) -> list[str]:
    """
    Takes everything.

    It has a second paragraph.

    Args:
        a: The first
            in two lines.
        b: With a colon: here.
        c: One of these (choices: ["tea", "coffee"])
        d: D.
        e: E.

        f: After an empty line.
        g: G.
        h: H.
        i: I.
        j: J.
        k: K.
        m: M.
        n: N.
        o: O.

    Returns:
        Nothing that matters.

    Raises:
        ValueError: Never.
    """
    return []


def nothing() -> None:
    """Takes nothing."""


def half_told(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first.
    """
    return a + b


def unhinted(a) -> int:  # noqa: ANN001
    """Add.

    Args:
        a: The first.
    """
    return a


def starred(*args: int) -> int:
    """Add.

    Args:
        args: The numbers.
    """
    return sum(args)


def positional(a: int, /) -> int:
    """Add.

    Args:
        a: The first.
    """
    return a


def unknown_hint(a: Nowhere) -> int:  # noqa: F821 # pyright: ignore
    """Add.

    Args:
        a: The first.
    """
    return 1


class Base:
    def reset(self) -> None: ...

    def get_reward(self) -> float: ...

    def inherited(self, a: int) -> int:
        """From the base.

        Args:
            a: A number.
        """
        return a


class Game(Base):
    colour = "red"

    async def move(self) -> str:
        """Move."""
        return ""

    @classmethod
    def rules(cls) -> str:
        """The rules."""
        return ""

    @property
    def board(self) -> str:
        return ""

    @staticmethod
    def help(about: str) -> str:
        """Help.

        Args:
            about: What.
        """
        return about

    @functools.cache  # noqa: B019 - as users write it
    def look(self, where: str) -> str:
        """Look.

        Args:
            where: Where.
        """
        return where

    def _secret(self) -> None: ...


@pytest.mark.parametrize("function", [every_type, nothing])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    assert tool_of(function, path="module:function").schema == get_json_schema(function)


def test_the_public_methods_of_a_class_are_its_tools() -> None:
    from transformers.utils import get_json_schema

    tools = tools_of_class(Game, path="module:Game")
    assert list(tools) == ["help", "inherited", "look", "move", "rules"]
    assert [list(tools[name].hints) for name in ("help", "look")] == [["about"], ["where"]]
    assert tools["inherited"].schema == get_json_schema(Game().inherited)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (half_told, "the docstring does not describe argument b; add under `Args:`"),
        (unhinted, "argument a has no type hint; add one, such as a: str"),
        (starred, r"has the parameter \*args: .*name each argument"),
        (positional, "cannot be passed by name; remove the `/`"),
        (unknown_hint, "type hints cannot be read .NameError"),
        (lambda: None, "has no docstring"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_its_name_and_what_to_add(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"module:function.*{why}"):
        tool_of(function, path="module:function")


EVERY_TYPE = tool_of(every_type, path="p")
NEEDED = {"a": 1, "b": 1.5, "c": "tea", "d": True, "e": [], "f": {}, "g": "x"}


@pytest.mark.parametrize(
    ("name", "given_value", "taken"),
    [
        ("a", "3", 3), ("a", 3.0, 3), ("a", " -3 ", -3), ("b", 2, 2.0), ("b", "2.5", 2.5), ("d", "true", True), ("d", "False", False),
        ("e", "[1, 2]", [1, 2]), ("e", ["1", 2.0], [1, 2]), ("f", '{"x": "1"}', {"x": 1.0}), ("h", None, None), ("h", "4", 4),
        ("i", "4", "4"), ("i", 4, 4), ("j", [["a"]], [["a"]]), ("k", ["1", "b"], (1, "b")), ("m", {"any": [1]}, {"any": [1]}),
        ("n", {"a": 1}, {"a": 1}), ("o", "[1]", [1]), ("o", "7", 7),
    ],
)  # fmt: skip
def test_arguments_become_what_the_hints_want(name: str, given_value: Any, taken: Any) -> None:
    found = check_arguments(EVERY_TYPE, NEEDED | {name: given_value})
    assert found[name] == taken and type(found[name]) is type(taken)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("a", "three"), ("a", 3.5), ("a", True), ("a", None), ("a", [1]), ("a", "9" * 5000), ("a", float("inf")), ("b", "nan"), ("b", 10**400),
        ("c", "beer"), ("c", None), ("d", 1), ("d", "yes"), ("e", {}), ("e", [[1]]), ("e", "[1"), ("f", []), ("g", "z"), ("k", [1]),
        ("e", "[" * 100_000), ("h", "x"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_told_to_the_model(name: str, wrong: Any) -> None:
    with pytest.raises(WrongArguments, match=f"every_type: {name} is .*; it must be"):
        check_arguments(EVERY_TYPE, NEEDED | {name: wrong})


def test_missing_and_unknown_arguments_are_named() -> None:
    tool = EVERY_TYPE
    with pytest.raises(WrongArguments, match="every_type needs a, g; call it as every_type.a: integer, b: number"):
        check_arguments(tool, {name: value for name, value in NEEDED.items() if name not in "ag"})
    with pytest.raises(WrongArguments, match="has no argument 'z'; it takes a, b"):
        check_arguments(tool, NEEDED | {"z": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefghijkmno"), JSON))
def test_whatever_a_model_gives_is_taken_or_told(arguments: dict[str, Any]) -> None:
    try:
        found = check_arguments(EVERY_TYPE, NEEDED | arguments)
    except WrongArguments:
        return
    assert type(found["a"]) is int and type(found["b"]) is float and type(found["d"]) is bool
