import time

import pytest
import torch

from kvcache import BlockManager, PagedTokenToKVPoolAllocator, ReqHandle, ReqToTokenPool
from tests.helpers.kvcache.blocks import DEVICE, Blocks, make_blocks, make_pool


def admit(blocks: Blocks) -> ReqHandle:
    handle = blocks.manager.admit()
    assert handle is not None
    return handle


def fork(blocks: Blocks, parent: ReqHandle) -> ReqHandle:
    handle = blocks.manager.fork(parent)
    assert handle is not None
    return handle


def test_paged_attention_figure_6() -> None:
    """Block size 4: a prompt of 7 tokens takes two blocks, the 8th token fits, the 9th takes the third."""
    blocks = make_blocks(pages=8, page_size=4)
    request = admit(blocks)
    assert blocks.manager.pages_needed([request], [7]) == 2
    assert blocks.append(request, *range(7))
    assert len(blocks.pages(request)) == 2
    assert blocks.manager.pages_needed([request], [8]) == 0
    assert blocks.append(request, 7)
    assert len(blocks.pages(request)) == 2
    assert blocks.manager.pages_needed([request], [9]) == 1
    assert blocks.append(request, 8)
    assert len(blocks.pages(request)) == 3
    assert blocks.manager.available_pages == 5
    assert blocks.read(request) == list(range(9))
    assert blocks.pool.moves == []


def test_paged_attention_figure_8() -> None:
    """Two samples share a prompt of 7 tokens; the first diverging write copies one block, the second is in place."""
    blocks = make_blocks(pages=8, page_size=4)
    a1 = admit(blocks)
    blocks.append(a1, *range(7))
    a2 = fork(blocks, a1)
    block_7, block_1 = blocks.pages(a1)
    assert blocks.pages(a2) == [block_7, block_1]
    assert blocks.allocator.ref_counts([block_7, block_1]).tolist() == [2, 2]
    assert blocks.manager.available_pages == 6

    assert blocks.manager.pages_needed([a1], [8]) == 1
    blocks.append(a1, 100)
    assert blocks.pool.moves == [3]  # the three prompt tokens of the last block
    assert blocks.pages(a1)[0] == block_7
    assert blocks.pages(a1)[1] != block_1
    assert blocks.allocator.ref_counts([block_7, block_1]).tolist() == [2, 1]

    assert blocks.manager.pages_needed([a2], [8]) == 0
    blocks.append(a2, 200)
    assert blocks.pool.moves == [3]
    assert blocks.pages(a2) == [block_7, block_1]
    assert blocks.read(a1) == [*range(7), 100]
    assert blocks.read(a2) == [*range(7), 200]
    assert blocks.manager.available_pages == 5
    blocks.manager.check_integrity()


def test_paged_attention_figure_9() -> None:
    """Beam width 4: candidates 1 and 2 of the last step bring forth the next four; 0 and 3 die with their blocks."""
    blocks = make_blocks(pages=20, page_size=2, rows=8)
    root = admit(blocks)
    blocks.append(root, 0, 1)  # the prompt, shared by all
    beams = [root] + [fork(blocks, root) for _ in range(3)]
    for i, beam in enumerate(beams):
        blocks.append(beam, 10 + i, 20 + i)
    assert blocks.manager.available_pages == 20 - 5
    dead = {blocks.pages(beams[0])[1], blocks.pages(beams[3])[1]}
    kept = [blocks.pages(beams[1]), blocks.pages(beams[2])]

    survivors = [beams[1], beams[2], fork(blocks, beams[1]), fork(blocks, beams[2])]
    free_before = set(blocks.allocator._free[: blocks.manager.available_pages].tolist())
    blocks.manager.release(beams[0])
    blocks.manager.release(beams[3])
    assert set(blocks.allocator._free[: blocks.manager.available_pages].tolist()) - free_before == dead
    assert blocks.allocator.ref_counts(kept[0]).tolist() == [4, 2]
    assert blocks.allocator.ref_counts(kept[1]).tolist() == [4, 2]

    for i, beam in enumerate(survivors):
        blocks.append(beam, 30 + i)
    assert [blocks.read(s) for s in survivors] == [
        [0, 1, 11, 21, 30],
        [0, 1, 12, 22, 31],
        [0, 1, 11, 21, 32],
        [0, 1, 12, 22, 33],
    ]
    assert blocks.pool.moves == []  # their last blocks were full
    blocks.manager.check_integrity()


