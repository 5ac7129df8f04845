"""Head slices by brute force."""

import pytest

from kvcache.staging import compute_head_slice_params, head_writers, heads_per_rank

SIZES = range(1, 9)
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40)


def held(size: int, rank: int, total: int) -> list[int]:
    """The heads of a rank, counted out: heads dealt to ranks in order, or ranks to heads."""
    if total >= size:
        return [head for head in range(total) if head * size // total == rank]
    return [rank * total // size]


def divides(size: int, total: int) -> bool:
    return total % size == 0 or size % total == 0


@pytest.mark.parametrize("total", HEADS)
def test_every_head_of_every_destination_has_one_writer(total: int) -> None:
    for src_size in SIZES:
        for dst_size in SIZES:
            if not (divides(src_size, total) and divides(dst_size, total)):
                with pytest.raises(ValueError, match=f"{total} KV heads can't be split over"):
                    compute_head_slice_params(src_size, dst_size, 0, 0, total)
                continue
            for dst in range(dst_size):
                check_destination(src_size, dst_size, dst, total)


def check_destination(src_size: int, dst_size: int, dst: int, total: int) -> None:
    got: list[int | None] = [None] * len(held(dst_size, dst, total))
    sent = []
    for src in range(src_size):
        start, count, dst_start, same = compute_head_slice_params(src_size, dst_size, src, dst, total)
        assert count == same >= 0
        if count:
            sent.append((src, start, dst_start, count))
        for i in range(count):
            assert got[dst_start + i] is None  # no other writer
            got[dst_start + i] = held(src_size, src, total)[start + i]
    assert got == held(dst_size, dst, total)  # as slicing the full tensor
    writers = head_writers(src_size, dst_size, dst, total)
    assert list(writers) == sent
    assert [w.dst_head_start for w in writers] == [sum(w.num_heads for w in writers[:i]) for i in range(len(writers))]
    assert heads_per_rank(dst_size, total) == len(got)


def test_worked_examples() -> None:
    assert compute_head_slice_params(4, 2, 3, 1, 8) == (0, 2, 2, 2)
    assert compute_head_slice_params(2, 4, 1, 3, 8) == (2, 2, 0, 2)
    assert compute_head_slice_params(4, 2, 3, 0, 8) == (0, 0, 0, 0)
    assert compute_head_slice_params(3, 2, 1, 1, 6) == (1, 1, 0, 1)  # sizes that don't divide each other
    # two heads on eight ranks: of four that hold head 1, one writes
    assert [compute_head_slice_params(8, 1, src, 0, 2)[1] for src in range(8)] == [1, 0, 0, 0, 1, 0, 0, 0]
    # and destinations are dealt out among replicas
    assert [head_writers(4, 4, dst, 1)[0].src_tp_rank for dst in range(4)] == [0, 1, 2, 3]


def test_refused() -> None:
    for arguments, match in (
        ((4, 2, 0, 0, 6), "6 KV heads can't be split over source tensor-parallel size 4"),
        ((2, 4, 0, 0, 6), "6 KV heads can't be split over destination tensor-parallel size 4"),
        ((2, 2, 2, 0, 4), "source rank 2 is outside"),
        ((2, 2, 0, -1, 4), "destination rank -1 is outside"),
        ((0, 2, 0, 0, 4), "must be positive"),
        ((2, 2, 0, 0, 0), "must be positive"),
    ):
        with pytest.raises(ValueError, match=match):
            compute_head_slice_params(*arguments)
