"""Features of single kinds of pools: fp8, FP4, latent rows, labels, several kinds of layers."""

from collections.abc import Callable

import pytest
import torch

from kvcache import KVCacheConfig
from kvcache.config import FP4_DTYPE
from kvcache.ops import quant
from kvcache.pools import (
    DoubleSparseTokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
)
from memsaver import MemorySaver
from tests.helpers.kvcache.blocks import DEVICE
from tests.helpers.kvcache.pools import FP8, PS, SLOTS, at, mha, mla, rows_for, stored

# ---------------------------------------------------------------- fp8 and FP4


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_fp8_pool_scales_each_layer_on_write_and_read(dtype: torch.dtype) -> None:
    pool = MHATokenToKVPool(mha(dtype, compute_dtype=torch.float32))
    assert pool.scales(0) == pool.scales(1) == (1.0, 1.0)
    pool.set_scales(1, 0.1, 4)
    assert pool.scales(1) == (torch.tensor(0.1).item(), 4.0)
    assert pool.scales(0) == (1.0, 1.0)
    k, v = torch.randn(3, 2, 32, device=DEVICE), torch.randn(3, 2, 16, device=DEVICE) * 30
    k[0, 0, 0], v[0, 0, 0], v[0, 0, 1] = 1e9, -torch.inf, torch.nan
    kept = k.clone(), v.clone()
    pool.set_kv_buffer(1, at(6, 4, 9), k, v)
    assert torch.equal(k, kept[0]) and torch.equal(v[1:], kept[1][1:])
    limit = torch.finfo(dtype).max
    k_view, v_view = (view[at(6, 4, 9)].float() for view in pool.get_kv_buffer(1))
    assert pool.get_kv_buffer(1)[0].dtype == dtype
    assert k_view[0, 0, 0] == limit and v_view[0, 0, :2].isnan().all()
    k_rows, v_rows = pool.get_rows(1, at(6, 4, 9))
    assert torch.equal(k_rows, k_view * torch.tensor(0.1))
    torch.testing.assert_close(v_rows, v_view * 4, rtol=0, atol=0, equal_nan=True)
    # Rounding costs half a step of 3 (2) mantissa bits, 2^-4 (2^-3) of a value, or for subnormal
    # values half a subnormal step, 2^-10 (2^-17) x scale. Scaling in fp32 adds a few 2^-24.
    half, least = {FP8: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17)}[dtype]
    assert ((k_rows - k).abs() <= (half + 2**-22) * k.abs() + 0.1 * least)[1:].all()
    ready = torch.full((1, 2, 32), 3.0, device=DEVICE).to(dtype)  # fp8 rows count as scaled
    pool.set_kv_buffer(1, at(4), ready, ready[..., :16])
    assert (pool.get_rows(1, at(4))[1] == 3 * 4).all()
    with pytest.raises(ValueError, match="v is torch.float32"):
        pool.set_kv_buffer(1, at(4), ready, ready[..., :16].float())


def test_scales_are_validated_survive_a_pause_and_keep_their_address(saver: MemorySaver) -> None:
    pool = MHATokenToKVPool(mha(FP8), saver)
    on_device = pool.device_scales(1)
    for wrong in ((1.0,), (1.0, 0.0), (torch.inf, 1.0), (1.0, 1e-45), (torch.nan, 1.0)):
        with pytest.raises(ValueError, match="of layer 1: one finite number > 0 for each of k, v"):
            pool.set_scales(1, *wrong)
    assert pool.scales(1) == (1.0, 1.0)
    pool.set_scales(1, 2.0, 3.0)
    saver.pause("kv_cache")
    assert pool.scales(1) == (2.0, 3.0)
    saver.resume("kv_cache")
    pool.on_resume()
    assert on_device is not None and tuple(on_device.tolist()) == pool.scales(1) == (2.0, 3.0)
    latent = MLATokenToKVPool(mla(FP8))
    latent.set_scales(0, 0.25)
    assert latent.scales(0) == (0.25,)
    assert (latent.device_scales(0) == torch.tensor([0.25, 0.25], device=DEVICE)).all()  # type: ignore[union-attr]
    assert MHATokenToKVPool(mha()).device_scales(1) is None
    with pytest.raises(ValueError, match="no layer scales"):
        MHATokenToKVPool(mha()).set_scales(0, 1.0, 1.0)