def test_a_group_forked_from_one_prompt_copies_for_all_but_the_last() -> None:
    blocks = make_blocks(pages=12, page_size=4)
    prompt = admit(blocks)
    blocks.append(prompt, 0, 1, 2, 3, 4)
    group = [prompt] + [fork(blocks, prompt) for _ in range(3)]
    assert blocks.manager.available_pages == 10
    assert blocks.manager.pages_needed(group, [6, 6, 6, 6]) == 3
    loc = blocks.manager.extend(group, [6, 6, 6, 6])
    assert loc is not None
    assert len(loc) == 4
    blocks.write(loc, [50, 51, 52, 53])
    assert blocks.pool.moves == [3]  # one call, one token of each of three copies
    assert blocks.manager.available_pages == 7
    assert [blocks.read(h) for h in group] == [[0, 1, 2, 3, 4, 50 + i] for i in range(4)]
    blocks.manager.check_integrity()


def test_part_of_a_group_writes() -> None:
    """Two of three owners write: both copy, the idle third keeps the page. Order of slots = order of handles."""
    blocks = make_blocks(pages=12, page_size=4)
    prompt = admit(blocks)
    blocks.append(prompt, 0, 1, 2)
    idle, writer = fork(blocks, prompt), fork(blocks, prompt)
    other = admit(blocks)
    loc = blocks.manager.extend([writer, other, idle, prompt], [9, 2, 3, 4])
    assert loc is not None
    blocks.write(loc, [*range(10, 16), 90, 91, 70])
    assert blocks.read(writer) == [0, 1, 2, *range(10, 16)]
    assert blocks.read(other) == [90, 91]
    assert blocks.read(idle) == [0, 1, 2]
    assert blocks.read(prompt) == [0, 1, 2, 70]
    assert blocks.pool.moves == [6]
    blocks.manager.check_integrity()


def test_short_of_pages_changes_nothing() -> None:
    blocks = make_blocks(pages=3, page_size=4)
    a = admit(blocks)
    blocks.append(a, 0, 1, 2, 3, 4)
    b = fork(blocks, a)
    before = blocks.state()
    # one copy and one new page are needed, one page is there
    assert blocks.manager.pages_needed([a, b], [6, 9]) == 2
    assert blocks.manager.extend([a, b], [6, 9]) is None
    assert blocks.state() == before
    assert blocks.pool.moves == []
    assert blocks.manager.extend([a, b], [6, 8]) is not None
    assert blocks.manager.available_pages == 0


def test_no_row_left() -> None:
    blocks = make_blocks(pages=4, page_size=4, rows=2)
    a = admit(blocks)
    blocks.append(a, 0, 1)
    b = admit(blocks)
    before = blocks.state()
    assert blocks.manager.admit() is None
    assert blocks.manager.fork(a) is None
    assert blocks.state() == before
    blocks.manager.release(b)
    assert blocks.read(fork(blocks, a)) == [0, 1]


def test_fork_of_an_empty_sequence_and_no_growth() -> None:
    blocks = make_blocks(pages=4, page_size=4)
    a = admit(blocks)
    b = fork(blocks, a)
    for lens in ([0, 0], [3, 0], [3, 0]):
        loc = blocks.manager.extend([a, b], lens)
        assert loc is not None
    assert loc.tolist() == []
    assert loc.dtype == torch.int64
    nothing = blocks.manager.extend([], [])
    assert nothing is not None
    assert len(nothing) == 0
    assert blocks.manager.seq_len(b) == 0
    blocks.manager.check_integrity()


