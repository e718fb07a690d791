"""The calculator of examples/gsm8k_calculator.yaml, and the rows that show a model how to use it."""

from __future__ import annotations

import pytest

from examples.gsm8k_calculator import Calculator
from examples.gsm8k_calculator_start import parts_of
from rollcall.environments.calls import parse_calls


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("5*12", "60"),
        ("$1,200*15%", "180"),
        ("0.1+0.2", "0.3"),
        ("10/3", "3.3333"),
        ("(3+4)*-2", "-14"),
        ("7/2", "3.5"),
    ],
)
def test_the_calculator_works_out_what_the_questions_write(expression: str, result: str) -> None:
    assert Calculator().calculate(expression) == result


@pytest.mark.parametrize("expression", ["", "1/0", "2**9", "a+1", "True+1", "1e9*1e9", "3 4", "(" * 150, "9" * 300])
def test_what_is_not_arithmetic_is_an_error_that_the_model_reads(expression: str) -> None:
    assert Calculator().calculate(expression) == "error"


def test_marked_calculations_become_calls_as_episodes_have_them() -> None:
    parts = parts_of("How many?", "He has 5*12 = <<5*12=60>>60, so 60-14 = <<60-14=46>>46.\n#### 46")
    assert parts is not None and [text for text, _ in parts] == [
        "Question: How many?\n", 'calculate("5*12")', "\n60\n", 'calculate("60-14")', "\n46\n", "Answer: 46\n",
    ]  # fmt: skip
    assert [is_learnt for _, is_learnt in parts] == [False, True, False, True, False, True]
    (call,) = parse_calls(parts[1][0], call_format="text", tools={"calculate": ("expression",)})
    assert call.arguments == {"expression": "5*12"} and not call.error
    assert parts_of("How many?", "Some <<x=3>>3.\n#### 3") is None
