r"""The ``math`` reward: is the final answer of a completion, as math-verify understands it, the row's answer?

Both texts are read by the same rule. The final answer is what stands in the last mark: ``\boxed{...}``, after ``####``, or
in ``<answer>...</answer>``. Where there is no mark it follows the last "answer is" or "answer:", else it is the last line;
of a sentence, what follows its last word. math-verify reads LaTeX inside ``\boxed{}`` alone as a whole, so the answer is
boxed before it is parsed; a sentence that ends in a word ("72 apples") is left to math-verify's own search for numbers.

math-verify reads a word as a product of its letters, in any order. So words are compared as text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from rollcall.reward.eval_guard import guarded

_MAX_ANSWER_CHARS = 1000  # a longer text is not an answer, and takes minutes to parse
_MAX_SEARCH_CHARS = 2000  # of the end of a text without a mark
_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_ANNOUNCED = re.compile(r"(?i)\banswer\s*(?:is|=|:)[\s:*]*")
_WRAPPED = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>(?:(?!\\[()]).)+)\\\)|\\\[(?P<d>(?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)
_MATH_WITHIN = re.compile(r"(?<!\\)\$[^$]+\$|\\\(|\\\[")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"\b(?:[A-Za-z]{3,}|is|so|of|to|be|we|it|in|an|at|by|if|as|no|us)\b")
_NOT_WORDS = frozenset({
    "and", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "mod", "max", "min", "gcd", "lcm", "det", "inf", "deg",
})  # fmt: skip
_BARE_NAME = re.compile(
    r"(?<![\\A-Za-z])(?:arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|pi)(?![A-Za-z])"
)
_BARE_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_LETTERS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
_SHORTEST_WORD = 4  # letters; shorter ones (ab, xyz) are products


def math_equal(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if math-verify finds the completion's final answer equal to the row's."""
    from math_verify import verify

    wanted, given = final_answer(answer), final_answer(completion)
    if wanted is None:
        raise ValueError(f"the row's answer {answer[:80]!r} is empty or too long; check data.answer_key")
    if given is None:
        return 0.0
    if is_word(wanted):
        within = [match[0].strip("$") for match in _MATH_WITHIN.finditer(given)]
        return float(plain_words(wanted) in map(plain_words, (given, *within[-1:])))
    with guarded():
        gold = _parse(_readable(wanted))
        if not gold:
            raise ValueError(f"math-verify cannot read the answer {answer[:80]!r}; check data.answer_key")
        found = _parse(_readable(given))
        # Its own limits use signals, and the worker's parent already keeps the time: they are off.
        return float(bool(found) and verify(list(gold), list(found), timeout_seconds=None))


def final_answer(text: str) -> str | None:
    r"""The part of a text that is its answer; None if there is none, or none of a reasonable length.

    >>> [final_answer(text) for text in (r"so \boxed{2\sqrt{3}} cm", "#### 72 apples", "it is\nx^2+1.", "<answer>5</answer>")]
    ['2\\sqrt{3}', '72 apples', 'x^2+1', '5']
    """
    marked = last_marked(text)
    if marked is not None:
        # A box or a #### may stand inside a tag, a box after a ####.
        while (inner := last_marked(marked)) is not None:
            marked = inner
        found = marked
    else:
        found = _unmarked(text)
    found = _bare(found)
    return found if found and len(found) <= _MAX_ANSWER_CHARS else None


def last_marked(text: str) -> str | None:
    """What the last mark of a text holds; None if it has none."""
    box, hashes, tag = _last_box(text), text.rfind("####"), last_tagged(text)
    found = []
    if box is not None:
        found.append((box[0], text[box[0] : box[1]]))
    if hashes >= 0:
        found.append((hashes, text[hashes + 4 :].strip().partition("\n")[0]))
    if tag is not None:
        found.append((text.rfind(_TAG_CLOSE), tag))  # its place is its end: what stands inside is part of it
    return max(found)[1] if found else None


def last_tagged(text: str) -> str | None:
    """What the last ``<answer>...</answer>`` holds; None if there is none."""
    close = text.rfind(_TAG_CLOSE)
    start = text.rfind(_TAG_OPEN, 0, close) if close >= 0 else -1
    return text[start + len(_TAG_OPEN) : close] if start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` holds, inner braces included; None when there is none."""
    box = _last_box(text)
    return text[box[0] : box[1]].strip() if box else None


def _last_box(text: str) -> tuple[int, int] | None:
    """Where the content of the last complete box begins and ends; found in one pass, however many are left open."""
    open_braces: list[int | None] = []  # where a box's content begins; None: an ordinary brace
    last: tuple[int, int] | None = None
    for match in re.finditer(r"\\boxed\{|\\.|[{}]", text, re.DOTALL):
        if match[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = (begin, match.start())
        elif match[0] in ("{", _BOX):
            open_braces.append(match.end() if match[0] == _BOX else None)
    return last


def is_word(answer: str) -> bool:
    """Whether an answer is one word or several ("even", "no solution"), and not a formula of letters."""
    words = plain_words(answer)
    letters = sum(map(str.isalpha, words))
    return _LETTERS.fullmatch(words) is not None and letters >= _SHORTEST_WORD and not words.startswith("sqrt")


def plain_words(answer: str) -> str:
    r"""The words of an answer, for comparison: ``\text{No  Solution}`` is ``no solution``."""
    return " ".join(_TEXT_COMMAND.sub(r"\1", answer).casefold().split())


def _unmarked(text: str) -> str:
    end = text[-_MAX_SEARCH_CHARS:]
    announced = [match.end() for match in _ANNOUNCED.finditer(end)]
    if announced and (said := end[announced[-1] :].strip()):
        return said.partition("\n")[0].rstrip(" *.!")
    lines = [line for line in end.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last.rstrip(" *.!") if _WORD.search(last) else last  # "it is 5!" is a sentence, "5!" alone is 120


def _bare(text: str) -> str:
    """Without what stands around an answer: spaces, Markdown's stars, a full stop, dollar signs."""
    text = text.strip().strip("*").strip().rstrip(".,;").strip().strip("*")
    if wrapped := _WRAPPED.fullmatch(text):
        return next(part for part in wrapped.groups() if part is not None).strip().rstrip(".,;")
    text = text.replace("\\$", "")
    return text.replace("$", "") if text.count("$") == 1 else text


def _readable(answer: str) -> str:
    """An answer as math-verify takes it."""
    if _MATH_WITHIN.search(answer):
        return answer
    expression = answer if " " not in answer else _after_words(answer)
    expression = _BARE_ROOT.sub(r"\\sqrt{\1}", _BARE_NAME.sub(r"\\\g<0>", expression))
    return f"\\boxed{{{expression}}}" if expression else answer


def _after_words(sentence: str) -> str:
    """What follows the last word; all of it where there is none."""
    hidden = _TEXT_COMMAND.sub(lambda match: " " * len(match[0]), sentence)
    hidden = _COMMAND.sub(lambda match: " " * len(match[0]), hidden)
    ends = [match.end() for match in _WORD.finditer(hidden) if match[0] not in _NOT_WORDS]
    return sentence[ends[-1] :].lstrip(" :,.=*") if ends else sentence


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[Any, ...]:
    """Kept, because the completions of a group are compared with one answer."""
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))  # pyright: ignore[reportArgumentType]
