"""Restricts text that a scorer passes to ``eval``, ``exec`` or ``compile`` to plain data and arithmetic.

Some reasoning-gym scorers evaluate the model's text as Python, and so does sympy's parser after its own transformations. Inside
``guarded``, a Python audit hook sees all such text first and refuses everything except literals, lists, names, sums,
products, powers and elementary functions: no attributes, indexing, other calls, f-strings or lambdas. The
scorer gets a ValueError and treats the answer as unreadable.

The hook runs wherever text becomes code, so it covers every scorer and every way to evaluate text. Modules that are imported inside
``guarded`` are compiled from files rather than from the scored text, so they are allowed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Elementary functions, and the calls that sympy's parser writes around numbers and names.
_CALLS = frozenset({
    "Integer", "Float", "Rational", "Symbol", "sqrt", "exp", "log", "ln", "Abs", "sin", "cos", "tan", "cot", "sec", "csc",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
})  # fmt: skip
_SYMBOLS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)


class _State:
    installed = False  # a hook cannot be removed again
    is_on = False
    trusted: frozenset[str] = frozenset()


@contextmanager
def guarded(*, trusted: frozenset[str] = frozenset()) -> Iterator[None]:
    """Check all text that becomes code inside this block, except the ``trusted`` texts."""
    if not _State.installed:
        sys.addaudithook(_hook)
        _State.installed = True
    _State.is_on, _State.trusted = True, trusted
    try:
        yield
    finally:
        _State.is_on, _State.trusted = False, frozenset()


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event != "compile" or not _State.is_on:
        return
    source = args[0]
    if isinstance(source, ast.AST):
        return  # parsed from text that was already checked
    text = bytes(source).decode("utf-8", "replace") if isinstance(source, bytes | bytearray) else source
    if text == "from sympy import *" or text in _State.trusted:  # the former fills the namespace of sympy's parser
        return
    _State.is_on = False  # the check itself compiles code
    try:
        if (not isinstance(text, str) or not is_plain(text)) and not _is_importing():
            raise ValueError("the answer is neither plain data nor arithmetic, so it was not evaluated")
    finally:
        _State.is_on = True


def _is_importing() -> bool:
    """Return whether a module is being imported. An import may compile the module's source, or code such as named tuples. Libraries
    import some modules only on first use."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap" and frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def is_plain(text: str) -> bool:
    """Return whether Python parses this text as plain data or arithmetic.

    >>> [is_plain(text) for text in ("[[1, 'a'], (2.5,)]", "2*(x - 1)**3/7", "sin(x)", "open('x')", "x.y", "9**9**9", "[0]*9")]
    [True, True, True, False, False, False, False]
    """
    if len(text) > 100_000:  # enough for a written-out matrix of 100 by 100 numbers
        return False
    try:
        return _is_plain(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # text that Python cannot parse is never evaluated
        return False


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_is_plain, node.elts))
    return isinstance(node, ast.Constant) or _is_arithmetic(node)


def _is_arithmetic(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float | complex)
        case ast.Name(id=name):
            return not name.startswith("_")
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, _SYMBOLS) and _is_arithmetic(operand)
        case ast.BinOp(left=left, op=op, right=right):
            small = not isinstance(op, ast.Pow) or _is_small(right)
            return isinstance(op, _SYMBOLS) and small and _is_arithmetic(left) and _is_arithmetic(right)
        case ast.Call(func=ast.Name(id="Symbol" | "Float" | "Integer"), args=[ast.Constant()], keywords=[]):
            return True  # how sympy writes a name or a number
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in _CALLS and all(map(_is_arithmetic, args))
        case _:
            return False


def _is_small(exponent: ast.expr) -> bool:
    """Refuse nested powers and huge exponents, which take minutes and gigabytes to compute."""
    for node in ast.walk(exponent):
        if isinstance(node, ast.Pow):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) > 1000:
            return False
    return True
