"""Pools whose slots lie one after the other, so that their end can move."""

import pytest
import torch

from kvcache import MHATokenToKVPool
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE
from tests.helpers.kvcache.pools import PS, at, mha, new_saver, write


def test_slot_major_rows_equal_layer_major_ones() -> None:
    pools = [MHATokenToKVPool(mha(torch.float16, slot_major=major)) for major in (False, True)]
    loc = at(9, 4, 30)
    for pool in pools:
        write(pool, loc)
        pool.move_kv_cache(at(10, 9), at(9, 4))
    for layer in range(2):
        for a, b in zip(*(pool.get_kv_buffer(layer) for pool in pools), strict=True):
            assert a.shape == b.shape
            assert b.stride()[1:] == a.stride()[1:]  # kernels take the stride between slots
            assert torch.equal(a[at(4, 9, 10, 30)], b[at(4, 9, 10, 30)])
    assert pools[0].get_cpu_copy(loc).format == pools[1].get_cpu_copy(loc).format


def test_resize_keeps_addresses_and_what_stays() -> None:
    saver = new_saver()
    big = 64 * 1024
    pool = MHATokenToKVPool(mha(torch.bfloat16, size=big, slot_major=True), saver)
    granularity = saver.backend.granularity
    full = pool.nbytes
    write(pool, at(4, 900))
    before, address = pool.get_rows(1, at(4, 900)), pool.get_kv_buffer(0)[0].data_ptr()
    assert pool.resize(1024) == pool.size
    assert 1024 <= pool.size <= 1024 + granularity // pool.bytes_per_token or DEVICE == "cuda"
    assert pool.nbytes <= saver.report().tags["kv_cache"].committed_bytes <= pool.nbytes + granularity + 4096
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
    with pytest.raises(ValueError, match="slot_major=True"):
        MHATokenToKVPool(mha(), saver, "other").resize(16)
    saver.close()


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
