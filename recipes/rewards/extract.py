r"""Extraction of the answer proper from a text, and the values of numbers.

All functions take time linear in the length of the text, because models write texts of any form.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from recipes.config.literals import Extract

NUMBER = re.compile(
    r"""
    (?P<sign>[-+])? \\?[$€£¥]? (?P<inner>[-+])? (?<!\d) (?<!\d\.)
    (?: \\[dt]?frac\{(?P<over>\d+)\}\{(?P<under>\d+)\}
      | (?<!/) (?:(?P<whole>\d+)[ ])? (?P<top>\d+)/(?P<bottom>\d+) (?![\d/])
      | (?P<digits> (?:\d{1,3}(?:,\d{3})+(?!\d) | \d+) (?:\.\d+)? | (?<![\w.])\.\d+ )
        (?: [eE](?P<power>[-+]?\d+)(?!\w)
          | [ ]?(?:[x×*]|\\times|\\cdot)[ ]?10\^\{?(?P<ten>[-+]?\d+) )?
    )
    """,
    re.VERBOSE,
)
"""A number as people and models write it: $1,080.50, -.5, 1e-3, 6 x 10^5, 1 3/4, \\frac{3}{4}."""
SPELLINGS = {"\u2212": "-", "{,}": ",", r"\,": ",", r"\!": ""}
"""Marks of LaTeX and typography, as plain text has them."""
LONGEST = 400
"""Digits of the longest number that has a value, and its largest power of ten."""
BOX = re.compile(r"\\boxed\s?\{|\\.|[{}]", re.DOTALL)
TAG, END = "<answer>", "</answer>"


def extract(what: Extract, text: str) -> str | None:
    """Return the part of a text that counts as the answer, stripped; None if the text lacks it."""
    return EXTRACTORS[what](text)


def extract_expected(what: Extract, text: str) -> str:
    """Return the answer proper of an expected answer, which may be a whole solution.

    That is the part that `what` names, else the last box, tag, or the text after the last `####`
    (GSM8K), else the whole text.

    >>> extract_expected("boxed", "2 + 2 clips. #### 4"), extract_expected("number", "blue")
    ('4', 'blue')
    """
    parts = [extract(what, text)]
    if what != "text":
        after = text.rpartition("####")
        parts += [extract_boxed(text), extract_tag(text), after[2] if after[1] else None]
    return next((part for part in parts if part), text).strip()


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{}, which may contain braces.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}."), extract_boxed(r"\boxed{7} or \boxed{8")
    ('\\frac{1}{2}', '7')
    """
    opened: list[int] = []  # the start of each open brace's content; negative: of no box
    start, end = -1, -1
    for match in BOX.finditer(text):
        token = match.group()
        if token == "}":
            if opened and (begin := opened.pop()) > start:
                start, end = begin, match.start()
        elif token.endswith("{") and token != r"\{":
            opened.append(-1 if token == "{" else match.end())
    return None if start < 0 else text[start:end].strip()


def extract_tag(text: str) -> str | None:
    """Return the content of the last complete <answer> tag.

    >>> extract_tag("<answer> 7 </answer> or <answer>8"), extract_tag("7</answer>")
    ('7', None)
    """
    start = text.rfind(TAG, 0, max(0, text.rfind(END)))
    return None if start < 0 else text[start + len(TAG) : text.find(END, start)].strip()


def extract_number(text: str) -> str | None:
    """Return the last number of a text with its sign, without currency and thousands commas.

    >>> extract_number("5 - 9 = -4."), extract_number("9-4"), extract_number("$1,080 or none")
    ('-4', '4', '1080')
    """
    if (found := _last(text)) is None:
        return None
    sign, match = found
    if match["digits"] is None:
        over, under = match["over"] or match["top"], match["under"] or match["bottom"]
        return f"{sign}{match['whole'] + ' ' if match['whole'] else ''}{over}/{under}"
    power = match["power"] or match["ten"]
    return sign + match["digits"].replace(",", "") + (f"e{power}" if power else "")


EXTRACTORS: dict[Extract, Callable[[str], str | None]] = {
    "text": str.strip,
    "number": extract_number,
    "boxed": extract_boxed,
    "tag": extract_tag,
}
"""Functions by the part that they extract."""


def last_number(text: str) -> Fraction | None:
    r"""Return the value of the last number of a text; None without one, or if it is too long.

    >>> last_number("It costs $1,000.50.") == 1000.5, last_number("1e-3"), last_number("none")
    (True, Fraction(1, 1000), None)
    >>> last_number(r"\frac{1}{2}"), last_number("1 3/4"), last_number("50%")
    (Fraction(1, 2), Fraction(7, 4), Fraction(50, 1))
    """
    written = extract_number(text) or ""
    whole, _, rest = written.rpartition(" ")
    power = written.partition("e")[2]
    if len(written) > LONGEST or len(power) > 4 or abs(int(power or 0)) > LONGEST:
        return None
    try:
        if not whole:
            return Fraction(rest)
        return int(whole) + Fraction(rest) * (-1 if whole.startswith("-") else 1)
    except (ValueError, ZeroDivisionError):  # no number, or a fraction with denominator 0
        return None


def _last(text: str) -> tuple[str, re.Match[str]] | None:
    """Return the last number of a text with its sign; a minus between two numbers is no sign."""
    for spelling, plain in SPELLINGS.items():
        text = text.replace(spelling, plain)
    match, end = None, -1
    for number in NUMBER.finditer(text):
        match, end = number, match.end() if match else -1
    if match is None:
        return None
    difference = end >= 0 and not text[end : match.start()].strip(" \t%\\")
    signs = match["inner"] if difference else (match["sign"] or match["inner"])
    return "-" if signs == "-" else "", match
