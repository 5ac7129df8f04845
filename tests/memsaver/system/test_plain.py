"""Encoding of plain values as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.staging import HeadSlice
from memsaver.system.plain import Plain
from rollout.process_group import RankAddress
from tests.helpers.memory import uncollected


def test_plain_values_round_trip_and_other_types_are_refused() -> None:
    plain = Plain(RankAddress, HeadSlice)
    value = [
        *(
            None,
            True,
            -3,
            2**64 - 1,
            0.1,
            float("inf"),
            "é",
            b"\0\xff",
            (1, (2,)),
            {1, 2},
            frozenset(),
            {},
            {(1, 2): "x"},
        ),
        RankAddress(host="h", port=1, rank=0, size=2, seconds=1.5),
        HeadSlice(1, 2, 3, 4),
    ]
    assert plain.value(plain.text(value)) == value
    decoded = plain.value(plain.text(value))
    assert [type(item) for item in decoded] == [type(item) for item in value]
    with pytest.raises(TypeError, match="Path is not among the plain values"):
        plain.text(Path())
    for text in ("{", '{"Path": ["/"]}', '{"RankAddress": [1]}', '{"tuple": [], "list": []}'):
        with pytest.raises(ValueError):
            plain.value(text)
    with uncollected(), pytest.raises(ValueError, match="recursion"):
        plain.value("[" * 100_000)
