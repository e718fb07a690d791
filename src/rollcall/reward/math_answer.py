r"""The ``math`` reward: uses math-verify to check whether a completion's final answer equals the row's answer.

The same rule applies to the completion and to the row's answer. The final answer is the content of the last mark: ``\boxed{...}``,
after ``####``, or in ``<answer>...</answer>``. Without a mark, it follows the last "answer is" or "answer:", or else it is the last
line. In a sentence, it is the part after the last word. math-verify parses LaTeX completely only inside ``\boxed{}``, so the answer
is boxed before parsing. For a sentence that ends in a word ("72 apples"), math-verify searches for numbers by itself.

math-verify parses a word as a product of its letters, in any order. So an answer that contains only letters is compared as text. A row's
answer is a product only if it consists of the unknowns w, x, y and z (``xy``) or is between dollar signs (``$ab$``).

math-verify drops anything it considers a unit (even ``ab``, ``h`` and ``o``). So we split off the unit at the end of an answer
(``10\text{ cm}``, ``5 m/s``, ``\$5``, ``90^\circ``) and pass only the number to math-verify: ``10 m`` and ``10 cm`` differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rollcall.reward.eval_guard import guarded

_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_ANNOUNCED = re.compile(r"(?i)\banswer\s*(?:is|=|:)[\s:*]*")
_WRAPPED = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>(?:(?!\\[()]).)+)\\\)|\\\[(?P<d>(?:(?!\\[\[\]]).)+)\\\]",
    re.DOTALL,
)
_MATH_WITHIN = re.compile(r"(?<!\\)\$[^$]+\$|\\\(|\\\[")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_TEXT_AT_END = re.compile(r"(?<=[\d)}.])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")  # 5\text{ apples}
_NOT_SENTENCE = re.compile(r"<\S+?>|\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+\s*[A-Z]*")  # \end{pmatrix}, \angle ABC
_SHAPE = re.compile(r"\\(?:angle|triangle)\b")
_WORD = re.compile(r"\b(?:[A-Za-z]{3,}|is|so|of|to|be|we|it|in|an|at|by|if|as|no|us)\b")
_NOT_WORDS = frozenset({
    "and", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "mod", "max", "min", "gcd", "lcm", "det", "inf", "deg", "January", "February", "March", "April", "May", "June", "July",
    "August", "September", "October", "November", "December",
})  # fmt: skip
_BARE_NAME = re.compile(
    r"(?<![\\A-Za-z])(?:arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|pi)(?![A-Za-z])"
)
_BARE_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_LISTED = re.compile(r",(?!\d{3}\b)|;|\b(?:and|or)\b")
_NAMED = re.compile(r"\b[A-Za-z]\s*=")
_NUMERALS = {
    "dozen": "12",
    "hundred": "100",
    "thousand": "10^3",
    "million": "10^6",
    "billion": "10^9",
    "trillion": "10^{12}",
}
_NUMERAL = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{\s*(%s)\s*\}|(%s)\b)" % (("|".join(_NUMERALS),) * 2), re.IGNORECASE
)  # 5 million


def math_equal(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Return 1 if the completion's final answer equals the row's, either as text or, if the units match, according to math-verify."""
    wanted, given = final_answer(answer), final_answer(completion)
    if wanted is None:
        raise ValueError(f"the row's answer {answer[:80]!r} is empty or too long; check data.answer_key")
    if given is None:
        return 0.0
    is_formula = _WRAPPED.fullmatch(_final(answer).strip()) and not _SHAPE.match(wanted)
    is_product = re.fullmatch(r"[w-z]{2,3}", wanted) or is_formula
    if is_word(wanted) and not is_product:
        within = [match[0].strip("$") for match in _MATH_WITHIN.finditer(given)]
        words = plain_words(wanted)
        if words in map(plain_words, (given, _after_words(given), *within[-1:])):
            return 1.0
        if len(words) > 3 or is_word(given):  # shorter text may name a number (e, pi) or be a product (ab) in a formula
            return 0.0
    if "\\begin{cases}" in wanted:  # math-verify parses every such answer as 0
        return float("".join(wanted.split()) == "".join(given.split()))
    with guarded():
        if not _parse(_readable(wanted)):
            raise ValueError(f"math-verify cannot parse the answer {answer[:80]!r}; check data.answer_key")
        return float(_same(wanted, given))