def test_release_gives_all_back() -> None:
    blocks = make_blocks(pages=6, page_size=3)
    a = admit(blocks)
    blocks.append(a, *range(7))
    b = fork(blocks, a)
    blocks.manager.release(a)
    assert blocks.manager.available_pages == 3
    blocks.append(b, 7)
    assert blocks.pool.moves == []  # b had become the only owner
    assert blocks.read(b) == list(range(8))
    blocks.manager.release(b)
    assert blocks.manager.available_pages == blocks.manager.total_pages == 6
    blocks.manager.check_integrity()
    for use in (blocks.manager.seq_len, blocks.manager.release, blocks.manager.fork):
        with pytest.raises(ValueError, match="stale"):
            use(a)


def test_a_failed_copy_leaves_the_sequences_as_they_were() -> None:
    blocks = make_blocks(pages=8, page_size=4)
    a = admit(blocks)
    blocks.append(a, 0, 1, 2, 3, 4, 5)
    b = fork(blocks, a)
    blocks.pool.fail_next_move = True
    with pytest.raises(torch.OutOfMemoryError):
        blocks.manager.extend([a], [7])
    blocks.manager.check_integrity()
    assert blocks.manager.available_pages == 6
    assert blocks.read(a) == blocks.read(b) == [0, 1, 2, 3, 4, 5]
    assert blocks.append(a, 6)
    assert blocks.read(a) == [0, 1, 2, 3, 4, 5, 6]


def test_mistakes_raise_and_change_nothing() -> None:
    blocks = make_blocks(pages=40, page_size=4, max_context_len=20)
    a, b, gone = admit(blocks), admit(blocks), admit(blocks)
    blocks.append(a, 0, 1, 2)
    blocks.manager.release(gone)
    before = blocks.state()
    for handles, lens, message in (
        ([a, b], [2, 4], "can't shrink from 3 to 2"),
        ([b, a], [4, 21], "max_context_len is 20"),
        ([a, b, a], [4, 4, 5], "twice in one batch"),
        ([a, b], [4], "2 handles but 1 new lengths"),
        ([b, gone], [1, 1], "stale"),
        ([b], [1.5], "one-dimensional integers"),
    ):
        for call in (blocks.manager.extend, blocks.manager.pages_needed):
            with pytest.raises(ValueError, match=message):
                call(handles, lens)  # type: ignore[arg-type]
    assert blocks.state() == before
    assert blocks.manager.extend([a], [20]) is not None


def test_parts_must_share_a_device() -> None:
    with pytest.raises(ValueError, match="use one device"):
        BlockManager(
            ReqToTokenPool(2, 8, "meta"), PagedTokenToKVPoolAllocator(8, 4, DEVICE), make_pool(size=8, page_size=4)
        )


@pytest.mark.parametrize("harm", ["table", "owner", "length", "twice"])
def test_check_integrity_sees_damage(harm: str) -> None:
    blocks = make_blocks(pages=6, page_size=2)
    a = admit(blocks)
    blocks.append(a, 0, 1, 2)
    blocks.manager.check_integrity()
    if harm == "table":
        blocks.table.req_to_token[a.row, 1] += 1
    elif harm == "owner":
        blocks.allocator.share([blocks.pages(a)[0]])
    elif harm == "length":
        blocks.manager._lens[a.row] = 2
    else:
        blocks.manager._pages[a.row, 1] = blocks.manager._pages[a.row, 0]
    with pytest.raises(AssertionError):
        blocks.manager.check_integrity()


def test_a_decode_step_costs_well_under_a_millisecond_of_python() -> None:
    blocks = make_blocks(pages=400, page_size=16, rows=64, max_context_len=1024)
    handles = [admit(blocks) for _ in range(64)]
    blocks.manager.extend(handles, [20] * 64)
    times = []
    for length in range(21, 61):
        start = time.thread_time()
        assert blocks.manager.extend(handles, [length] * 64) is not None
        times.append(time.thread_time() - start)
    assert min(times) < 2e-3  # of CPU time; about 0.15 ms on an idle core
