"""Rewards: what each function scores, and that user code which hangs, raises or crashes costs one score only."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored import a_prompt, completions_of, in_a_directory_with

import rollcall
from rollcall.base.types import Completion, Prompt, Score
from rollcall.config import (
    CountdownReward,
    ExactReward,
    FunctionReward,
    NumberReward,
    RegexReward,
    SelfCertaintyReward,
)
from rollcall.process.here import plain_stack
from rollcall.reward.functions import build_function, encode_entry, extract_expression, last_number
from rollcall.reward.math_answer import last_boxed
from rollcall.reward.pool import RewardPool
from rollcall.reward.scorer import Scorer, reward_names
from rollcall.reward.worker import Item, RewardResult

USER_MODULE = """
import os, re, sys, time

def wild(prompt, completion, answer, metadata):
    print("scoring", completion, flush=True)
    if completion == "hang":
        time.sleep(1000)
    if completion == "hang in C":
        re.match(r"(a|aa)+$", "a" * 60 + "b")
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "exit":
        sys.exit(0)
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1.0"
    if completion == "die":
        os._exit(3)
    return float(completion == answer)

def where(prompt, completion, answer, metadata):
    return float(os.getpid())

def loud(prompt, completion, answer, metadata):
    print("x" * 200_000)
    os.write(1, b"y" * 200_000)
    return 1

def slow(prompt, completion, answer, metadata):
    time.sleep(0.2)
    return 1

constant = 3
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pids_of(scorer: Scorer) -> list[int]:
    assert scorer._pool is not None
    return [seat.worker.pid for crew in scorer._pool._crews for seat in crew.seats]


def wait_until_gone(pids: list[int]) -> list[int]:
    end_s = time.monotonic() + 600
    while time.monotonic() < end_s and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def score_one(
    reward: dict[str, Any], *, completion: str, answer: str = "", metadata: dict[str, Any] | None = None
) -> float:
    return build_function(reward)("", completion, answer, metadata or {})


# Functions


@pytest.mark.parametrize(
    ("reward", "num_items"), [(ExactReward(), 1), (NumberReward(), 1), (RegexReward(pattern="4"), 3)]
)
def test_a_reward_that_cannot_hang_gets_a_group_as_one_item(
    reward: Any, num_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    score = RewardPool.score

    def counted(pool: RewardPool, items: list[Item], **given: Any) -> Any:
        asked.append(len(items))
        return score(pool, items, **given)

    monkeypatch.setattr(RewardPool, "score", counted)
    with Scorer([reward], num_workers=1, model_rewards={}) as scorer:
        scores = asyncio.run(scorer.score(a_prompt(), completions_of("46", "none", " 46 ")))
        unanswered = asyncio.run(scorer.score(a_prompt(answer=""), completions_of(*["46"] * 40)))
        asyncio.run(scorer.score(a_prompt(), completions_of(*["46"] * 65)))
        asyncio.run(scorer.score(a_prompt(), completions_of("4" * 40_000, "6" * 40_000)))
    # A larger group is spread over the workers, each completion with its own limit.
    assert asked == [num_items, 40 if num_items > 1 else 1, 65, 2]
    assert [one.value for one in scores] == [1, 0, 1]
    assert [bool(one.errors) for one in unanswered] == [num_items == 1] * 40


def test_exact_compares_stripped_text() -> None:
    assert score_one({"type": "exact"}, completion=" 46\n", answer="46") == 1
    assert score_one({"type": "exact"}, completion="46.", answer="46") == 0


@pytest.mark.parametrize("kind", ["exact", "number", "math"])
def test_a_row_without_an_answer_is_an_error_not_a_zero(kind: str) -> None:
    with pytest.raises(ValueError, match="answer_key"):
        score_one({"type": kind}, completion="46", answer=" ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 1,200.0 in all", "1200"),
        ("12-5", "5"),
        ("x = -5", "-5"),
        ("it costs $18.", "18"),
        ("first 3 then .5", "0.5"),
        ("1,2345", "2345"),
        ("2e3", "2000"),
        ("\N{MINUS SIGN}7", "-7"),
        ("(4)-3", "3"),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str, expected: str) -> None:
    value = last_number(text)
    assert value is not None and value == type(value)(expected)


def test_number_compares_last_numbers_and_gives_zero_without_one() -> None:
    assert score_one({"type": "number"}, completion="7 + 5 = 12.0", answer="#### 12") == 1
    assert score_one({"type": "number"}, completion="no idea", answer="12") == 0
    with pytest.raises(ValueError, match="no number"):
        score_one({"type": "number"}, completion="12", answer="twelve")


@given(st.text())
def test_last_number_reads_any_text(text: str) -> None:
    assert last_number(text) is None or any(map(str.isdigit, text))