def _same(wanted: str, given: str) -> bool:
    """Compare two answers. Units must match. If only one has a unit, the other is compared with its number or its full text (``10m``)."""
    gold, found = _quantity(wanted), _quantity(given)
    if gold and found and (gold.is_sure or found.is_sure):
        return gold.unit == found.unit and _verified(gold.number, found.number)
    gold_number = gold.number if gold and gold.is_sure else wanted
    found_number = found.number if found and (found.is_sure or not _has_letters(wanted)) else given
    return _verified(gold_number, found_number)


def _quantity(answer: str) -> Quantity | None:
    """Parse a number with a unit, or a list of such numbers, even at the end of a sentence. Return None without a unit, or if letters
    precede the unit (``2m + 3h``)."""
    found = split_unit(answer)
    if found is None:
        return None
    found = with_inner_units(replace(found, number=_after_words(mark_units(found.number))))
    number = found.number if _LISTED.search(found.number) else found.number.rpartition("=")[2].strip()
    is_number = number and not _has_letters(_NAMED.sub("", _LISTED.sub("", number)))
    return replace(found, number=number) if is_number else None


def _has_letters(expression: str) -> bool:
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", expression)) is not None


def _verified(wanted: str, given: str) -> bool:
    from math_verify import verify

    gold, found = _parse(_readable(wanted)), _parse(_readable(given))
    # math-verify's own limits use signals. We turn them off, because the worker's parent already enforces a time limit.
    return bool(gold) and bool(found) and bool(verify(list(gold), list(found), timeout_seconds=None))


def final_answer(text: str) -> str | None:
    r"""Return the part of a text that is its answer, or None if there is no answer of a reasonable length.

    >>> [final_answer(text) for text in (r"so \boxed{2\sqrt{3}} cm", "#### 72 apples", "it is\nx^2+1.", "<answer>5</answer>")]
    ['2\\sqrt{3}', '72 apples', 'x^2+1', '5']
    """
    found = _NUMERAL.sub(lambda match: f"*{_NUMERALS[(match[1] or match[2]).casefold()]}", _bare(_final(text)))
    return found if found and len(found) <= 1000 else None  # longer text is not an answer and takes minutes to parse


def _final(text: str) -> str:
    """Return the final answer with its surrounding text."""
    marked = last_marked(text)
    # A tag may contain a box or a ####, and a box may follow a ####.
    while marked is not None and (inner := last_marked(marked)) is not None:
        marked = inner
    return _unmarked(text) if marked is None else marked


def last_marked(text: str) -> str | None:
    """Return the content of a text's last mark, or None if it has no mark."""
    box, hashes, tag = _last_box(text), text.rfind("####"), last_tagged(text)
    found = []
    if box is not None:
        found.append((box[0], text[box[0] : box[1]]))
    if hashes >= 0:
        found.append((hashes, text[hashes + 4 :].strip().partition("\n")[0]))
    if tag is not None:
        found.append((text.rfind(_TAG_CLOSE), tag))  # use the end as its position, because marks inside belong to it
    return max(found)[1] if found else None


def last_tagged(text: str) -> str | None:
    """Return the content of the last ``<answer>...</answer>``, or None."""
    close = text.rfind(_TAG_CLOSE)
    start = text.rfind(_TAG_OPEN, 0, close) if close >= 0 else -1
    return text[start + len(_TAG_OPEN) : close] if start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``, including inner braces, or None."""
    box = _last_box(text)
    return text[box[0] : box[1]].strip() if box else None


def _last_box(text: str) -> tuple[int, int] | None:
    """Find the start and end of the last complete box's content, in one pass even if many boxes are left open."""
    open_braces: list[int | None] = []  # where a box's content begins; None for an ordinary brace
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
    """Return whether an answer consists of words ("even", "no solution") rather than a formula of letters."""
    words = plain_words(answer)
    return re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*", words) is not None and not words.startswith("sqrt")


