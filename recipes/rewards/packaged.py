"""Packaged reward functions. Each gives 0 to an answer that `sampling.max_tokens` cut off."""

from typing import Any

from recipes.config.literals import Extract
from recipes.errors import shown
from recipes.rewards.extract import extract as part_of
from recipes.rewards.extract import extract_expected, last_number

SECONDS = 5
"""Limit of math-verify for parsing one text, and for comparing two."""


def exact_match(completion: str, answer: str, ended: bool, extract: Extract = "text") -> float:
    """Return 1 if the answer is the expected answer, else 0; whitespace counts as one space.

    With extract=number, the numbers are compared by value, as `number` does.
    """
    if extract == "number":
        return number(completion, answer, ended)
    given, expected = _parts(extract, completion, answer)
    return float(ended and given is not None and given.split() == expected.split())


def number(completion: str, answer: str, ended: bool, extract: Extract = "text") -> float:
    """Return 1 if the last numbers of the answer and the expected answer are equal, else 0.

    Numbers are compared by value: 1,000 equals 1000, and 0.5 equals 1/2.

    Raises:
        ValueError: The expected answer has no number.
    """
    given, expected = _parts(extract, completion, answer)
    if (right := last_number(expected)) is None:
        raise ValueError(f"the expected answer {shown(repr(expected), 60)} has no number in it")
    return float(ended and given is not None and last_number(given) == right)


def _parts(what: Extract, completion: str, answer: Any) -> tuple[str | None, str]:
    """Return the extracted parts of an answer and of the expected one."""
    return part_of(what, completion), extract_expected(what, str(answer))


def math(completion: str, answer: str, ended: bool, extract: Extract = "text") -> float:
    r"""Return 1 if math-verify finds the answer equal to the expected one, else 0.

    The expected answer may be LaTeX with or without delimiters, such as \frac{1}{2}, or a number.
    Without `extract`, math-verify looks for the last \boxed{}, formula or number itself. Its limits
    are signals, so it must be called in the main thread of a process.

    Raises:
        ModuleNotFoundError: The package math-verify is missing.
        ValueError: The expected answer is no mathematics.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; run: pip install 'memsaver[rewards]'") from None
    given = part_of(extract, completion)
    expected = extract_expected("boxed" if extract == "text" else extract, str(answer))
    gold = parse(_delimited(expected), parsing_timeout=SECONDS)
    if not gold:
        raise ValueError(f"the expected answer {shown(repr(answer), 60)} is no mathematics")
    if given is None or not ended:
        return 0.0
    target = parse(given if extract == "text" else _delimited(given), parsing_timeout=SECONDS)
    return float(verify(gold, target, timeout_seconds=SECONDS))


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
"""Packaged reward functions whose time is linear in the length of the answer."""