def test_number_round_trips_any_integer_with_separators() -> None:
    for value in (0, -1, 999, 1000, -1234567):
        assert last_number(f"it is {value:,}.") == value


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac{3}{4}}", "0.75", 1),
        (r"so $\frac{6}{8}$", r"\frac{3}{4}", 1),
        ("thus 3/4", r"\boxed{\frac34}", 1),
        ("#### 72", "48/2 = 24\n#### 72", 1),
        (r"\boxed{71}", "#### 72", 0),
        (r"\boxed{x^2+1}", "1+x^2", 1),
        (r"\boxed{70} or \boxed{71} or \boxed{72} or \boxed{1}", "72", 0),
        (r"\boxed{(1, 2]}", "(1,2]", 1),
        ("", "72", 0),
    ],
)
def test_math_reads_plain_boxed_and_hash_answers(completion: str, answer: str, expected: float) -> None:
    assert score_one({"type": "math"}, completion=completion, answer=answer) == expected


PLAIN_ANSWERS = [r"x^2+1", r"2\sqrt{3}", "(1,2)", r"\pi", "A", "[0,1)", r"\text{even}", "5", r"\frac{1}{2}"]


@pytest.mark.parametrize(
    "written",
    [
        "{}", "#### {}", "<answer>{}</answer>", r"so \boxed{{{}}}", "I tried 7 and 8.\n{}", "so ${}$", "The answer is {}.",
        "Therefore the final answer is ${}$.", "#### ${}$", "**{}**", "Final Answer: {}", "\\[{}\\]",
        r"<answer>\boxed{{{}}}</answer>", "## Answer:\n\n{}\n",
    ],
)  # fmt: skip
def test_math_reads_an_answer_however_it_is_written(written: str) -> None:
    missed = [a for a in PLAIN_ANSWERS if score_one({"type": "math"}, completion=written.format(a), answer=a) != 1]
    assert missed == []
    assert score_one({"type": "math"}, completion=written.format("41"), answer="14") == 0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"#### \$5", "5", 1),
        ("it costs $18.", "18", 1),
        ("#### 72 apples", "72", 1),
        ("so the length is 2\\sqrt{3}", "2\\sqrt{3}", 1),
        ("Answer: 46 dollars.\nI hope this helps", "46", 1),
        ("No solution", r"\text{no solution}", 1),
        ("x = 5 or x = 6", "x=5, x=6", 1),
        ("2 sqrt(3)", r"2\sqrt{3}", 1),
        (r"2\sqrt{3}", "2", 0),
        ("so the length is 2\\sqrt{3}", "2", 0),
        (r"72 and so \boxed{71}", "72", 0),
        ("#### 71, not\n72", "72", 0),
        ("<answer>5</answer> or 6", "6", 0),
        ("the answer is 72. Wait, #### 71", "72", 0),
        ("5 or 6", "6", 0),
        ("(0,1]", "[0,1)", 0),
        ("B", "A", 0),
        ("veen", r"\text{even}", 0),
        ("Pairs", "Paris", 0),
        (r"\boxed{}", "72", 0),
        ("2 + 3i", "3", 0),
        (r"\boxed{5!}", "120", 1),
        (r"\boxed{5!}", "5", 0),
        ("#### 120", "5!", 1),
        ("<answer>5</answer>", "5!", 0),
        ("The answer is 5!", "5", 1),
        ("so it is **5**!", "5", 1),
    ],
)
def test_math_takes_the_final_answer_and_nothing_before_it(completion: str, answer: str, expected: float) -> None:
    assert score_one({"type": "math"}, completion=completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("answer", "same", "different"),
    [
        ("ABC", ("abc", r"\text{ABC}", "The answer is ABC."), ("CAB", "$CAB$", r"\boxed{BCA}")),
        ("no", ("No.", "**NO**", "The answer is no"), ("on", "no solution")),
        ("Yes", ("YES!", "yes"), ("no",)),
        ("C", ("so it is C", "(c)", r"\boxed{\text{(C)}}"), ("B",)),
        ("abc", ("abc",), ("cab",)),
        ("pi", (r"\pi", "PI"), ("ip", "3")),
    ],
)
def test_math_compares_letters_as_text(answer: str, same: tuple[str, ...], different: tuple[str, ...]) -> None:
    _compare(answer, same, different)


@pytest.mark.parametrize(
    ("answer", "same", "different"),
    [
        ("xy", ("yx", r"x \cdot y"), ("x", "yz")),
        ("$ab$", ("ba", "$ba$"), ("a",)),
        ("2ab", ("2ba", "$2ba$"), ("2", "2a", "ab")),
        ("2m + 3h", ("3h+2m",), ("2m + 3", "2m+3t")),
    ],
)
def test_math_still_reads_products(answer: str, same: tuple[str, ...], different: tuple[str, ...]) -> None:
    _compare(answer, same, different)


