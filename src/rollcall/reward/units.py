r"""The unit at the end of an answer, so that ``10 m`` and ``10 cm`` differ: ``10\text{ cm}``, ``5 m/s``, ``\$5``, ``90^\circ``.

math-verify drops what it takes for a unit (``ab``, ``h`` and ``o`` too), so it gets the number without the unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# The spellings of one unit on a line; an s at the end may follow each.
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
_WORD = r"[a-z]+\.?(?:\^\{?[23]\}?)?"
_WITH_UNIT = (
    r"(?:(?<=[\d}).])|(?<=pi))(?P<gap>\s*)"
    rf"(?P<unit>(?:(?:square|sq\.?|cubic)\s+)?{_WORD}(?:\s*(?:/|\bper\b)\s*{_WORD})?)"
)
_UNIT = re.compile(_WITH_UNIT + r"\s*$", re.IGNORECASE)
_INNER = re.compile(_WITH_UNIT + r"(?![a-z])", re.IGNORECASE)
_RANGE = re.compile(r"([\d.]+)\s+to\s+([\d.]+)$")
_TEMPERATURE = re.compile(r"(?:\^\{?\\circ\}?|°|\bdegrees?)\s*(?:(C)(?:elsius)?|F(?:ahrenheit)?)$", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
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
    is_sure: bool  # a single letter directly behind a number, as in 3m, may be a factor


def split_unit(answer: str) -> Quantity | None:
    r"""An answer that ends in a number and a unit; None if it does not.

    >>> split_unit(r"10\text{ cm}^2"), split_unit("2ab")
    (Quantity(number='10', unit='cm^2', is_sure=True), None)
    """
    text = _TEMPERATURE.sub(lambda match: " celsius" if match[1] else " fahrenheit", _TEXT.sub(r" \1", answer).rstrip())
    for sign, plain in _SIGNS:
        text = text.replace(sign, plain)
    found = _UNIT.search(text)
    unit = _canonical(found["unit"]) if found else None
    if found is None or unit is None:
        return None
    return Quantity(text[: found.start()].strip(), unit, bool(found["gap"]) or len(found["unit"]) > 1)


def mark_units(number: str) -> str:
    """The text before a unit, with the units in it marked: ``3 hours 20`` as ``3<h> 20``. A range is an interval."""

    def marked(match: re.Match[str]) -> str:
        unit = _canonical(match["unit"]) if match["gap"] or len(match["unit"]) > 1 else None
        return match[0] if unit is None else f"<{unit}>"

    return _RANGE.sub(r"[\1, \2]", _INNER.sub(marked, number))


def with_inner_units(found: Quantity) -> Quantity:
    """With the marked units taken out: one unit for all numbers (``3<cm>, 4``), else a tuple of each (``5<ft> 6``)."""
    inner = _MARKED.findall(found.number)
    if set(inner) <= {found.unit}:
        return replace(found, number=_MARKED.sub("", found.number))
    numbers = [re.sub(r"^\s*(?:,|and\b)?\s*", "", part) for part in _MARKED.split(found.number)[::2]]
    return Quantity(f"({', '.join(numbers)})", " ".join([*inner, found.unit]), is_sure=True)


def spell_out_money(answer: str) -> str:
    r"""``\$5`` as ``5 dollars``."""
    return _MONEY.sub(lambda match: f"{match['sign']}{match['amount']} {_CURRENCIES[match['currency']]}", answer)


def _canonical(unit: str) -> str | None:
    """``square meters per hour`` as ``m^2/h``; None if a word is not a unit."""
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
