"""The staging ring against a model of its writers and reader, and head slices by brute force."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.staging import StagingAllocator, Watermark, head_writers, heads_per_rank, may_fill
from tests.helpers.case_selection import rounds


class Transfers:
    """A model of the ring's reader and writers, which assign, fill and free ranges in random order.

    Writers may know an outdated watermark.
    """

    def __init__(self, ring: StagingAllocator, sizes: list[int]) -> None:
        self.ring, self.todo = ring, list(sizes)
        # Ranges assigned and not filled: id -> offset, end, round.
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.filled: dict[int, tuple[int, int]] = {}
        # The range that occupies each byte, from its filling until it is freed.
        self.owner: list[int | None] = [None] * ring.size_bytes
        # Watermarks sent to the writers, and the index of the one that they know.
        self.watermarks: list[Watermark] = [ring.watermark]
        self.known = 0

    def turn(self, dice: random.Random) -> None:
        known = self.watermarks[self.known]
        moves: list[Callable[[], None]] = [self.assign] if self.todo else []
        moves += [
            lambda id=id: self.fill(id)
            for id, (_, end, at) in self.waiting.items()
            if may_fill(at, end, known)
        ]
        moves += [lambda id=id: self.free(id) for id in self.filled]
        moves += [
            lambda at=at: setattr(self, "known", at)
            for at in range(self.known + 1, len(self.watermarks))
        ]
        assert moves, f"{self.waiting} wait at watermark {self.ring.watermark}: a deadlock"
        dice.choice(moves)()

    def assign(self) -> None:
        nbytes = self.todo.pop()
        assigned = self.ring.assign(nbytes)
        assert (assigned is None) == (nbytes > self.ring.size_bytes)
        if assigned is not None:
            id, offset, round = assigned
            assert offset % self.ring.alignment == 0
            assert 0 <= offset <= offset + nbytes <= self.ring.size_bytes
            self.waiting[id] = (offset, offset + nbytes, round)

    def fill(self, id: int) -> None:
        offset, end, _ = self.waiting.pop(id)
        assert set(self.owner[offset:end]) == {None}, (
            f"range {id} may be filled over bytes that are not read yet"
        )
        self.owner[offset:end] = [id] * (end - offset)
        self.filled[id] = (offset, end)

    def free(self, id: int) -> None:
        offset, end = self.filled.pop(id)
        self.owner[offset:end] = [None] * (end - offset)
        self.watermarks.append(self.ring.free(id))
        assert self.ring.watermark == self.watermarks[-1] >= self.watermarks[-2]


@pytest.mark.soak
@settings(max_examples=rounds(200, 20_000))
@given(
    size=st.integers(1, 64),
    alignment=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.integers(1, 70), max_size=25),
    dice=st.randoms(use_true_random=False),
)
def test_ring_never_overlaps_ranges_and_never_deadlocks(
    size: int, alignment: int, sizes: list[int], dice: random.Random
) -> None:
    model = Transfers(StagingAllocator(size, alignment), sizes)
    while model.todo or model.ring.outstanding:
        model.turn(dice)


def test_free_refuses_ranges_that_are_not_assigned() -> None:
    ring = StagingAllocator(64, 1)
    ring.assign(10)
    ring.assign(10)
    ring.free(1)
    for id in (1, 2, -1):
        with pytest.raises(AssertionError, match=f"range {id} is not assigned"):
            ring.free(id)
    assert ring.outstanding == 1


# ---------------------------------------------------------------- heads

SIZES = range(1, 9)
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40)


def held(size: int, rank: int, total: int) -> list[int]:
    """Return the heads of a rank by counting through all heads or ranks."""
    if total >= size:
        return [head for head in range(total) if head * size // total == rank]
    return [rank * total // size]


@pytest.mark.parametrize("total", HEADS)
def test_every_head_of_every_destination_has_one_writer(total: int) -> None:
    for src_size in SIZES:
        for dst_size in SIZES:
            if any(total % size and size % total for size in (src_size, dst_size)):
                with pytest.raises(ValueError, match=f"{total} KV heads can't be split over"):
                    head_writers(src_size, dst_size, 0, total)
                continue
            for dst in range(dst_size):
                check_destination(src_size, dst_size, dst, total)


def check_destination(src_size: int, dst_size: int, dst: int, total: int) -> None:
    got: list[int | None] = [None] * len(held(dst_size, dst, total))
    writers = head_writers(src_size, dst_size, dst, total)
    before = 0
    for src, start, dst_start, count in writers:
        assert dst_start == before and count > 0
        for i in range(count):
            assert got[dst_start + i] is None  # no other writer
            got[dst_start + i] = held(src_size, src, total)[start + i]
        before += count
    assert got == held(dst_size, dst, total)  # as slicing the full tensor
    sources = [writer.src_tp_rank for writer in writers]
    assert sources == sorted(set(sources))
    assert heads_per_rank(dst_size, total) == len(got)


def test_source_replicas_share_the_destinations() -> None:
    # With two heads on eight ranks, one of the four replicas of each head writes.
    assert [writer.src_tp_rank for writer in head_writers(8, 1, 0, 2)] == [0, 4]
    assert [head_writers(4, 4, dst, 1)[0].src_tp_rank for dst in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("arguments", [(2, 2, -1, 4), (2, 0, 0, 4), (2, 4, 0, 6)])
def test_head_writers_refuses_wrong_ranks_and_sizes(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="destination"):
        head_writers(*arguments)