@pytest.mark.parametrize(
    ("answer", "same", "different"),
    [
        (
            "10 m",
            ("10", "10m", "10 meters", r"10\,\text{m}", "It is 10 m."),
            ("10 cm", r"$10\text{ cm}$", "10 m^2", "9 m"),
        ),
        ("10", ("10 m", "10m", r"10\text{ cm}", "10 apples"), ("11 m",)),
        ("10m", ("10 m", "10 metres"), ("10 km", "10n")),
        (r"25\text{ cm}^2", ("25 cm²", "25 square centimeters", "25 cm^{2}", "25"), ("25 cm", "25 m^2")),
        ("60 mph", ("60 miles per hour", "60 mi/h"), ("60 km/h", "60 miles")),
        (r"\$5", ("5 dollars", "$5", "5"), ("5 cents", r"5\text{ euros}")),
        ("5%", ("0.05", r"5\%", "5"), ("6%",)),
        (r"90^\circ", ("90 degrees", "90°", "90"), ("90 radians",)),
        (r"\frac{1}{2} kg", ("0.5 kg", "x = 1/2 kg"), ("0.5 g",)),
        ("3:30 pm", ("3:30 PM",), ("3:30 am",)),
        ("72 apples", ("72", "72 apples in all", r"72\text{ apples}"), ("71 apples",)),
        ("5 million", (r"5\text{ million}", "5,000,000", "5 million people"), ("5", "5 billion")),
        ("60", ("5 dozen", "60 eggs"), ("5", "6 dozen")),
        ("€5", ("5 euros", "5"), ("£5",)),
        ("5", ("£5",), ()),
        ("20 °C", (r"20^\circ C", r"20^{\circ}\text{C}", "20 degrees Celsius"), ("20 °F",)),
        ("1 1/2", ("1.5", "1 1/2 hours"), ("11/2",)),
        ("June 20", ("June 20.",), ("July 20",)),
        ("7", ("3 + 4 = 7 dollars", r"\$3 + \$4 = \$7", "After 3 days she has 7 dollars"), ()),
    ],
)
def test_math_compares_units(answer: str, same: tuple[str, ...], different: tuple[str, ...]) -> None:
    _compare(answer, same, different)


@pytest.mark.parametrize(
    ("answer", "same", "different"),
    [
        (
            r"30^\circ, 60^\circ, 90^\circ",
            ("30, 60, 90 degrees", r"90^\circ, 60^\circ \text{ and } 30^\circ"),
            (r"31^\circ, 60^\circ, 90^\circ", r"90^\circ"),
        ),
        (r"30^\circ", (), (r"10^\circ, 30^\circ",)),
        ("42", (), (r"7^\circ, 42^\circ", r"\$7 or \$42", "x = 1 cm, y = 42 cm", "x = 1 and y = 42 cm")),
        ("42 cm", ("x = 42 cm",), ("x=7, y=42 cm",)),
        ("x = 3 cm, y = 4 cm", ("x=3 cm, y=4 cm",), ("x = 5 cm, y = 4 cm",)),
        ("a=3, b=4 m", (), ("a=5, b=4 m",)),
        ("3 hours 20 minutes", ("3 h and 20 min",), ("4 hours 20 minutes", "20 hours 3 minutes", "20", "3 feet 20 inches")),
        ("320", (), ("3 hours 20 minutes",)),
        ("5 dollars and 20 cents", (), ("7 dollars and 20 cents",)),
        ("3 to 5 hours", ("it takes 3 to 5 h",), ("2 to 5 hours", "5 hours", "3 to 5 minutes")),
        (r"\$42", (), ("7 or 42 dollars",)),
    ],
)  # fmt: skip
def test_math_compares_each_number_of_a_list_with_units(
    answer: str, same: tuple[str, ...], different: tuple[str, ...]
) -> None:
    _compare(answer, same, different)


@pytest.mark.parametrize(
    ("answer", "different"),
    [("A", ("not A", "B, not A")), ("No", ("Yes, not No",)), ("42", ("The answer is not 42.",))],
)
def test_math_takes_no_answer_that_is_denied(answer: str, different: tuple[str, ...]) -> None:
    _compare(answer, (), different)


@pytest.mark.parametrize(
    ("answer", "same", "different"),
    [
        (
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"it is \begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
            (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}",),
        ),
        (r"\begin{bmatrix} 1 & 2 \end{bmatrix}", (), (r"\begin{bmatrix} 1 & 3 \end{bmatrix}",)),
        (r"\begin{cases} 1 & x > 0 \\ 2 \end{cases}", (r"\begin{cases}1&x>0\\2\end{cases}",), (r"\begin{cases} 1 \end{cases}",)),
        (r"\angle ABC", (r"$\angle ABC$", "ABC"), (r"\angle BCA",)),
        (r"$\triangle ABC$", (r"\triangle ABC",), (r"\triangle BCD",)),
    ],
)  # fmt: skip
def test_math_reads_what_latex_writes_with_spaces(
    answer: str, same: tuple[str, ...], different: tuple[str, ...]
) -> None:
    _compare(answer, same, different)


