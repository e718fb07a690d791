"""A calculator as the only tool, for grade-school maths (examples/gsm8k_calculator.yaml)."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200  # characters of an expression
_LARGEST = 10**15


class Calculator:
    """One episode: a question, any number of calculations, an answer. It keeps nothing between calls."""

    def reset(self) -> None:
        """The row's question is the whole opening."""

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: numbers with + - * / and brackets, such as "12*(3+4)"
        """
        return work_out(expression) or "error"


def work_out(expression: str) -> str | None:
    """The result as text; None: the expression has none."""
    try:
        return _shown(_value(ast.parse(_plain(expression), mode="eval").body))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return None


def _plain(expression: str) -> str:
    """Money and percentages as the questions write them: $1,200 and 15%."""
    if len(expression) > _LONGEST:
        raise ValueError(f"at most {_LONGEST} characters")
    bare = expression.replace(",", "").replace("$", "").strip()
    return re.sub(r"(\d+(?:\.\d+)?)%", r"(\1/100)", bare)


def _value(node: ast.expr) -> Fraction:
    """Exact, so that 0.1+0.2 is 0.3."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub()):
            result = -_value(node.operand)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case _:
            raise ValueError("only numbers, + - * / and brackets")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


def _shown(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.4f}".rstrip("0").rstrip(".")
