"""Parts of a sequence by position: cutting its end off, and its token ids on the CPU."""

import pytest

from tests.helpers.kvcache.blocks import make_blocks


def test_truncate_frees_what_lies_past_the_new_end() -> None:
    blocks = make_blocks(pages=6, page_size=4)
    a = blocks.manager.admit()
    assert a is not None
    blocks.append(a, *range(10))
    blocks.manager.truncate(a, 10)
    blocks.manager.truncate(a, 5)
    assert blocks.allocator.available_pages == 4
    assert blocks.read(a) == [0, 1, 2, 3, 4]
    assert blocks.append(a, 50, 60)
    assert blocks.read(a) == [0, 1, 2, 3, 4, 50, 60]
    blocks.manager.truncate(a, 0)
    assert blocks.allocator.available_pages == 6
    blocks.manager.check_integrity()


def test_truncate_of_a_fork_leaves_the_other_as_it_was() -> None:
    blocks = make_blocks(pages=6, page_size=4)
    a = blocks.manager.admit()
    assert a is not None
    blocks.append(a, *range(10))
    b = blocks.manager.fork(a)
    assert b is not None
    blocks.manager.truncate(b, 6)
    assert blocks.append(b, 70)  # into a page that is shared: copied
    assert blocks.append(a, 80)  # into a page of its own again: in place
    assert blocks.read(a) == [*range(10), 80]
    assert blocks.read(b) == [*range(6), 70]
    assert blocks.allocator.available_pages == 2
    blocks.manager.check_integrity()


def test_token_ids_are_those_of_the_table() -> None:
    blocks = make_blocks(pages=6, page_size=4)
    a = blocks.manager.admit()
    assert a is not None
    blocks.append(a, *range(9))
    assert blocks.manager.token_ids(a, 2, 9).tolist() == blocks.table.req_to_token[a.row, 2:9].tolist()
    assert blocks.manager.token_ids(a, 4, 4).tolist() == []


def test_ranges_outside_a_sequence_raise() -> None:
    blocks = make_blocks(pages=6, page_size=4)
    a = blocks.manager.admit()
    assert a is not None
    blocks.append(a, *range(5))
    before = blocks.state()
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ValueError, match="has 5 tokens, asked for"):
            blocks.manager.token_ids(a, start, stop)
    for length in (-1, 6):
        with pytest.raises(ValueError, match=f"has 5 tokens and can't be cut to {length}"):
            blocks.manager.truncate(a, length)
    assert blocks.state() == before
    blocks.manager.release(a)
    with pytest.raises(ValueError, match="stale"):
        blocks.manager.truncate(a, 0)