def _compare(answer: str, same: tuple[str, ...], different: tuple[str, ...]) -> None:
    scored = {text: score_one({"type": "math"}, completion=text, answer=answer) for text in (answer, *same, *different)}
    assert scored == dict.fromkeys((answer, *same), 1.0) | dict.fromkeys(different, 0.0)


def test_math_is_as_generous_as_math_verify_on_what_that_reads() -> None:
    from math_verify import parse, verify

    rows = [
        (r"so $\frac{6}{8}$", r"$\frac{3}{4}$"), (r"The final answer is $x+1$. I hope it is correct.", "$1+x$"),
        ("the answer is 1,200", "$1200$"), (r"\boxed{\{1,2\}}", r"$\{2,1\}$"), (r"$x=3$", "$3$"), ("it is 0.5", r"$\frac12$"),
        (r"\boxed{10\%}", r"$10\%$"),
    ]  # fmt: skip
    for completion, answer in rows:
        assert verify(parse(answer), parse(completion)), completion
        assert score_one({"type": "math"}, completion=completion, answer=answer) == 1, completion


def test_the_last_complete_box_counts() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert last_boxed("none") is None


def test_regex_is_searched_over_lines() -> None:
    tagged = {"type": "regex", "pattern": "<think>.*</think>"}
    assert score_one(tagged, completion="<think>a\nb</think> 4") == 1
    assert score_one(tagged, completion="4") == 0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>(3+5)*3</answer>", 1.0),
        ("I think\n<answer>24 = (3 + 5) \N{MULTIPLICATION SIGN} 3</answer>", 1.0),
        ("<answer>1+1</answer> no: <answer>(3+5)*3 = 24</answer>", 1.0),
        ("let me see\nAnswer: (3+5)*3 = 24.", 1.0),
        ("<answer>(3+5)+3</answer>", 0.1),
        ("<answer>(3+5)*3+0</answer>", 0.1),
        ("<answer>12+12</answer>", 0.1),
        ("<answer>5/(3-3)</answer>", 0.1),
        ("<answer>24</answer>", 0.0),
        ("<answer>3**5**3**5</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>3+5+</answer>", 0.0),
        ("<answer>03+5*3</answer>", 0.0),
        ("<answer>" + "(" * 150 + "3" + "</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_wants_each_number_once_and_the_target(completion: str, expected: float) -> None:
    row = {"numbers": [3, 3, 5], "target": 24}
    assert score_one({"type": "countdown", "format_score": 0.1}, completion=completion, metadata=row) == expected


@given(st.text(alphabet="0123456789+-*/()= \n.<answer>/"))
def test_countdown_extraction_survives_any_text(text: str) -> None:
    assert (extract_expression(text) or "") in text


@pytest.mark.parametrize("row", [{"numbers": ["3", 5.0, 2], "target": "30"}, {"numbers": "[3, 5, 2]", "target": 30.0}])
def test_countdown_reads_numbers_that_are_written_as_text(row: dict[str, Any]) -> None:
    assert score_one({"type": "countdown", "format_score": 0.1}, completion="3*5*2", metadata=row) == 1.0
    assert score_one({"type": "countdown", "format_score": 0.1}, completion="3*5+15", metadata=row) == 0.1


def test_countdown_on_a_row_without_numbers_says_so() -> None:
    with pytest.raises(ValueError, match="numbers and no target"):
        score_one({"type": "countdown", "format_score": 0.1}, completion="1+1")


def test_reasoning_gym_scores_its_reference_and_gives_zero_where_its_scorer_raises() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for task in ("chain_sum", "prime_factorization"):
        entry = reasoning_gym.create_dataset(task, size=1, seed=4)[0]
        row = {"reasoning_gym": {"task": task, "entry": encode_entry(entry)}}
        kind = {"type": "reasoning_gym"}
        assert score_one(kind, completion=f"well <answer>{entry['answer']}</answer>", metadata=row) == 1
        assert score_one(kind, completion="<answer>zz</answer>", metadata=row) < 0.1
    with pytest.raises(ValueError, match="reasoning_gym"):
        score_one({"type": "reasoning_gym"}, completion="4")


# Loading


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "reward.1.path='no_such_module:f': there is no module 'no_such_module'"),
        ("my_rewards:wlid", "has no 'wlid'; it defines loud, slow, where, wild"),
        ("my_rewards:constant", "is int, not a function"),
        ("my_rewards", "does not have the form module:function"),
        ("broken:f", "ZeroDivisionError"),
        ("needs_more:f", "No module named 'not_there_either'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needs_more.py").write_text("import not_there_either\n")
    with pytest.raises(ValueError) as caught:
        Scorer([ExactReward(), FunctionReward(path=path)], num_workers=1, model_rewards={})
    assert message in str(caught.value)


