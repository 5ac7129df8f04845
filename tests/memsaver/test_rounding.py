"""Sizes in whole units."""

from __future__ import annotations

import pytest

from memsaver.rounding import round_up


@pytest.mark.parametrize("unit", [1, 3, 64, 4096, 2 << 20])
def test_the_least_multiple_that_is_not_below(unit: int) -> None:
    for nbytes in {0, 1, unit - 1, unit, unit + 1, 5 * unit - 1, (1 << 62) + 1}:  # the last: beyond what a float holds
        got = round_up(nbytes, unit)
        assert type(got) is int and got % unit == 0 and nbytes <= got < nbytes + unit
