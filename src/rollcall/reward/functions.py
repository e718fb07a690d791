"""The reward functions of the run file: ``f(prompt, completion, answer, metadata) -> float``, and the user's own, which take
some of these by name, may take ``completions`` (a whole group) instead of ``completion``, and may be ``async``.

``build_function`` turns a reward's plain fields into such a function and refuses at once what could never score (a
missing module, a bad pattern). Only the standard library is imported here; math-verify and reasoning-gym come in when
a reward needs them, because the worker process has to start fast.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import math
import operator
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

from rollcall.reward.eval_guard import guarded
from rollcall.reward.math_answer import math_equal

RewardFunction = Callable[[str, str, str, dict[str, Any]], float]
ARGUMENTS = ("prompt", "completion", "answer", "metadata")

PROCESS_TYPES = ("exact", "number", "math", "regex", "countdown", "reasoning_gym", "function")

_EXPECTED = (
    "f(completion, answer) -> float, or f(completions, answer) -> list[float] for a group, each with prompt and metadata too if "
    "you like, each async if you like"
)
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?"  # a minus after a digit or a bracket is a subtraction
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_MAX_EXPRESSION_CHARS = 200
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class RewardLoadError(ValueError):
    """A reward cannot be made ready; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's and how it is called."""

    call: Callable[..., Any]
    names: tuple[str, ...]  # the arguments that it takes by name; empty: the four in their order
    is_batched: bool  # called once for all completions of a group
    is_async: bool

    @property
    def takes_groups(self) -> bool:
        """Whether it gets all completions of a group at once; an async one so that its calls wait together."""
        return self.is_batched or self.is_async

    def __call__(self, prompt: str, completion: str | list[str], answer: str, metadata: dict[str, Any]) -> Any:
        if not self.names:
            return self.call(prompt, completion, answer, metadata)
        given = {
            "prompt": prompt,
            "completion": completion,
            "completions": completion,
            "answer": answer,
            "metadata": metadata,
        }
        return self.call(**{name: given[name] for name in self.names})


def build_function(spec: dict[str, Any]) -> RewardFunction | UserFunction:
    """The function behind a reward's fields, such as ``{"type": "regex", "pattern": "..."}``."""
    kind = spec["type"]
    if kind == "function":
        return load_function(spec["path"]) if spec.get("pickled") is None else _unpickle(spec["path"], spec["pickled"])
    if kind == "regex":
        return _regex(spec["pattern"])
    if kind == "countdown":
        return _countdown(spec["format_score"])
    if kind == "math":
        _import_extra("math_verify", "math-verify", kind)
        # It warns at every process start that its own time limits are off; the pool brings the limit.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    if kind == "reasoning_gym":
        _import_extra("reasoning_gym", "reasoning-gym", kind)
    return {"exact": exact, "number": number, "math": math_equal, "reasoning_gym": reasoning_gym_score}[kind]


def _unpickle(path: str, pickled: bytes) -> UserFunction:
    """A function that was given to ``rollcall.train`` as an object (given.py)."""
    try:
        return user_function(path, pickle.loads(pickled))
    except RewardLoadError:
        raise
    except BaseException:  # noqa: BLE001 - it imports what the function uses, which may raise anything
        raise RewardLoadError(f"path={path!r}: it cannot be made again here\n{traceback.format_exc()}") from None


def load_function(path: str) -> UserFunction:
    """The user's function at ``module:function``."""
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise RewardLoadError(f"path={path!r} is not module:function; write for example my_rewards:score")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise RewardLoadError(
                f"path={path!r}: there is no module {error.name!r}; start from the directory that holds it, or install it"
            ) from None
        raise RewardLoadError(f"path={path!r}: importing {module_name} failed\n{traceback.format_exc()}") from None
    except BaseException:  # noqa: BLE001 - a module may raise anything, SystemExit among it
        raise RewardLoadError(f"path={path!r}: importing {module_name} failed\n{traceback.format_exc()}") from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if callable(getattr(target, name, None)) and not name.startswith("_")]
            raise RewardLoadError(
                f"path={path!r}: module {module_name!r} has no {attribute!r}; it has {', '.join(names[:20]) or 'no function'}"
            )
        target = getattr(target, part)
    if not callable(target):
        raise RewardLoadError(f"path={path!r} is {type(target).__name__}, not a function; give {_EXPECTED}")
    return user_function(path, target)


def user_function(path: str, target: Any) -> UserFunction:
    """How to call it, by its signature; refuses what could never be called as a reward, or never return a number."""
    if inspect.isclass(target):
        raise RewardLoadError(f"path={path!r} is a class; give {_EXPECTED}, or a method of one of its objects")
    called = target
    while isinstance(called, partial):
        called = called.func
    called = called if inspect.isroutine(called) else getattr(type(called), "__call__", called)  # noqa: B004
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise RewardLoadError(
            f"path={path!r} is a generator, which returns no number when it is called; give {_EXPECTED}"
        )
    is_async = inspect.iscoroutinefunction(called)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # written in C, and says nothing of itself
        return UserFunction(target, (), is_batched=False, is_async=is_async)
    names = _named(signature)
    if names is not None:
        if ("completion" in names) == ("completions" in names):
            raise RewardLoadError(
                f"path={path!r} takes {signature}, and a reward takes either completion or completions; give {_EXPECTED}"
            )
        return UserFunction(target, names, is_batched="completions" in names, is_async=is_async)
    try:
        signature.bind("", "", "", {})
    except TypeError as error:
        raise RewardLoadError(
            f"path={path!r} takes {signature}, whose names are not among {', '.join(ARGUMENTS)} and completions, and it cannot "
            f"be called with four arguments either ({error}); give {_EXPECTED}"
        ) from None
    return UserFunction(target, (), is_batched=False, is_async=is_async)