def test_a_module_that_ends_its_process_when_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_directory_with("import os\nos._exit(7)\n", path=tmp_path, monkeypatch=monkeypatch)
    with pytest.raises(RuntimeError, match="exit status 7"):
        Scorer([FunctionReward(path="my_rewards:f")], num_workers=2, model_rewards={})


def test_a_module_that_hangs_when_imported_is_given_up_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_directory_with("import time\ntime.sleep(1000)\n", path=tmp_path, monkeypatch=monkeypatch)
    monkeypatch.setattr("rollcall.reward.pool.START_TIMEOUT_S", 2)
    with pytest.raises(RuntimeError, match=r"(?s)not ready within 2 s.*my_rewards.py"):
        RewardPool({0: {"type": "function", "path": "my_rewards:f"}}, num_workers=1)


# The pool and the scorer


def test_one_session_survives_rewards_that_hang_raise_return_nan_and_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    rewards = [FunctionReward(path="my_rewards:wild", timeout_s=3.0), ExactReward(weight=0.5)]
    texts = ("46", "hang", "raise", "nan", "die", "text", "exit", "hang in C", "46", "45")

    async def score_three_groups(scorer: Scorer) -> list[tuple[Score, ...]]:
        groups = (completions_of("46", "45"), completions_of(*texts), completions_of("46", "45"))
        return await asyncio.gather(*(scorer.score(a_prompt(), group) for group in groups))

    with Scorer(rewards, num_workers=2, model_rewards={}) as scorer:
        results = asyncio.run(score_three_groups(scorer))
        pids = pids_of(scorer)
    assert [score.value for score in results[0]] == [1.5, 0.0]
    assert [score.parts["wild"] for score in results[1]] == [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    kinds = [score.errors.get("wild", "").partition(":")[0] for score in results[1]]
    assert kinds == ["", "hung", "raised", "nan", "died", "nan", "raised", "hung", "", ""]
    raised = next(failure for failure in scorer.failures if "KeyError" in failure.why)
    assert (raised.prompt_id, raised.completion, raised.reward) == ("sums:7", "raise", "wild")
    assert "my_rewards.py" in raised.why and "worker.py" not in raised.why
    assert results[1][2].errors["wild"] == "raised: KeyError: 'no such thing'"
    assert results[1][1].errors["wild"] == "hung: no score within 3 s"
    assert any("my_rewards.py" in failure.why for failure in scorer.failures if failure.completion == "hang in C")
    assert any("exit status 3" in failure.why for failure in scorer.failures if failure.kind == "died")
    assert not wait_until_gone(pids)


def test_many_failures_are_counted_but_only_a_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    with Scorer([FunctionReward(path="my_rewards:wild")], num_workers=1, model_rewards={}) as scorer:
        scores = asyncio.run(scorer.score(a_prompt(), completions_of(*["raise"] * 50)))
    assert len(scores) == 50 and scorer.num_failed["wild", "raised"] == 50
    assert len(scorer.failures) == 3


def test_replaced_and_closed_workers_leave_no_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    with Scorer([FunctionReward(path="my_rewards:wild")], num_workers=2, model_rewards={}) as scorer:
        asyncio.run(scorer.score(a_prompt(), completions_of(*["die"] * 6)))
        assert scorer.num_failed["wild", "died"] == 6
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_that_cannot_be_started_leaves_neither_files_nor_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))

    def full(*args: Any, **keys: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("rollcall.reward.pool.spawn", full)
    for _ in range(3):
        with pytest.raises(OSError, match="no more processes"):
            Scorer([ExactReward()], num_workers=1, model_rewards={})
    assert len(os.listdir("/proc/self/fd")) == before
    assert not os.listdir(tmp_path)


def test_a_reward_that_prints_a_lot_does_not_disturb_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    with Scorer([FunctionReward(path="my_rewards:loud")], num_workers=1, model_rewards={}) as scorer:
        assert [score.value for score in asyncio.run(scorer.score(a_prompt(), completions_of("a", "b")))] == [1, 1]
    captured = capfd.readouterr()
    assert "yyy" in captured.err and captured.out == ""


def test_texts_larger_than_a_pipe_go_through() -> None:
    long = "z" * 3_000_000
    with Scorer([ExactReward()], num_workers=2, model_rewards={}) as scorer:
        scores = asyncio.run(scorer.score(a_prompt(answer=long), completions_of(long, long + "y", long)))
    assert [score.value for score in scores] == [1, 0, 1]


def test_a_worker_that_is_stopped_in_the_middle_of_a_large_message_is_replaced() -> None:
    long = "z" * 1_000_000

    async def score(pool: RewardPool) -> list[tuple[str, float | None]]:
        items = [Item(0, "", text, long, {}) for text in ("a", long)]
        answers = await pool.score(items, timeout_s=3.0)
        return [(answer.kind, answer.value) for (answer,) in answers]

    with RewardPool({0: {"type": "exact"}}, num_workers=1) as pool:
        (frozen,) = (seat.worker.pid for crew in pool._crews for seat in crew.seats)
        os.kill(frozen, signal.SIGSTOP)
        assert asyncio.run(score(pool)) == [("hung", 0.0), ("", 1.0)]
        assert not is_running(frozen)


def test_an_item_over_its_limit_is_an_error_even_if_nobody_looked_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)

    async def score(pool: RewardPool) -> RewardResult:
        scoring = pool.score([Item(0, "", "", "", {})], timeout_s=0.1)
        await asyncio.sleep(0)
        time.sleep(1.0)  # this process is busy
        return (await scoring)[0][0]

    with RewardPool({0: {"type": "function", "path": "my_rewards:slow"}}, num_workers=1) as pool:
        answer = asyncio.run(score(pool))
    assert answer.kind == "hung" and "the limit is timeout_s=0.1" in answer.why


