"""What every pool of token rows does: accounting, padding page, rows, copies, moves, pauses,
mistakes.
"""

from typing import Any

import pytest
import torch

from kvcache.pools import MHATokenToKVPool
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE, make_blocks, make_pool
from tests.helpers.kvcache.pools import (
    BF16,
    FP8,
    POOLS,
    PS,
    SLOTS,
    at,
    make,
    mha,
    rows_for,
    stored,
    write,
)


@pytest.fixture(params=list(POOLS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_bytes_are_exact_on_the_tag_and_parts_do_not_overlap(name: str, saver: MemorySaver) -> None:
    pool, per_token = make(name, saver), POOLS[name][1]
    assert pool.bytes_per_token == per_token
    expected = per_token * SLOTS if name != "swa" else per_token // 2 * (SLOTS + 16 + PS)
    assert pool.nbytes == expected == sum(part.numel() for part in stored(pool))
    with pytest.raises(ValueError, match="use one device for both"):
        make_pool(size=8, page_size=4, saver=saver, device="meta")
    report = saver.report().tags["kv_cache"]
    assert saver.tags == ["kv_cache"] and report.content == "discard"
    assert expected <= report.live_bytes <= expected + 4096
    page = saver.backend.granularity
    # in whole extents there
    assert report.committed_bytes == -(-report.live_bytes // page) * page or DEVICE == "cuda"
    for part in stored(pool):
        assert 0 <= saver.offset_of(part) < report.committed_bytes
        part.zero_()
    for part in stored(pool):
        part.add_(1)
    assert all((part == 1).all() for part in stored(pool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("slot_major", [False, True])
def test_rows_come_back_bit_for_bit_and_no_other_slot_changes(
    dtype: torch.dtype, slot_major: bool
) -> None:
    fields: Any = {"num_kv_heads": 3, "head_dim": 4, "v_head_dim": 8}
    fields |= {"dtype": dtype, "slot_major": slot_major}
    pool = make_pool(size=8, page_size=2, **fields)
    before = [part.fill_(7).clone() for part in stored(pool)]
    generator = torch.Generator().manual_seed(0)
    # every bit pattern is fair: NaN with payload, infinities, denormals
    raw = [
        torch.randint(0, 256, (4, 3, w * dtype.itemsize), dtype=torch.uint8, generator=generator)
        for w in (4, 8)
    ]
    k, v = (part.to(DEVICE).view(dtype) for part in raw)
    loc = [9, 2, 5, 3]
    pool.set_kv_buffer(1, at(*loc), k, v)
    for part, old, rows, given in zip(stored(pool), before, raw, (k, v), strict=True):
        old[1, loc] = rows.to(DEVICE)
        assert torch.equal(part, old)
        assert torch.equal(given.view(torch.uint8), rows.to(DEVICE)), "what was given is modified"
    for view, old in zip(pool.get_kv_buffer(1), before, strict=True):
        assert view.dtype == dtype and torch.equal(view.view(torch.uint8), old[1])
        # kernels take the stride between slots
        assert view.stride()[1:] == view[0].contiguous().stride()
    other = make_pool(size=8, page_size=2, **fields | {"slot_major": not slot_major})
    assert pool.format() == other.format()


def test_page_0_is_zero_first_and_after_every_resume(name: str, saver: MemorySaver) -> None:
    """Paused and resumed at any step: fresh, written, paused twice; rows written afterwards are
    right.
    """
    pool = make(name, saver)
    assert not any(part[:, :PS].any() for part in stored(pool))
    addresses = [part.data_ptr() for part in stored(pool)]
    nbytes = pool.nbytes
    for step in range(3):
        saver.pause("kv_cache")
        assert saver.report().tags["kv_cache"].committed_bytes == 0 and pool.nbytes == nbytes
        saver.resume("kv_cache")
        for part in stored(pool):
            part.fill_(255)  # NaN in every dtype: what undefined may be
        pool.on_resume()
        assert addresses == [part.data_ptr() for part in stored(pool)]
        assert not any(part[:, :PS].any() for part in stored(pool))
        assert all((part[:, PS:] == 255).all() for part in stored(pool))
        loc = at(5, 19, 8)
        write(pool, loc, step)
        for layer in range(2):
            k, v = pool.get_rows(layer, loc)
            assert k.isfinite().all() and v.isfinite().all()
            assert not any(rows.any() for rows in pool.get_rows(layer, at(0, 1, 3)))


def test_mistakes_write_nothing(name: str) -> None:
    pool: Any = make(name)
    for part in stored(pool):
        part.fill_(9)
    k, v = rows_for(pool, 2)
    loc = at(4, 5)
    for layer in (-1, 2):
        for call, arguments in (
            (pool.set_kv_buffer, (loc, k, v)),
            (pool.get_kv_buffer, ()),
            (pool.get_rows, (loc,)),
            (pool.scales, ()),
        ):
            with pytest.raises(ValueError, match=f"layer {layer} "):
                call(layer, *arguments)
    for bad, message in (
        ((k.double(), v.double()), "k is torch.float64 .* the pool takes"),
        ((k, v.double()), "v is torch.float64"),
        ((k[:1], v), "k is .*; the pool takes"),
        ((k.to("meta"), v), "k is .* on meta; the pool takes .* on"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.set_kv_buffer(0, loc, *bad)
    for wrong in (loc.int(), loc.view(1, 2)):
        for call, arguments in (
            (pool.set_kv_buffer, (0, wrong, k, v)),
            (pool.get_rows, (0, wrong)),
            (pool.move_kv_cache, (wrong, wrong)),
        ):
            with pytest.raises(ValueError, match="; the pool takes torch.int64"):
                call(*arguments)
    assert all((part == 9).all() for part in stored(pool))


# ---------------------------------------------------------------- on a saver's tag


@pytest.mark.parametrize("two", [{}, {"window": 64, "window_pages": 14}])
def test_sequences_come_go_and_go_on_through_pauses(
    two: dict[str, int], saver: MemorySaver
) -> None:
    """Bookkeeping without page copies touches no paged memory: it works at any time, and a pause
    keeps all of it.
    """
    blocks = make_blocks(pages=16, page_size=16, saver=saver, **two)
    a, gone = blocks.admit(), blocks.admit()
    blocks.append(a, *range(20))
    blocks.append(gone, *range(5))
    b = blocks.fork(a)
    before = blocks.state([a, b])
    saver.pause("kv_cache")
    blocks.manager.check_integrity()
    assert blocks.state([a, b]) == before
    blocks.manager.release(gone)
    c = blocks.admit()
    assert blocks.manager.extend([c], [33]) is not None
    blocks.manager.check_integrity()
    saver.resume("kv_cache")
    blocks.pool.on_resume()
    # contents are gone, the sequences go on: write them again through the table and diverge
    for handle, count in ((a, 20), (c, 33)):
        blocks.write(blocks.table.req_to_token[handle.row, :count].long(), range(count))
    assert blocks.append(a, 100)
    assert blocks.append(b, 200)
    assert (blocks.values(a), blocks.values(b)) == ([*range(20), 100], [*range(20), 200])
    assert blocks.values(c) == [*range(33)]


# ---------------------------------------------------------------- slots one after the other, whose
# end can move


def test_resize_keeps_addresses_and_what_stays(saver: MemorySaver) -> None:
    big = 64 * 1024
    pool = MHATokenToKVPool(mha(torch.bfloat16, size=big, slot_major=True), saver)
    granularity = saver.backend.granularity
    full = pool.nbytes
    write(pool, at(4, 900))
    before, address = pool.get_rows(1, at(4, 900)), pool.get_kv_buffer(0)[0].data_ptr()
    assert pool.resize(1024) == pool.size
    assert 1024 <= pool.size <= 1024 + granularity // pool.bytes_per_token or DEVICE == "cuda"
    assert (
        pool.nbytes
        <= saver.report().tags["kv_cache"].committed_bytes
        <= pool.nbytes + granularity + 4096
    )
    small = pool.size
    assert pool.resize(big) == pool.size == big
    assert pool.nbytes == full
    assert pool.get_kv_buffer(0)[0].data_ptr() == address
    assert all(torch.equal(a, b) for a, b in zip(before, pool.get_rows(1, at(4, 900)), strict=True))
    write(pool, at(big))
    for wrong in (big + PS, 0, -PS):
        with pytest.raises(ValueError, match="can't resize"):
            pool.resize(wrong)
    assert pool.size == big
    pool.resize(1024)
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    pool.on_resume()
    assert pool.size in (small, big)
    assert not pool.get_kv_buffer(0)[0][:PS].any()


def test_a_resume_with_less_tells_the_size() -> None:
    if DEVICE == "cuda":
        pytest.skip("the limit is in whole extents there")
    saver = MemorySaver(device="cpu", limit_bytes=32 << 20)
    pool = MHATokenToKVPool(mha(torch.bfloat16, size=64 * 1024, slot_major=True), saver)  # 24 MiB
    saver.pause("kv_cache")
    other = saver.empty((20 << 20,), torch.uint8, tag="other")
    saver.resume("kv_cache", at_least=1 << 20)
    pool.on_resume()
    assert 0 < pool.size <= (12 << 20) // pool.bytes_per_token
    assert pool.size % PS == 0
    assert pool.nbytes <= saver.report().tags["kv_cache"].committed_bytes <= 12 << 20
    write(pool, at(4, pool.size))
    del other
    saver.close()
