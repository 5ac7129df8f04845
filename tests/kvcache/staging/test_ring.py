"""The staging ring: worked steps, and a model of its writers and reader for safety and liveness."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.staging import ALLOC_OVERSIZED, StagingAllocator, Watermark, may_fill, offset_to_send
from tests.helpers.effort import rounds
from tests.helpers.kvcache.ring import Deadlock, Overlap, play


class PromisesAtHead(StagingAllocator):
    """The mistake that the design names: an empty ring goes on in its round, with the watermark at its head."""

    def _restart(self) -> None:
        self.watermark = Watermark(self._round, self._head)


class FreesOutOfOrder(StagingAllocator):
    """The watermark moves to the range after the one freed, over ranges that are still read."""

    def free(self, id: int) -> Watermark:
        after = next((one for one in self._order if one.id > id), None)
        before = self.watermark
        self.watermark = max(before, super().free(id))
        if after is not None:
            self.watermark = max(self.watermark, Watermark(after.round, after.offset))
        return self.watermark


@pytest.mark.soak
@settings(max_examples=rounds(150, 20_000))
@given(
    size=st.integers(1, 64),
    alignment=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.integers(1, 70), max_size=25),
    turns=st.randoms(use_true_random=False),
)
def test_never_overlaps_and_always_finishes(size: int, alignment: int, sizes: list[int], turns: random.Random) -> None:
    play(StagingAllocator(size, alignment), sizes, turns)


def failures(ring: type[StagingAllocator], error: type[Exception], runs: int) -> int:
    """Of so many random runs, how many fail so; what else fails is raised."""
    count = 0
    for seed in range(runs):
        turns = random.Random(seed)
        sizes = [turns.randint(1, 60) for _ in range(20)]
        try:
            play(ring(turns.randint(60, 100), 4), sizes, turns)
        except error:
            count += 1
    return count


def test_the_model_catches_the_known_mistakes() -> None:
    assert failures(PromisesAtHead, Deadlock, 1000) > 20
    assert failures(FreesOutOfOrder, Overlap, 200) > 20
    assert failures(StagingAllocator, AssertionError, 1000) == 0


def test_the_model_waits_in_more_than_one_round() -> None:
    """Else the tests above would not show that promises beyond the ring are kept."""
    assert max(play(StagingAllocator(64, 1), [40] * 10, random.Random(seed)) for seed in range(20)) > 3


def test_a_ring_step_by_step() -> None:
    ring = StagingAllocator(100, alignment=16)
    a, b, c = ring.assign(20), ring.assign(50), ring.assign(40)
    assert (a, b) == ((0, 0, 0), (1, 32, 0))
    assert c == (2, 0, 1)  # 96 + 40 does not fit behind: promised over a and b
    assert ring.watermark == (0, 0)
    assert not may_fill(1, 40, ring.watermark)
    assert ring.free(1) == (0, 0)  # out of order: a is still there
    assert ring.free(0) == (1, 0)
    assert may_fill(1, 40, ring.watermark)
    assert ring.assign(101) is None
    assert ring.outstanding == 1
    assert ring.free(2) == (2, 0)  # empty: a new round, from its beginning
    assert ring.assign(100) == (3, 0, 2)
    assert may_fill(2, 100, ring.watermark)


def test_ready_and_sent_as_the_design_says() -> None:
    assert may_fill(0, 10**12, Watermark(0, 0))
    assert [may_fill(3, 64, Watermark(*at)) for at in ((1, 99), (2, 63), (2, 64), (3, 0))] == [False, False, True, True]
    assert not may_fill(1, 1, Watermark(0, 0))
    ring = StagingAllocator(2**40)
    first, second = ring.assign(2**33 + 1), ring.assign(1)
    assert second is not None
    assert second.offset == 2**33 + 256
    assert offset_to_send(first) == 0
    assert offset_to_send(ring.assign(2**40 + 1)) == ALLOC_OVERSIZED == -2


def test_what_is_wrong_is_named_and_changes_nothing() -> None:
    ring = StagingAllocator(64, 1)
    ring.assign(10)
    ring.assign(10)
    ring.free(1)
    before = {name: repr(value) for name, value in vars(ring).items()}
    for id in (1, 2, -1):
        with pytest.raises(ValueError, match=f"range {id} is not assigned"):
            ring.free(id)
    for nbytes in (0, -5):
        with pytest.raises(ValueError, match=f"{nbytes} bytes"):
            ring.assign(nbytes)
    assert ring.assign(65) is None
    assert {name: repr(value) for name, value in vars(ring).items()} == before
    with pytest.raises(ValueError, match="alignment must be a power of two, got 24"):
        StagingAllocator(64, 24)
    with pytest.raises(ValueError, match="size_bytes must be positive, got 0"):
        StagingAllocator(0)