def test_the_limit_is_for_each_item_and_not_for_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    reward = FunctionReward(path="my_rewards:slow", timeout_s=3.5)
    with Scorer([reward], num_workers=1, model_rewards={}) as scorer:
        scores = asyncio.run(scorer.score(a_prompt(), completions_of(*"abcdefghijabcdefghij")))
    assert [score.value for score in scores] == [1.0] * 20


def test_the_work_is_spread_over_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    with Scorer([FunctionReward(path="my_rewards:where")], num_workers=3, model_rewards={}) as scorer:
        places, give_up_s = set[float](), time.monotonic() + 600
        while len(places) < 3 and time.monotonic() < give_up_s:  # until all workers are ready
            scores = asyncio.run(scorer.score(a_prompt(), completions_of(*"abcdefghi")))
            places = {score.value for score in scores}
        assert places == set(map(float, pids_of(scorer)))


def test_a_group_that_is_given_up_leaves_the_others_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)

    async def give_up(scorer: Scorer) -> tuple[Score, ...]:
        first = asyncio.create_task(scorer.score(a_prompt(), completions_of(*"abcdefgh")))
        second = asyncio.create_task(scorer.score(a_prompt(), completions_of("a", "b")))
        await asyncio.sleep(0.3)
        first.cancel()
        return await second

    with Scorer([FunctionReward(path="my_rewards:slow")], num_workers=1, model_rewards={}) as scorer:
        assert [score.value for score in asyncio.run(give_up(scorer))] == [1.0, 1.0]
        assert not scorer.num_failed


def test_no_completions_have_no_scores() -> None:
    with Scorer([ExactReward()], num_workers=1, model_rewards={}) as scorer:
        assert asyncio.run(scorer.score(a_prompt(), ())) == ()


def test_a_worker_imports_neither_torch_nor_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "import sys\ndef f(p, c, a, m):\n    assert not {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)\n    return 1\n"
    in_a_directory_with(module, path=tmp_path, monkeypatch=monkeypatch)
    rewards = [FunctionReward(path="my_rewards:f"), RegexReward(pattern="a"), CountdownReward(), NumberReward()]
    with Scorer(rewards, num_workers=1, model_rewards={}) as scorer:
        (score,) = asyncio.run(scorer.score(a_prompt(metadata={"numbers": [1], "target": 1}), completions_of("a")))
    assert score.errors == {} and score.parts["f"] == 1


