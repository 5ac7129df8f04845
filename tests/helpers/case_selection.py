"""Select how many of its cases a test tries.

`make test` tries a covering part, `make test-all` and a GPU try all, `make soak` full counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

_soak = False
_whole = False


def choose(*, soak: bool, whole: bool) -> None:
    """Set the selection; conftest calls this before test modules are imported."""
    global _soak, _whole
    _soak, _whole = soak, whole


def part(items: list[pytest.Item], which: str) -> list[pytest.Item]:
    """Return the tests of part I of N ("I/N"): each file is in one part, whatever the order.

    A test weighs as much as its own time limit, by default a minute, because only long tests have
    one. Files go by descending weight to the part with the least.
    """
    number, parts = map(int, which.split("/"))
    weights = Counter[Path]()
    for item in items:
        limit = item.get_closest_marker("timeout")
        weights[item.path] += limit.args[0] if limit else 60
    loads, chosen = [0.0] * parts, set[Path]()
    for file, weight in sorted(weights.items(), key=lambda entry: (-entry[1], entry[0])):
        place = loads.index(min(loads))
        loads[place] += weight
        if place == number - 1:
            chosen.add(file)
    return [item for item in items if item.path in chosen]


def rounds(short: int, full: int) -> int:
    """Return the rounds of a test marked `soak`: `full` with --soak (make soak), else `short`."""
    return full if _soak else short


def some(*cases: Any, whole: Sequence[Any]) -> list[Any]:
    """Return `cases` in `make test`, and `whole` in addition in `make test-all` and on a GPU.

    For example, a kernel runs in two shapes under the interpreter, and in a full matrix on a GPU.
    """
    return [*cases, *whole] if _whole else list(cases)


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows in which every two values of different axes occur together at least once.

    In `make test-all` and on a GPU, return the whole product. The selection is greedy, in a fixed
    order, so that every run has the same rows.
    """
    columns = [list(axis) for axis in axes]
    rows = list(product(*columns))
    if _whole or len(columns) < 3:
        return rows
    left = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, str, int, str]]:
    """Return the pairs of values, as text because some values cannot be hashed."""
    return {(i, repr(row[i]), j, repr(row[j])) for i, j in combinations(range(len(row)), 2)}
