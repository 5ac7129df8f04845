"""Extraction of the answer proper from an answer's text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.config.sections import Extract

NUMBER = re.compile(r"(?<![\d.])[-+]?\d[\d,]*(?:\.\d+)?")
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract(what: Extract, text: str) -> str | None:
    """Return the part of a text that counts as the answer, stripped; None if the text lacks it."""
    if what == "number":
        return extract_number(text)
    if what == "boxed":
        return extract_boxed(text)
    if what == "tag":
        contents = TAG.findall(text)
        return contents[-1].strip() if contents else None
    return text.strip()


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{}, which may contain braces.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len(r"\boxed{")
    for place in range(begin - 1, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[begin:place].strip()
    return None


def extract_number(text: str) -> str | None:
    """Return the last number of a text with its sign; a minus between two numbers is no sign.

    >>> extract_number("5 - 9 = -4."), extract_number("9-4"), extract_number("none")
    ('-4', '4', None)
    """
    plain = text.replace("\u2212", "-")
    matches = list(NUMBER.finditer(plain))
    if not matches:
        return None
    number = matches[-1].group().rstrip(",")
    before = plain[: matches[-1].start()].rstrip()
    return number.lstrip("+-") if before[-1:].isdigit() else number.lstrip("+")