def test_workers_end_when_their_parent_is_killed_even_inside_c_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_directory_with(USER_MODULE, path=tmp_path, monkeypatch=monkeypatch)
    parent_code = (
        "import asyncio, json, os\n"
        "from rollcall.reward.pool import RewardPool\n"
        "from rollcall.reward.worker import Item\n"
        "pool = RewardPool({0: {'type': 'function', 'path': 'my_rewards:wild'}}, num_workers=2)\n"
        "async def main():\n"
        "    scoring = pool.score([Item(0, '', 'hang in C', '', {})], timeout_s=1000)\n"
        "    await asyncio.sleep(0.5)\n"
        "    print(json.dumps([seat.worker.pid for crew in pool._crews for seat in crew.seats]), flush=True)\n"
        "    await scoring\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(rollcall.__file__).resolve().parents[1])}
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 2 and all(map(is_running, pids))
    parent.kill()
    parent.communicate()
    assert not wait_until_gone(pids)


def test_what_a_hanging_reward_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = (
        "import subprocess, pathlib, time\n"
        "def f(p, c, a, m):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    pathlib.Path('child').write_text(str(child.pid))\n"
        "    time.sleep(1000)\n"
    )
    in_a_directory_with(module, path=tmp_path, monkeypatch=monkeypatch)
    with Scorer([FunctionReward(path="my_rewards:f", timeout_s=2)], num_workers=1, model_rewards={}) as scorer:
        (score,) = asyncio.run(scorer.score(a_prompt(), completions_of("a")))
    assert score.errors["f"].startswith("hung")
    assert not wait_until_gone([int((tmp_path / "child").read_text())])


def test_model_rewards_are_called_here_and_their_failures_are_counted() -> None:
    def certain(prompt: Prompt, completions: tuple[Completion, ...]) -> list[float]:
        if prompt.answer == "boom":
            raise RuntimeError("out of memory")
        return [float("inf") if completion.text == "inf" else 2.0 for completion in completions]

    rewards = [ExactReward(), SelfCertaintyReward(weight=0.25)]
    with Scorer(rewards, num_workers=1, model_rewards={1: certain}) as scorer:
        good, bad = asyncio.run(scorer.score(a_prompt(), completions_of("46", "inf")))
        (boom,) = asyncio.run(scorer.score(a_prompt(answer="boom"), completions_of("boom")))
    assert good.value == 1.5 and good.parts == {"exact": 1.0, "self_certainty": 2.0}
    assert bad.value == 0 and "inf" in bad.errors["self_certainty"]
    assert boom.value == 1.0 and "out of memory" in boom.errors["self_certainty"]
    assert scorer.num_failed == {("self_certainty", "nan"): 1, ("self_certainty", "raised"): 1}


def test_rewards_in_this_process_alone_need_no_worker_and_a_missing_one_is_refused() -> None:
    with Scorer([SelfCertaintyReward()], num_workers=1, model_rewards={0: lambda _, c: [1.0] * len(c)}) as scorer:
        scores = asyncio.run(scorer.score(a_prompt(), completions_of("a", "b")))
        assert [score.value for score in scores] == [1.0, 1.0]
    with pytest.raises(ValueError, match="reward.0"):
        Scorer([SelfCertaintyReward()], num_workers=1, model_rewards={})


def test_repeated_rewards_get_numbered_names() -> None:
    rewards = [RegexReward(pattern="a"), RegexReward(pattern="b"), FunctionReward(path="m.n:exact"), ExactReward()]
    assert reward_names(rewards) == ["regex", "regex#2", "exact", "exact#2"]
    with Scorer(rewards[:2], num_workers=1, model_rewards={}) as scorer:
        (score,) = asyncio.run(scorer.score(a_prompt(), completions_of("b")))
    assert score.parts == {"regex": 0.0, "regex#2": 1.0}


# The reward model


def a_tokenizer(*, eos: str | None = "<eos>", chat_template: str | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def a_reward_model(
    path: Path,
    *,
    num_labels: int = 1,
    eos: str | None = "<eos>",
    chat_template: str | None = None,
    pad_token_id: int | None = None,
) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    tokenizer = a_tokenizer(eos=eos, chat_template=chat_template)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 1, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=pad_token_id, bos_token_id=None,
        eos_token_id=0 if eos else None,
    )  # fmt: skip
    config.num_labels = num_labels
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_reward_model_scores_in_a_batch_as_one_by_one(tmp_path: Path) -> None:
    from rollcall.reward.model import RewardModel

    model = RewardModel(a_reward_model(tmp_path), device="cpu", max_tokens=64)
    completions = completions_of(*("x" * (1 + 7 * index % 23) + str(index) for index in range(20)))
    together = model(a_prompt(), completions)
    alone = [model(a_prompt(), (completion,))[0] for completion in completions]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(set(together)) == 20


def test_a_reward_model_cuts_from_the_left(tmp_path: Path) -> None:
    from rollcall.reward.model import RewardModel

    model = RewardModel(a_reward_model(tmp_path), device="cpu", max_tokens=5)
    one, other, third = model(a_prompt(), completions_of("aaa12345", "bbb12345", "aaa12346"))
    assert one == pytest.approx(other) and one != pytest.approx(third)


def test_a_reward_model_with_a_chat_template_reads_the_messages(tmp_path: Path) -> None:
    from rollcall.reward.model import RewardModel

    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    model = RewardModel(a_reward_model(tmp_path / "chat", chat_template=template), device="cpu", max_tokens=64)
    plain = RewardModel(a_reward_model(tmp_path / "plain"), device="cpu", max_tokens=64)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    (chat_score,) = model(a_prompt(metadata={"prompt_messages": messages}), completions_of("c"))
    (plain_score,) = plain(a_prompt(text="[system]s[user]q[assistant]"), completions_of("c"))
    assert chat_score == pytest.approx(plain_score)


@pytest.mark.parametrize("pad_token_id", [None, 0], ids=["no padding token", "end-of-text as padding token"])
def test_a_text_that_ends_with_end_of_text_is_scored_at_that_token(tmp_path: Path, pad_token_id: int | None) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    from rollcall.reward.model import RewardModel

    template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    path = a_reward_model(tmp_path, chat_template=template, pad_token_id=pad_token_id)
    texts = [f"{'x' * (1 + 5 * index % 11)}{index}" for index in range(6)]
    scores = RewardModel(path, device="cpu", max_tokens=64)(a_prompt(), completions_of(*texts))
    plain: Any = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = a_tokenizer()
    for text, score in zip(texts, scores, strict=True):
        ids = tokenizer(f"{a_prompt().text}<eos>{text}<eos>", return_tensors="pt").input_ids
        assert ids[0, -1] == tokenizer.eos_token_id
        with torch.no_grad():
            hidden = plain.model(input_ids=ids).last_hidden_state
            assert score == pytest.approx(plain.score(hidden)[0, -1].item(), abs=1e-5)


def test_rows_that_use_the_whole_vocabulary_are_scored_without_padding(tmp_path: Path) -> None:
    from rollcall.reward.model import RewardModel

    model = RewardModel(a_reward_model(tmp_path, eos=None), device="cpu", max_tokens=64)
    completions = completions_of("a", "bbb", "")
    some = model(a_prompt(), completions)
    model._text_config.vocab_size = 1  # as if every token were in use
    assert model(a_prompt(), completions) == pytest.approx(some, abs=1e-5)


def test_a_classifier_with_two_labels_or_an_encoder_without_padding_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    from rollcall.reward.model import RewardModel

    with pytest.raises(ValueError, match="2 labels"):
        RewardModel(a_reward_model(tmp_path / "two", num_labels=2), device="cpu", max_tokens=8)
    tiny = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                      pad_token_id=None)  # fmt: skip
    tiny.num_labels = 1
    BertForSequenceClassification(tiny).save_pretrained(tmp_path / "pad")
    a_tokenizer().save_pretrained(tmp_path / "pad")
    with pytest.raises(ValueError, match="no padding token"):
        RewardModel(str(tmp_path / "pad"), device="cpu", max_tokens=8)
    with pytest.raises(ValueError, match="cannot be loaded"):
        RewardModel(str(tmp_path / "nowhere"), device="cpu", max_tokens=8)


