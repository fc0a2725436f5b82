"""Numbers as people and models write them: "1,234.5", "-3/4", "50%", "\\frac{1}{2}", "2e-3"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
# A sign after a digit, a letter or ")" is a minus between two numbers.
_NUMBER = re.compile(
    rf"(?:(?<![\w)])(?P<sign>[-+])\s?)?(?P<over>{_DECIMAL})(?:\s?/\s?(?P<under>{_DECIMAL}))?(?P<percent>\s?%)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|\\[dt]?frac\s*([0-9])\s*([0-9])")
_LATEX = {"\\%": "%", "\\$": "$", "\\!": "", "\\,": "", "{,}": ",", "\u2212": "-"}
_MAX_DIGITS, _MAX_EXPONENT = 400, 400  # what is longer would take long, and answers nothing


class Number(NamedTuple):
    """A number.

    Attributes:
        value: As it is written, so 50 of "50%".
        percent: Whether a percent sign follows.
    """

    value: Fraction
    percent: bool

    def equals(self, other: Number, tolerance: float) -> bool:
        """Whether both are the same: whole numbers exactly, others within `tolerance` times this one.

        "50%" is 1/2; where one of them alone has a percent sign, the other may lack just that sign.
        """
        if _close(self._share(), other._share(), tolerance):
            return True
        return self.percent != other.percent and _close(self.value, other.value, tolerance)

    def _share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


def last_number(text: str) -> Number | None:
    r"""The last number of a text, or of its last \boxed{...} if it has one; None: there is none."""
    text = _boxed(text)
    for latex, plain in _LATEX.items():
        text = text.replace(latex, plain)
    text = _FRACTION.sub(lambda found: f"{found[1] or found[3]}/{found[2] or found[4]}", text)
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007  the last one is wanted
        pass
    if last is None:
        return None
    over, under = _decimal(last["over"]), _decimal(last["under"] or "1")
    if over is None or not under:
        return None
    return Number((-over if last["sign"] == "-" else over) / under, last["percent"] is not None)


def _boxed(text: str) -> str:
    r"""What is in the last \boxed{...} that is closed, or the text itself."""
    for begin in [found.end() for found in re.finditer(r"\\boxed\s*\{", text)][:-3:-1]:
        depth = 1
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[begin:end]
    return text


def _decimal(text: str) -> Fraction | None:
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if len(digits) > _MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > _MAX_EXPONENT:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


def _close(a: Fraction, b: Fraction, tolerance: float) -> bool:
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= Fraction(tolerance) * abs(a)
