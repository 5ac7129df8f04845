"""Packaged reward functions. Each gives 0 to an answer that `sampling.max_tokens` cut off."""

from __future__ import annotations

import threading
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from recipes.errors import shown
from recipes.rewards.extract import extract as part_of
from recipes.rewards.extract import extract_number

if TYPE_CHECKING:
    from recipes.config.sections import Extract

SECONDS = 5
"""Limit of math-verify for parsing one text, and for comparing two."""


def exact_match(completion: str, answer: str, ended: bool, extract: Extract = "text") -> float:
    """Return 1 if the answer is the expected answer, else 0; whitespace counts as one space."""
    given, expected = _parts(extract, completion, answer)
    return float(ended and given is not None and given.split() == expected.split())


def number(completion: str, answer: str, ended: bool, extract: Extract = "text") -> float:
    """Return 1 if the last numbers of the answer and the expected answer are equal, else 0.

    Numbers are compared by value: 1,000 equals 1000, and 2.0 equals 2.
    """
    given, expected = map(last_number, _parts(extract, completion, answer))
    return float(ended and given is not None and given == expected)


def _parts(what: Extract, completion: str, answer: Any) -> tuple[str | None, str]:
    """Return the extracted parts of an answer and of the expected one.

    An expected answer without the part counts as a whole, and so `... #### 42` and `42` both have
    the number 42.
    """
    expected = str(answer)
    return part_of(what, completion), part_of(what, expected) or expected


def last_number(text: str | None) -> Decimal | None:
    """Return the value of the last number of a text; None without a number.

    >>> last_number("It costs $1,000.50."), last_number("-2.0") == -2, last_number("none")
    (Decimal('1000.50'), True, None)
    """
    digits = extract_number(text or "")
    try:
        return None if digits is None else Decimal(digits.replace(",", ""))
    except InvalidOperation:
        return None


def math(completion: str, answer: str, ended: bool, extract: Extract = "text") -> float:
    r"""Return 1 if math-verify finds the answer equal to the expected one, else 0.

    The expected answer may be LaTeX with or without delimiters, such as \frac{1}{2}, or a number.
    Without `extract`, math-verify looks for the last \boxed{}, formula or number itself.

    Raises:
        ModuleNotFoundError: The package math-verify is missing.
        ValueError: The expected answer is no mathematics.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        message = f"{error}; run: pip install 'memsaver[rewards]'"
        raise ModuleNotFoundError(message) from None
    # The limit of math-verify is a signal, which only the main thread can set.
    limit = SECONDS if threading.current_thread() is threading.main_thread() else 0
    given, expected = _parts(extract, completion, answer)
    gold = parse(_delimited(expected), parsing_timeout=limit)
    if not gold:
        raise ValueError(f"the expected answer {shown(repr(answer), 60)} is no mathematics")
    if given is None or not ended:
        return 0.0
    target = parse(given if extract == "text" else _delimited(given), parsing_timeout=limit)
    return float(verify(gold, target, timeout_seconds=limit or None))


def _delimited(text: str) -> str:
    r"""Return mathematics with delimiters, without which math-verify would only look for numbers.

    >>> _delimited("1+x"), _delimited("$1+x$")
    ('\\boxed{1+x}', '$1+x$')
    """
    return text if any(mark in text for mark in DELIMITERS) else rf"\boxed{{{text}}}"


PACKAGED = {function.__name__: function for function in (exact_match, number, math)}
"""Packaged reward functions by name."""

DELIMITERS = ("$", r"\(", r"\[", r"\boxed")

IN_PROCESS = ("exact_match", "number")
"""Packaged reward functions that always return within microseconds."""