def test_a_language_model_or_other_numbers_are_not_taken_for_a_reward_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, LlamaForCausalLM

    from rollcall.reward.model import RewardModel

    path = a_reward_model(tmp_path)
    config = AutoConfig.from_pretrained(path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.weight": tensors["score.weight"].bool()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="reward.path=.* stores score.weight as bool; weights must be floating-point"):
        RewardModel(path, device="cpu", max_tokens=8)
    (tmp_path / "model.safetensors").unlink()
    LlamaForCausalLM(config).save_pretrained(path)
    with pytest.raises(ValueError, match="score.weight"):
        RewardModel(path, device="cpu", max_tokens=8)


def test_a_hung_item_shows_a_plain_stack_of_the_users_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(pool: RewardPool) -> list[RewardResult]:
        return (await pool.score([Item(0, "", "", "", {})], timeout_s=0.3))[0]

    module = "import time\ndef wait():\n    time.sleep(600)\ndef score(*row):\n    wait()\n"
    in_a_directory_with(module, path=tmp_path, monkeypatch=monkeypatch)
    with RewardPool({0: {"type": "function", "path": "my_rewards:score"}}, num_workers=1) as pool:
        answers = asyncio.run(score(pool))
    place = tmp_path / "my_rewards.py"
    assert answers[0].why.splitlines() == [
        "no score within 0.3 s", "it was at", f'  File "{place}", line 5, in score', f'  File "{place}", line 3, in wait'
    ]  # fmt: skip


def test_the_stack_of_a_crash_says_which_threads_are_the_users() -> None:
    dump = """Fatal Python error: Segmentation fault

Thread 0x00007f12 [ab] (most recent call first):
  File "/me/judge.py", line 9 in wait
Current thread 0x00007f13 [main] (most recent call first):
  File "/me/judge.py", line 3 in ask
  File "/x/rollcall/reward/worker.py", line 5 in main
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core (total: 1)
"""
    assert plain_stack(dump).splitlines() == [
        "Fatal Python error: Segmentation fault",
        "in another thread:",
        '  File "/me/judge.py", line 9, in wait',
        "in the main thread:",
        '  File "/me/judge.py", line 3, in ask',
    ]