def test_fp4_pool_reads_rows_as_the_reference_rounds_them() -> None:
    pool = MHATokenToKVPool(mha(FP4_DTYPE, compute_dtype=torch.float16))
    for part in stored(pool):
        part.fill_(255)  # unallocated slots: scale byte 255 is infinity or NaN
    pool.on_resume()
    k, v = (x.half() for x in rows_for(pool, 3))
    pool.set_kv_buffer(1, at(9, 4, 30), k, v)
    got = pool.get_rows(1, at(9, 4, 30))
    for rows, read in zip((k, v), got, strict=True):
        assert torch.equal(read, quant.dequantise_fp4(*quant.quantise_fp4(rows), torch.float16))
    assert [tuple(t.shape) for t in stored(pool)] == [(2, SLOTS, 2, w) for w in (16, 2, 8, 1)]
    with pytest.raises(ValueError, match="use get_rows"):
        pool.get_kv_buffer(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mha(FP4_DTYPE, head_dim=24), "multiple of 16 elements, got {'k': 24"),
        (lambda: mla(FP4_DTYPE, kv_lora_rank=40, qk_rope_head_dim=8), "got .*'value': 40"),
        (lambda: mha(FP8, compute_dtype=torch.float8_e5m2), "compute_dtype"),
        (lambda: DoubleSparseTokenToKVPool(mha(), 33), "heavy_channel_num=33; use 1 to 32"),
        (lambda: mha(size=33, page_size=16), "size=33 must be a multiple of page_size=16; use 48"),
        (lambda: mha(size=2**31, page_size=16), "fewer than 2"),
        (lambda: mha(layers=0), "num_layers=0 must be at least 1"),
        (lambda: mha(page_size=2.0), "page_size=2.0 must be whole"),
        (lambda: mha(v_head_dim=0), "v_head_dim"),
        (lambda: mha(torch.int32), "dtype=torch.int32 can't be stored; use one of"),
    ],
)
def test_configs_refuse_invalid_shapes_and_dtypes(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- MLA


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, FP4_DTYPE])
def test_mla_write_of_both_parts_equals_write_of_the_row(dtype: torch.dtype) -> None:
    pools = [MLATokenToKVPool(mla(dtype)) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(3, 1, 64, generator=generator).bfloat16().to(DEVICE)
    loc = at(9, 4, 30)
    for pool in pools:
        if dtype == FP8:
            pool.set_scales(1, 0.01)  # 448 * 0.01 is near the largest element
            assert len(pool.scales(1)) == 1
        for part in stored(pool):
            part.zero_()
    pools[0].set_kv_buffer(1, loc, row)
    pools[1].set_mla_kv_buffer(1, loc, row[..., :48], row[..., 48:])
    assert all(torch.equal(a, b) for a, b in zip(*map(stored, pools), strict=True))
    k, v = pools[0].get_rows(1, loc)
    assert (k.shape, v.shape, v.data_ptr()) == ((3, 1, 64), (3, 1, 48), k.data_ptr())
    if dtype == torch.bfloat16:
        assert torch.equal(k, row)
    else:
        # FP4 is off by up to half of the widest gap, 4 to 6, in a block whose largest element is
        # above 3. fp8 is off by up to 2^-4, without saturation, and reading as bf16 adds 2^-9.
        largest = row.abs().amax()
        assert (
            largest < 4.48
            and ((k - row).abs() <= largest / (3 if dtype == FP4_DTYPE else 15)).all()
        )
    if dtype != FP4_DTYPE:
        whole, value = pools[0].get_kv_buffer(1)
        assert (whole.shape, value.shape, value.data_ptr()) == (
            (SLOTS, 1, 64),
            (SLOTS, 1, 48),
            whole.data_ptr(),
        )
    with pytest.raises(ValueError, match=r"rope is .* \[3, 1, 48\] .* \[3, 1, 16\]"):
        pools[0].set_mla_kv_buffer(1, loc, row[..., :48], row[..., :48])


# ---------------------------------------------------------------- double sparsity


def test_double_sparse_pool_stores_and_moves_labels() -> None:
    pool = DoubleSparseTokenToKVPool(mha(FP8), 5)
    label = torch.randn(2, 5, 2, device=DEVICE).bfloat16().transpose(1, 2)
    pool.set_label_buffer(1, at(4, 9), label)
    buffer = pool.get_label_buffer(1)
    assert buffer.shape == (SLOTS, 2, 5)
    assert torch.equal(buffer[at(4, 9)], label)
    assert not buffer[:PS].any()
    pool.move_kv_cache(at(5), at(9))
    assert torch.equal(buffer[5], label[1])
    with pytest.raises(ValueError, match="label is torch.float32"):
        pool.set_label_buffer(1, at(4, 9), label.float())


# ---------------------------------------------------------------- models with two kinds of layers


def config(layers: int, size: int, dtype: torch.dtype = torch.float32) -> KVCacheConfig:
    return mha(dtype, layers, size, num_kv_heads=1, head_dim=16)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE).view(-1, 1, 1).expand(-1, 1, 16)


