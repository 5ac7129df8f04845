"""Grids: every element of a box once, adjacent where it is said, and as few of them as the strides
allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaver.ops.layout import Grid, blocks, grids, row_major


def places(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Of every element, where it is in each space."""
    return [
        tuple(sum(i * by for i, by in zip(at, space, strict=True)) for space in strides)
        for at in itertools.product(*map(range, shape))
    ]


def covered(found: Sequence[Grid]) -> list[tuple[int, ...]]:
    return [
        tuple(
            start + row * pitch + column
            for start, pitch in zip(grid.starts, grid.pitches, strict=True)
        )
        for grid in found
        for row in range(grid.rows)
        for column in range(grid.width)
    ]


boxes = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), min_size=n, max_size=n
    )
)


@settings(max_examples=150)
@given(dims=boxes, last=st.permutations(range(4)))
def test_every_element_of_a_box_is_in_one_grid(
    dims: list[tuple[int, int, int]], last: list[int]
) -> None:
    """dims: size, and how much larger the whole is in two spaces; a third space has its dimensions
    in another order.
    """
    shape = [size for size, _, _ in dims]
    first, second = (row_major([dim[0] + dim[space] for dim in dims]) for space in (1, 2))
    order = [i for i in last if i < len(shape)]
    by_order = dict(zip(order, row_major([shape[i] for i in order]), strict=True))
    third = [by_order[i] for i in range(len(shape))]
    expected = places(shape, first, second, third)
    found = covered(grids(shape, first, second, third))
    assert sorted(found) == sorted(expected) and len(set(found)) == len(found)


RUN = [Grid(1, 7, (0, 0), (0, 0))]


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        # o_proj [hidden, heads * dim] and down_proj at TP 2: the right half of a shard of rows
        (
            (896, 1792),
            [(3584, 1), (1792, 1), (3584, 1)],
            [Grid(896, 1792, (0, 0, 0), (3584, 1792, 3584))],
        ),
        ((4, 3, 5), [(15, 5, 1), (15, 5, 1)], [Grid(1, 60, (0, 0), (0, 0))]),  # one run is one row
        # in any order of dimensions
        ((5, 4, 3), [(1, 15, 5), (1, 15, 5)], [Grid(1, 60, (0, 0), (0, 0))]),
        ((1, 7), [(1000, 1), (7, 1)], RUN),
        ((7, 1), [(1, 1), (1, 9)], RUN),
        ((), [(), ()], [Grid(1, 1, (0, 0), (0, 0))]),
        ((7, 1), [(3, 1), (1, 1)], [Grid(7, 1, (0, 0), (3, 1))]),  # columns of one element
    ],
)
def test_a_box_is_one_grid(
    shape: tuple[int, ...], strides: list[tuple[int, ...]], expected: list[Grid]
) -> None:
    assert grids(shape, *strides) == expected


@pytest.mark.parametrize(
    ("shape", "target", "count"),
    [
        ((8, 12, 5), (2 * 12 * 5, 5, 1), 1),  # experts [E, 2 I, H] split in dimension 1
        ((8, 12, 5), (12 * 10, 10, 1), 1),  # experts [E, H, I] split in dimension 2
        # ... and by the source in dimension 1: rows along the longer one
        ((8, 12, 5), (24 * 10, 10, 1), 8),
        ((20, 12, 5), (24 * 10, 10, 1), 12),
    ],
)
def test_experts_are_as_few_grids_as_they_can_be(
    shape: tuple[int, ...], target: tuple[int, ...], count: int
) -> None:
    found = grids(shape, row_major(shape), target)
    assert len(found) == count
    assert sorted(covered(found)) == sorted(places(shape, row_major(shape), target))


def test_a_transposed_matrix_is_a_grid_a_column() -> None:
    transposed = grids((30, 40), (40, 1), (1, 30))
    assert {(grid.rows, grid.width) for grid in transposed} == {(40, 1)} and len(transposed) == 30


def test_nothing_and_misfits() -> None:
    assert grids((3, 0, 2), (2, 2, 1)) == []
    for strides in ([], [(1,)], [(3, 1), (1,)]):
        with pytest.raises(ValueError, match="strides of 2 dimensions"):
            grids((2, 3), *strides)


@settings(max_examples=100)
@given(rows=st.integers(0, 9), width=st.integers(0, 9), limit=st.integers(1, 30))
def test_blocks_cut_a_grid(rows: int, width: int, limit: int) -> None:
    seen = []
    for down, across in blocks(rows, width, limit):
        part = list(itertools.product(range(rows)[down], range(width)[across]))
        assert 0 < len(part) <= limit
        seen += part
    assert sorted(seen) == list(itertools.product(range(rows), range(width)))
