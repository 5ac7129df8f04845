"""The answer proper of a text: numbers, boxes, tags, and the time that hostile texts take."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.rewards.extract import extract, extract_expected, extract_number, last_number


@pytest.mark.parametrize(
    ("text", "number", "value"),
    [
        ("The final answer is 5 - 9 = -4.", "-4", -4),
        ("= \u22124", "-4", -4),
        ("9-4", "4", 4),
        ("9 -4", "4", 4),
        ("5% - 3%", "3", 3),
        ("first 9\n-4", "-4", -4),
        ("(-4)", "-4", -4),
        ("x = -$5", "-5", -5),
        ("1,000, I think", "1000", 1000),
        ("1,0000", "0000", 0),
        ("1,2,3", "3", 3),
        ("1{,}000", "1000", 1000),
        ("$.50", ".50", Fraction(1, 2)),
        ("No.5 of 1.2.3", "1.2", Fraction(6, 5)),
        ("No.5", "5", 5),
        ("at 7:30", "30", 30),
        ("2x3", "3", 3),
        ("about 1e-3", "1e-3", Fraction(1, 1000)),
        (r"6.02 \times 10^{5}", "6.02e5", 602000),
        ("3/4", "3/4", Fraction(3, 4)),
        ("-1 3/4", "-1 3/4", Fraction(-7, 4)),
        (r"\dfrac{1}{2}", "1/2", Fraction(1, 2)),
        ("on 3/4/2024", "2024", 2024),
        ("50%", "50", 50),
        ("3/0", "3/0", None),
        ("1e99999", "1e99999", None),
        ("9" * 5000, "9" * 5000, None),
        ("no idea", None, None),
    ],
)
def test_last_number_is_read_as_it_is_written(
    text: str, number: str | None, value: Fraction | None
) -> None:
    assert (extract_number(text), last_number(text)) == (number, value)


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9
    )
)
def test_every_spelling_of_a_number_has_its_value(number: object) -> None:
    expected = Fraction(str(number))
    for text in (f"{number}", f"{number:,}", f"{number:e}", f"{number:f}.", f"so ({number:,f}%)"):
        assert last_number(text) == expected, text
    spelled = f"{number:,}".replace("-", "-$") if expected < 0 else f"${number:,}"
    assert last_number(f"They pay {spelled} in all") == expected


@pytest.mark.parametrize(
    ("what", "text", "part"),
    [
        ("boxed", r"so \boxed{7}. Write it as \boxed{ANSWER", "7"),
        ("boxed", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("boxed", r"a { and \boxed{\boxed{7}}", "7"),
        ("boxed", r"\boxed 7", None),
        ("tag", "<answer>7</answer> or <answer>8", "7"),
        ("tag", "<answer><answer> 7 </answer>", "7"),
        ("tag", "<answer>7</answer> and </answer>", "7"),
        ("tag", "7</answer>", None),
    ],
)
def test_last_complete_part_is_found(what: str, text: str, part: str | None) -> None:
    assert extract(what, text) == part


@pytest.mark.parametrize(
    ("what", "answer", "part"),
    [
        ("boxed", "48 + 24 clips.\n#### 72", "72"),
        ("tag", r"We add, \boxed{72}.", "72"),
        ("boxed", "<answer>72</answer>", "72"),
        ("number", "blue", "blue"),
        ("tag", "72", "72"),
        ("text", "a #### b", "a #### b"),
    ],
)
def test_expected_solution_gives_its_final_answer(what: str, answer: str, part: str) -> None:
    assert extract_expected(what, answer) == part


HOSTILE = ["1,000,", "1", "1 ", "1/", "-", "1e", "$", ".5", r"\boxed{", "{", "<answer>"]
HOSTILE += ["</answer>", " ", "1 x ", "}", r"\frac{1", "1x10^"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_time_is_linear_in_the_length_of_a_hostile_text(piece: str) -> None:
    """Take 100,000 characters, for which anything quadratic takes much longer."""
    text, start = piece * (100_000 // len(piece)), time.process_time()
    for what in ("number", "boxed", "tag"):
        extract(what, text)
    last_number(text)
    assert time.process_time() - start < 3
