"""Features of all token pools: sizes, padding page, rows, pauses, wrong arguments, resizing."""

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


def test_pool_bytes_on_the_tag_are_exact_and_parts_do_not_overlap(
    name: str, saver: MemorySaver
) -> None:
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
    # On a GPU, whole extents are committed.
    assert report.committed_bytes == -(-report.live_bytes // page) * page or DEVICE == "cuda"
    for part in stored(pool):
        assert 0 <= saver.offset_of(part) < report.committed_bytes
        part.zero_()
    for part in stored(pool):
        part.add_(1)
    assert all((part == 1).all() for part in stored(pool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("slot_major", [False, True])
def test_rows_are_stored_bit_exact_and_other_slots_do_not_change(
    dtype: torch.dtype, slot_major: bool
) -> None:
    fields: Any = {"num_kv_heads": 3, "head_dim": 4, "v_head_dim": 8}
    fields |= {"dtype": dtype, "slot_major": slot_major}
    pool = make_pool(size=8, page_size=2, **fields)
    before = [part.fill_(7).clone() for part in stored(pool)]
    generator = torch.Generator().manual_seed(0)
    # Random bit patterns include NaN with payload, infinities and subnormals.
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
        assert torch.equal(given.view(torch.uint8), rows.to(DEVICE)), "the argument was modified"
    for view, old in zip(pool.get_kv_buffer(1), before, strict=True):
        assert view.dtype == dtype and torch.equal(view.view(torch.uint8), old[1])
        # Kernels take only the stride between slots as an argument.
        assert view.stride()[1:] == view[0].contiguous().stride()
    other = make_pool(size=8, page_size=2, **fields | {"slot_major": not slot_major})
    assert pool.format() == other.format()


def test_page_0_is_zero_at_first_and_after_every_resume(name: str, saver: MemorySaver) -> None:
    pool = make(name, saver)
    assert not any(part[:, :PS].any() for part in stored(pool))
    addresses = [part.data_ptr() for part in stored(pool)]
    nbytes = pool.nbytes
    for step in range(3):
        saver.pause("kv_cache")
        assert saver.report().tags["kv_cache"].committed_bytes == 0 and pool.nbytes == nbytes
        saver.resume("kv_cache")
        for part in stored(pool):
            part.fill_(255)  # NaN in every dtype, the worst undefined content
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


def test_pools_refuse_wrong_arguments_before_writing(name: str) -> None:
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
            with pytest.raises(ValueError, match="; the pool takes only torch.int64"):
                call(*arguments)
    assert all((part == 9).all() for part in stored(pool))


# ---------------------------------------------------------------- on a saver's tag


@pytest.mark.parametrize("two", [{}, {"window": 64, "window_pages": 14}])
def test_sequences_survive_a_pause_and_can_be_admitted_and_released_in_it(
    two: dict[str, int], saver: MemorySaver
) -> None:
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
    # The contents are lost but the sequences are not. Write the rows again; a and b diverge.
    for handle, count in ((a, 20), (c, 33)):
        blocks.write(blocks.table.req_to_token[handle.row, :count].long(), range(count))
    assert blocks.append(a, 100)
    assert blocks.append(b, 200)
    assert (blocks.values(a), blocks.values(b)) == ([*range(20), 100], [*range(20), 200])
    assert blocks.values(c) == [*range(33)]


# ---------------------------------------------------------------- slot-major pools


def test_resize_keeps_addresses_and_remaining_rows(saver: MemorySaver) -> None:
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


def test_resume_with_less_memory_reduces_the_size() -> None:
    if DEVICE == "cuda":
        pytest.skip("on a GPU, the limit is in whole extents")
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