def plain_words(answer: str) -> str:
    r"""Normalise an answer's words for comparison: ``\text{No  Solution}`` becomes ``no solution``."""
    return " ".join(_SHAPE.sub("", _TEXT_COMMAND.sub(r"\1", answer)).casefold().split())


def _unmarked(text: str) -> str:
    end = text[-2000:]  # in a text without a mark, only the end is searched
    announced = [match.end() for match in _ANNOUNCED.finditer(end)]
    if announced and (said := end[announced[-1] :].strip()):
        return said.partition("\n")[0].rstrip(" *.!")
    lines = [line for line in end.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    # "it is 5!" is a sentence, but a line with only "5!" is 120.
    return last.rstrip(" *.!") if _WORD.search(last) else last


def _bare(text: str) -> str:
    """Strip what surrounds an answer: spaces, Markdown asterisks, a full stop, dollar signs."""
    text = text.strip().strip("*").strip().rstrip(".,;").strip().strip("*")
    if wrapped := _WRAPPED.fullmatch(text):
        return next(part for part in wrapped.groups() if part is not None).strip().rstrip(".,;")
    money = _MONEY.sub(lambda match: f"{match['sign']}{match['amount']} {_CURRENCIES[match['currency']]}", text)
    text = money.replace("\\$", "")  # \$5 is 5 dollars
    return text.replace("$", "") if text.count("$") == 1 else text


def _readable(answer: str) -> str:
    """Convert an answer to the form that math-verify needs."""
    if _MATH_WITHIN.search(answer):
        return answer
    expression = answer if " " not in answer else _after_words(answer)
    expression = _TEXT_AT_END.sub("", expression)
    expression = re.sub(r"(?<![\d./])(\d+)\s+(\d+/\d+)(?![\d./])", r"(\1+\2)", expression)  # 1 1/2
    expression = _BARE_ROOT.sub(r"\\sqrt{\1}", _BARE_NAME.sub(r"\\\g<0>", expression))
    return f"{_BOX}{expression}}}" if expression else answer


def _after_words(sentence: str) -> str:
    """Return the part after the last word, or the full sentence if it has no word."""
    hidden = _TEXT_COMMAND.sub(lambda match: " " * len(match[0]), sentence)
    hidden = _NOT_SENTENCE.sub(lambda match: " " * len(match[0]), hidden)
    words = [match for match in _WORD.finditer(hidden) if match[0] not in _NOT_WORDS]
    if not words or words[-1][0].casefold() == "not":  # "B, not A" does not answer A
        return sentence
    return sentence[words[-1].end() :].lstrip(" :,.=*")


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[Any, ...]:
    """Parse with math-verify. Cache the results, because all completions in a group are compared with the same answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # In our boxed formulas, apparent units are factors (2ab). In sentences that math-verify searches by itself, it may drop units.
    normal = replace(LatexExtractionConfig().normalization_config, units=not text.startswith(_BOX))
    kinds = (LatexExtractionConfig(normalization_config=normal), ExprExtractionConfig())
    return tuple(parse(text, extraction_config=kinds, parsing_timeout=None))  # pyright: ignore[reportArgumentType]


# Units

# Units are separated by | or a newline, each with its spellings. Every spelling may end with a plural s.
_SPELLINGS = """
mm millimeter millimetre | cm centimeter centimetre | dm decimeter decimetre | m meter metre | km kilometer kilometre
in inch inche | ft foot feet | yd yard | mi mile | mg milligram | g gm gram | kg kilogram | t ton tonne | lb pound | oz ounce
ml milliliter millilitre | cl centiliter centilitre | l liter litre | gal gallon | ms millisecond | s sec second | min minute
h hr hour | day | week | month | yr year | dollar usd | cent | euro eur | degree deg | celsius | fahrenheit | rad radian | am | pm
"""
_UNITS = {
    spelling: spellings.split()[0]
    for spellings in re.split(r"[|\n]", _SPELLINGS.strip())
    for spelling in spellings.split()
} | {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_UNIT_WORD = r"[a-z]+\.?(?:\^\{?[23]\}?)?"
_WITH_UNIT = (
    r"(?:(?<=[\d}).])|(?<=pi))(?P<gap>\s*)"
    rf"(?P<unit>(?:(?:square|sq\.?|cubic)\s+)?{_UNIT_WORD}(?:\s*(?:/|\bper\b)\s*{_UNIT_WORD})?)"
)
_UNIT = re.compile(_WITH_UNIT + r"\s*$", re.IGNORECASE)
_INNER = re.compile(_WITH_UNIT + r"(?![a-z])", re.IGNORECASE)
_RANGE = re.compile(r"([\d.]+)\s+to\s+([\d.]+)$")
_TEMPERATURE = re.compile(r"(?:\^\{?\\circ\}?|°|\bdegrees?)\s*(?:(C)(?:elsius)?|F(?:ahrenheit)?)$", re.IGNORECASE)
_UNIT_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_SIGNS = (
    ("$", ""), ("\\(", ""), ("\\)", ""), ("\\,", " "), ("\\;", " "), ("\\ ", " "), ("~", " "),
    ("^\\circ", " degree"), ("^{\\circ}", " degree"), ("°", " degree"), ("²", "^2"), ("³", "^3"), ("€", " euro"), ("¢", " cent"),
)  # fmt: skip
_MONEY = re.compile(r"(?P<sign>[-+]?)\\?(?P<currency>[$€£])\s*(?P<amount>\d[\d.,]*)$")
_MARKED = re.compile(r"<([^<>\s]+)>")
_CURRENCIES = {"$": "dollars", "€": "euros", "£": "pounds"}


@dataclass(frozen=True, slots=True)
class Quantity:
    number: str  # the text before the unit
    unit: str
    is_sure: bool  # False for a single letter directly after a number, as in 3m, because it may be a factor


def split_unit(answer: str) -> Quantity | None:
    r"""Split an answer that ends in a number and a unit. Return None if it does not.

    >>> split_unit(r"10\text{ cm}^2"), split_unit("2ab")
    (Quantity(number='10', unit='cm^2', is_sure=True), None)
    """
    text = _UNIT_TEXT.sub(r" \1", answer).rstrip()
    text = _TEMPERATURE.sub(lambda match: " celsius" if match[1] else " fahrenheit", text)
    for sign, plain in _SIGNS:
        text = text.replace(sign, plain)
    found = _UNIT.search(text)
    unit = _canonical(found["unit"]) if found else None
    if found is None or unit is None:
        return None
    return Quantity(text[: found.start()].strip(), unit, bool(found["gap"]) or len(found["unit"]) > 1)


def mark_units(number: str) -> str:
    """Mark the units in the text before a unit: ``3 hours 20`` becomes ``3<h> 20``. A range becomes an interval."""

    def marked(match: re.Match[str]) -> str:
        unit = _canonical(match["unit"]) if match["gap"] or len(match["unit"]) > 1 else None
        return match[0] if unit is None else f"<{unit}>"

    return _RANGE.sub(r"[\1, \2]", _INNER.sub(marked, number))


def with_inner_units(found: Quantity) -> Quantity:
    """Remove the marked units: use one unit for all numbers (``3<cm>, 4``), or else a tuple of units (``5<ft> 6``)."""
    inner = _MARKED.findall(found.number)
    if set(inner) <= {found.unit}:
        return replace(found, number=_MARKED.sub("", found.number))
    numbers = [re.sub(r"^\s*(?:,|and\b)?\s*", "", part) for part in _MARKED.split(found.number)[::2]]
    return Quantity(f"({', '.join(numbers)})", " ".join([*inner, found.unit]), is_sure=True)


def _canonical(unit: str) -> str | None:
    """Write ``square meters per hour`` as ``m^2/h``. Return None if a word is not a unit."""
    power = {"squ": "^2", "sq ": "^2", "sq.": "^2", "cub": "^3"}.get(unit[:3].casefold(), "")
    words = re.sub(r"^(?:square|sq\.?|cubic)\s+", "", unit, flags=re.IGNORECASE) if power else unit
    parts = []
    for part in re.split(r"\s*(?:/|\bper\b)\s*", words.casefold()):
        name, _, exponent = part.replace("{", "").replace("}", "").partition("^")
        name = name.rstrip(".")
        name = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
        if name is None:
            return None
        parts.append(f"{name}^{exponent}" if exponent else name)
    return "/".join([parts[0] + power, *parts[1:]])