def _named(signature: inspect.Signature) -> tuple[str, ...] | None:
    """The arguments to give by name; None: some that must be given have other names, or no name decides."""
    known: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name in (*ARGUMENTS, "completions") and parameter.kind is not parameter.POSITIONAL_ONLY:
            known.append(name)
        elif parameter.default is parameter.empty:
            return None
    return tuple(known) if known else None


def check_scores(values: Any, *, count: int) -> list[Any]:
    """What a function that takes ``completions`` returned, a value for each; ValueError if it is not."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise ValueError(
            f"returned {_short(values)} ({type(values).__name__}); a reward of completions returns a list of numbers"
        )
    found = list(values)
    if len(found) != count:
        raise ValueError(f"returned {len(found)} scores for {count} completions")
    return found


def check_score(value: Any) -> float:
    """The returned value as a finite float, or ValueError."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {_short(value)} ({type(value).__name__}); a reward returns a number")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"returned {score}; a reward returns a finite number")
    return score


def exact(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the completion, stripped, equals the answer."""
    return float(completion.strip() == _required(answer))


def number(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the last number of the completion equals the answer's: ``"... so 1,200.0 in all"`` and ``"1200"``."""
    wanted = last_number(_required(answer))
    if wanted is None:
        raise ValueError(f"the answer {_short(answer)} has no number in it; check data.answer_key")
    return float(last_number(completion) == wanted)


def last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _regex(pattern: str) -> RewardFunction:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardLoadError(f"pattern={pattern!r} is not a regular expression: {error}") from None

    def regex(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
        return float(compiled.search(completion) is not None)

    return regex


def _countdown(format_score: float) -> RewardFunction:
    def countdown(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
        missing = [key for key in ("numbers", "target") if metadata.get(key) is None]
        if missing:
            raise ValueError(f"the row has no {' and no '.join(missing)}; `rollcall data countdown` makes such rows")
        expression = extract_expression(completion)
        if expression is None:
            return 0.0
        value, used = evaluate(expression)
        solved = value == metadata["target"] and sorted(used) == sorted(metadata["numbers"])
        return 1.0 if solved else format_score

    return countdown


def extract_expression(completion: str) -> str | None:
    """The arithmetic a countdown completion proposes, or None.

    It is looked for in the last ``<answer>`` tag, else in the last line; of the sides of an equation the one with most
    operators is meant: ``24 = (3+5)*3`` and ``(3+5)*3 = 24`` both give ``(3+5)*3``.
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
    if len(text) > _MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(text):
        return False
    try:
        evaluate(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(sign in text for sign in "+-*/")


def evaluate(expression: str) -> tuple[Fraction | None, list[int]]:
    """The exact value (None: a division by zero) and the numbers used, of whole numbers under + - * / and brackets.

    >>> evaluate("(3+5)*3")
    (Fraction(24, 1), [3, 5, 3])
    """
    used: list[int] = []

    def walk(node: ast.expr) -> Fraction | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = walk(node.operand)
            return None if value is None else -value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = walk(node.left), walk(node.right)
            if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
                return None
            return _OPERATORS[type(node.op)](left, right)
        raise ValueError(f"{ast.unparse(node)!r} is not a whole number, + - * / or a bracket")

    return walk(ast.parse(expression.strip(), mode="eval").body), used


def reasoning_gym_score(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """The task's own score of the last ``<answer>`` tag (else of the whole text), cut to [0, 1]."""
    made = metadata.get("reasoning_gym")
    if not isinstance(made, dict) or "task" not in made or "entry" not in made:
        raise ValueError("the row has no column reasoning_gym; `rollcall data reasoning-gym:TASK` makes such rows")
    entry = decode_entry(made["entry"])
    score = _reasoning_gym_scorer(made["task"])
    tagged = last_tagged(completion)
    given = (completion if tagged is None else tagged).strip()
    try:
        with guarded(trusted=_texts_of(entry)):
            value = float(score(answer=given, entry=entry))
    except Exception:  # noqa: BLE001
        # Some scorers raise on text they cannot read, which is a wrong answer; one that cannot score its own
        # reference either has a broken row, and then the error goes on.
        score(answer=entry["answer"], entry=entry)
        return 0.0
    return min(max(value, 0.0), 1.0)


def _texts_of(entry: dict[str, Any]) -> frozenset[str]:
    """Texts of the row, which some scorers evaluate too."""
    metadata = entry.get("metadata")
    values = (entry.get("answer"), *(metadata.values() if isinstance(metadata, dict) else ()))
    return frozenset(value for value in values if isinstance(value, str))


def last_tagged(text: str) -> str | None:
    """What the last ``<answer>...</answer>`` holds; None if there is none."""
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, close) if close >= 0 else -1
    return text[start + len("<answer>") : close] if start >= 0 else None


def encode_entry(entry: dict[str, Any]) -> str:
    """A reasoning-gym entry as JSON. Tuples are marked, because some scorers compare with tuples (arc_agi, rearc)."""

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
        raise ValueError("the row has no answer to compare with; check data.answer_key")
    return answer.strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _import_extra(module: str, package: str, kind: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        raise RewardLoadError(f"type={kind!r} needs {package}, which is not installed; pip install {package}") from None