def swa() -> SWAKVPool:
    pool = SWAKVPool(config(2, 32), config(3, 8), [1, 3], [0, 2, 4])
    for part in stored(pool):
        part.fill_(255)  # NaN
    pool.on_resume()
    return pool


def test_swa_pool_translates_slots_of_window_layers() -> None:
    pool = swa()
    pool.set_kv_buffer(1, at(4), rows(1), rows(1))  # full layers need no mapping
    mapping = torch.zeros(36, dtype=torch.int64, device=DEVICE)
    pool.register_mapping(mapping)
    mapping[20:23] = at(9, 4, 11)  # changed in place, as the allocator does
    pool.set_kv_buffer(2, at(22, 21, 30), rows(1, 2, 3), rows(-1, -2, -3))
    k, v = pool.get_kv_buffer(2)
    assert k[at(11, 4), 0, 0].tolist() == [1, 2]
    assert v[at(11, 4), 0, 0].tolist() == [-1, -2]
    assert k[0, 0, 0] == 3  # an unmapped slot is written to the padding page
    assert k[9].isnan().all()
    assert pool.get_rows(2, at(21))[0][0, 0, 0] == 2
    assert pool.get_kv_buffer(0)[0][4].isnan().all()  # other layers are unchanged
    assert pool.get_kv_buffer(3)[0][PS:].isnan().all()
    pool.set_kv_buffer(3, at(22), rows(7), rows(8))
    assert pool.get_kv_buffer(3)[0][22, 0, 0] == 7
    pool.on_resume()
    assert k[0, 0, 0] == 0


def test_swa_pool_refuses_wrong_layers_and_mappings() -> None:
    for layers, message in (
        (([0, 1], [2]), "a pool of 1 layers got the ids"),
        (([0], [0]), r"layers \[0\] are listed as full and as window"),
    ):
        with pytest.raises(ValueError, match=message):
            SWAKVPool(config(1, 32), config(1, 8), *layers)
    for wrong in (torch.zeros(36), torch.zeros(35, dtype=torch.int64)):
        with pytest.raises(ValueError, match="full_to_swa_index_mapping"):
            swa().register_mapping(wrong.to(DEVICE))


def test_hybrid_pool_stores_full_layers_only() -> None:
    pool = HybridLinearKVPool(config(2, 8, FP4_DTYPE), [3, 7])
    pool.set_kv_buffer(7, at(5), rows(6), rows(-3))
    k, v = pool.get_rows(7, at(5))
    assert (k == 6).all() and (v == -3).all()
    assert pool.route(7) == (pool.full_pool, 1)
    assert pool.nbytes == 12 * pool.bytes_per_token == 12 * 2 * 2 * 9
    with pytest.raises(ValueError, match=r"layer 4 is not in this pool of \[3, 7\]"):
        pool.set_kv_buffer(4, at(5), rows(6), rows(-3))
