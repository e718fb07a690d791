"""The run file's reward functions: ``f(prompt, completion, answer, metadata) -> float``.

A user's own function takes some of these arguments by name. It may take ``completions`` (those of a whole group) instead of
``completion``, and it may be ``async``.

``build_function`` turns a reward's plain fields into such a function and refuses a reward that could never score (for
example, because a module is missing). Only the standard library is imported here, because the worker process has to start fast.
math-verify and reasoning-gym are imported when a reward needs them.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rollcall.reward.eval_guard import guarded
from rollcall.reward.math_answer import last_tagged, math_equal
from rollcall.reward.user_function import UserFunction, load_function

RewardFunction = Callable[[str, str, str, dict[str, Any]], float]

LARGEST_SCORE = 1e15  # values computed from rewards, such as squares, stay finite in float32
PROCESS_TYPES = ("exact", "number", "math", "regex", "countdown", "reasoning_gym", "function")

_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?"  # a minus after a digit or a bracket is a subtraction
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def build_function(spec: dict[str, Any]) -> RewardFunction | UserFunction:
    """Build the function for a reward's fields, such as ``{"type": "regex", "pattern": "..."}``."""
    kind = spec["type"]
    if kind == "function":
        return load_function(spec["path"], pickled=spec.get("pickled"))
    if kind == "regex":
        pattern = re.compile(spec["pattern"], re.DOTALL)
        return lambda prompt, completion, answer, metadata: float(pattern.search(completion) is not None)
    if kind == "countdown":
        return _countdown(spec["format_score"])
    if kind == "math":
        importlib.import_module("math_verify")
        # math-verify warns in every process that its own time limits are off. The pool enforces a limit instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    if kind == "reasoning_gym":
        try:
            importlib.import_module("reasoning_gym")
        except ModuleNotFoundError:
            raise ValueError(
                "type='reasoning_gym' needs reasoning-gym, which is not installed; run: pip install reasoning-gym"
            ) from None
    return {"exact": exact, "number": number, "math": math_equal, "reasoning_gym": reasoning_gym_score}[kind]


def check_score(value: Any) -> float:
    """Convert a returned value to a finite float, or raise ValueError."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {_short(value)} ({type(value).__name__}); a reward must return a number")
    if not math.isfinite(score := float(value)):
        raise ValueError(f"returned {score}; a reward must return a finite number")
    if abs(score) > LARGEST_SCORE:
        raise ValueError(f"returned {score:g}; a reward must be between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}")
    return score


def exact(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Return 1 if the stripped completion equals the answer."""
    return float(completion.strip() == _required(answer))


def number(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Return 1 if the completion's last number equals the answer's last number, as in ``"... so 1,200.0 in all"`` and ``"1200"``."""
    wanted = last_number(_required(answer))
    if wanted is None:
        raise ValueError(f"the answer {_short(answer)} contains no number; check data.answer_key")
    return float(last_number(completion) == wanted)


def last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _countdown(format_score: float) -> RewardFunction:
    def countdown(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
        if missing := " and no ".join(key for key in ("numbers", "target") if metadata.get(key) is None):
            raise ValueError(f"the row has no {missing}; `rollcall data countdown` creates rows with both")
        numbers, target = metadata["numbers"], Fraction(metadata["target"])  # may be strings in third-party files
        numbers = sorted(map(Fraction, json.loads(numbers) if isinstance(numbers, str) else numbers))
        expression = extract_expression(completion)
        if expression is None:
            return 0.0
        value, used = evaluate(expression)
        return 1.0 if value == target and sorted(used) == numbers else format_score

    return countdown


def extract_expression(completion: str) -> str | None:
    """Return the arithmetic expression that a countdown completion proposes, or None.

    Look in the last ``<answer>`` tag or, without one, in the last line. From an equation, take the side with the most operators:
    ``24 = (3+5)*3`` and ``(3+5)*3 = 24`` both give ``(3+5)*3``.
    """
    tagged = last_tagged(completion)
    lines = [line for line in (completion if tagged is None else tagged).splitlines() if line.strip()]
    if not lines:
        return None
    line = lines[-1].replace("\N{MULTIPLICATION SIGN}", "*").replace("\N{DIVISION SIGN}", "/")
    sides = [side.rpartition(":")[2].strip(" `$.\t") for side in line.replace("\N{MINUS SIGN}", "-").split("=")]
    well_formed = [side for side in sides if _is_expression(side)]
    return max(well_formed, key=lambda side: sum(side.count(sign) for sign in "+-*/"), default=None)


def _is_expression(text: str) -> bool:
    if len(text) > 200 or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return False
    try:
        evaluate(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(sign in text for sign in "+-*/")


def evaluate(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the exact value (None for a division by zero) and the numbers used so far. Supports integers, + - * / and parentheses.

    >>> evaluate("(3+5)*3")
    (Fraction(24, 1), [3, 5, 3])
    """
    used: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(f"{ast.unparse(node)!r} is not a whole number, + - * / or parentheses")

    try:
        return walk(ast.parse(expression.strip(), mode="eval").body), used
    except ZeroDivisionError:
        return None, used


def reasoning_gym_score(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Return the task's own score for the last ``<answer>`` tag (or the full text), clipped to [0, 1]."""
    made = metadata.get("reasoning_gym")
    if not isinstance(made, dict) or "task" not in made or "entry" not in made:
        raise ValueError(
            "the row has no column reasoning_gym; `rollcall data reasoning-gym:TASK` creates rows with this column"
        )
    entry = decode_entry(made["entry"])
    score = _reasoning_gym_scorer(made["task"])
    tagged = last_tagged(completion)
    given = (completion if tagged is None else tagged).strip()
    # Some scorers also evaluate text from the row.
    known = entry.get("metadata")
    texts = (entry.get("answer"), *(known.values() if isinstance(known, dict) else ()))
    try:
        with guarded(trusted=frozenset(text for text in texts if isinstance(text, str))):
            value = float(score(answer=given, entry=entry))
    except Exception:  # noqa: BLE001
        # Some scorers raise on text that they cannot parse, which is a wrong answer. If the scorer also fails on its own
        # reference answer, the row is broken, and the next line raises the error.
        score(answer=entry["answer"], entry=entry)
        return 0.0
    return min(max(value, 0.0), 1.0)


def encode_entry(entry: dict[str, Any]) -> str:
    """Encode a reasoning-gym entry as JSON. Mark tuples, because some scorers compare with tuples (arc_agi, rearc)."""

    def mark(value: Any) -> Any:
        if isinstance(value, tuple):
            return {"__tuple__": [mark(item) for item in value]}
        if isinstance(value, list):
            return [mark(item) for item in value]
        return {key: mark(item) for key, item in value.items()} if isinstance(value, dict) else value

    return json.dumps(mark(entry))


def decode_entry(text: str) -> dict[str, Any]:
    return json.loads(text, object_hook=lambda item: tuple(item["__tuple__"]) if "__tuple__" in item else item)


@lru_cache(maxsize=16)
def _reasoning_gym_scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def _required(answer: str) -> str:
    if not answer.strip():
        raise ValueError("the row has no answer to compare the completion with; check data.answer_key")
    return answer.strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
