from itertools import pairwise

import pytest
import torch

from kvcache.config import store_dtype
from tests.helpers.kvcache.blocks import DEVICE, make_pool

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_one_block_with_views_of_every_layer() -> None:
    pool = make_pool(size=12, page_size=4, num_layers=3, num_kv_heads=2, head_dim=5, v_head_dim=3, dtype=torch.bfloat16)
    k, v = zip(*(pool.get_kv_buffer(layer) for layer in range(3)), strict=True)
    assert all(t.shape == (16, 2, 5) and t.dtype == torch.bfloat16 for t in k)
    assert all(t.shape == (16, 2, 3) for t in v)
    assert len({t.untyped_storage().data_ptr() for t in (*k, *v)}) == 1
    assert pool.nbytes == k[0].untyped_storage().nbytes() == 3 * 16 * 2 * (5 + 3) * 2
    assert pool.nbytes == (pool.size + pool.page_size) * pool.bytes_per_token
    taken = sorted((t.data_ptr(), t.data_ptr() + t.numel() * 2) for t in (*k, *v))
    assert all(end == start for (_, end), (start, _) in pairwise(taken))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    pool = make_pool(size=8, page_size=2, num_kv_heads=3, head_dim=4, v_head_dim=6, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    width = dtype.itemsize
    # every bit pattern is fair: NaN with payload, infinities, denormals
    k = torch.randint(0, 256, (4, 3, 4 * width), dtype=torch.uint8, generator=generator).to(DEVICE).view(dtype)
    v = torch.randint(0, 256, (4, 3, 6 * width), dtype=torch.uint8, generator=generator).to(DEVICE).view(dtype)
    k_before, v_before = bits(k).clone(), bits(v).clone()
    loc = torch.tensor([9, 2, 5, 3], device=DEVICE)
    pool.set_kv_buffer(1, loc, k, v)
    got_k, got_v = pool.get_kv_buffer(1)
    assert got_k.dtype == dtype
    stored = store_dtype(dtype)
    assert torch.equal(bits(got_k.view(stored)[loc]), bits(k))
    assert torch.equal(bits(got_v.view(stored)[loc]), bits(v))
    assert torch.equal(bits(k), k_before)
    assert torch.equal(bits(v), v_before)


def test_a_write_touches_its_slots_only() -> None:
    pool = make_pool(size=4, page_size=2)
    for layer in range(2):
        for buffer in pool.get_kv_buffer(layer):
            buffer.fill_(7)
    pool.set_kv_buffer(0, torch.tensor([3], device=DEVICE), *[torch.ones(1, 1, 2, device=DEVICE)] * 2)
    for layer in range(2):
        for buffer in pool.get_kv_buffer(layer):
            expected = torch.full_like(buffer, 7)
            if layer == 0:
                expected[3] = 1
            assert torch.equal(buffer, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_move_reads_all_before_it_writes(dtype: torch.dtype) -> None:
    pool = make_pool(size=8, page_size=2, v_head_dim=3, dtype=dtype)
    stored = store_dtype(dtype)
    before = []
    for layer in range(2):
        for n, buffer in enumerate(pool.get_kv_buffer(layer)):
            as_stored = buffer.view(stored)
            as_stored.copy_(torch.arange(buffer.numel(), device=DEVICE).view(buffer.shape) + 16 * (2 * layer + n))
            before.append(as_stored.clone())
    tgt, src = [3, 4, 5, 8], [2, 3, 4, 5]
    pool.move_kv_cache(torch.tensor(tgt, device=DEVICE), torch.tensor(src, device=DEVICE))
    for layer in range(2):
        for n, buffer in enumerate(pool.get_kv_buffer(layer)):
            expected = before[2 * layer + n].clone()
            expected[tgt] = before[2 * layer + n][src]
            assert torch.equal(buffer.view(stored), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_0_is_zero_at_first_and_after_a_resume(dtype: torch.dtype) -> None:
    pool = make_pool(size=6, page_size=3, dtype=dtype)
    views = [b.view(store_dtype(dtype)) for layer in range(2) for b in pool.get_kv_buffer(layer)]
    assert not any(v[:3].any() for v in views)
    for v in views:
        v.fill_(1)
    pool.on_resume()
    for v in views:
        assert not v[:3].any()
        assert v[3:].all()


def test_mistakes_say_what_is_wrong() -> None:
    pool = make_pool(size=8, page_size=2, num_kv_heads=2, head_dim=4, v_head_dim=3, dtype=torch.float16)
    loc = torch.tensor([2, 3], device=DEVICE)
    k = torch.zeros(2, 2, 4, dtype=torch.float16, device=DEVICE)
    v = torch.zeros(2, 2, 3, dtype=torch.float16, device=DEVICE)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer {layer} is not in this pool; it holds layers 0\.\.1"):
            pool.set_kv_buffer(layer, loc, k, v)
        with pytest.raises(ValueError, match="not in this pool"):
            pool.get_kv_buffer(layer)
    with pytest.raises(ValueError, match=r"k is torch.float32, the pool stores torch.float16"):
        pool.set_kv_buffer(0, loc, k.float(), v)
    with pytest.raises(ValueError, match=r"v has shape \(2, 2, 4\), needed \(2, 2, 3\)"):
        pool.set_kv_buffer(0, loc, k, k)
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 4\)"):
        pool.set_kv_buffer(0, loc, k[:1], v)
    for wrong in (loc.int(), loc.view(1, 2)):
        with pytest.raises(ValueError, match=r"loc must be int64 \[n\]"):
            pool.set_kv_buffer(0, wrong, k, v)
    with pytest.raises(ValueError, match="must be on the pool's"):
        pool.set_kv_buffer(0, loc, k.to("meta"), v)
    with pytest.raises(ValueError, match="pair them"):
        pool.move_kv_cache(loc, loc[:1])


def test_writing_no_tokens_is_a_no_op() -> None:
    pool = make_pool(size=4, page_size=2)
    none = torch.empty(0, 1, 2, device=DEVICE)
    pool.set_kv_buffer(0, torch.empty(0, dtype=torch.int64, device=DEVICE), none, none)
    assert not pool.get_kv_buffer(0)[0][:2].any()
