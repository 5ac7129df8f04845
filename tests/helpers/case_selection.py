"""How much of what a test could try it does try: `make test` a covering part, `make test-all` and a
GPU the whole, `make soak` full counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

_soak = False
_whole = False


def choose(*, soak: bool, whole: bool) -> None:
    """By conftest, before test modules are imported."""
    global _soak, _whole
    _soak, _whole = soak, whole


def rounds(short: int, full: int) -> int:
    """How often a test marked `soak` goes round: `full` with --soak (make soak), `short` everywhere
    else.
    """
    return full if _soak else short


def some(*cases: Any, whole: Sequence[Any]) -> list[Any]:
    """`cases` in `make test`, those and `whole` in `make test-all` and on a GPU: two shapes of a
    kernel, say, under the interpreter, and its full matrix on the GPU.
    """
    return [*cases, *whole] if _whole else list(cases)


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every two values of different axes meet at least once; the whole product in
    `make test-all` and on a GPU. Greedy, in a fixed order: the same rows in every run.
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
    """By text: not every value can be hashed."""
    return {(i, repr(row[i]), j, repr(row[j])) for i, j in combinations(range(len(row)), 2)}
