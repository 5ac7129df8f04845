"""Pools with more than 2^31 elements, against small pools with the same rows.

On the CPU, Triton interprets the kernels, and only the touched pages of a pool take memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache.config import FP4_DTYPE
from kvcache.ops import kv_write, quant
from kvcache.pools.token_pools import TokenPool
from rollout.ops.torch_attention import BatchShape
from tests.helpers.case_selection import some
from tests.helpers.kvcache import pools
from tests.helpers.rollout.attention import paged_attention, plan_attention

pytestmark = [
    pytest.mark.alone,  # a pool takes a large part of a GPU
    # Warnings of Triton's interpreter, from `tl.range` and numpy.
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array with ndim", "ignore:.*encountered in multiply"
    ),
]

PS, LAYERS, LIMIT = 16, 2, 2**31
ADDRESSES = 6 << 30  # bytes that a pool may span on the CPU


@pytest.fixture(autouse=True)
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the Triton kernels on both devices, and free the test's GPU memory afterwards."""
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton runs the kernels on the GPU and does not interpret them")
        for module in (kv_write, quant):
            monkeypatch.setattr(module, "use_triton", lambda impl, device: True)
    yield
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


# dtype, width of a head (0: latent rows), slot-major
KINDS = {
    "bf16": (pools.BF16, 128, False),
    "bf16, slot-major": (pools.BF16, 128, True),
    "fp8": (pools.FP8, 128, False),
    "fp8, slot-major": (pools.FP8, 128, True),
    "fp4": (FP4_DTYPE, 256, False),
    "mla": (pools.BF16, 0, False),
    "mla-fp8": (pools.FP8, 0, False),
    "mla-fp4": (FP4_DTYPE, 0, False),
}


def make(kind: str, size: int, device: str) -> TokenPool:
    dtype, dim, slot_major = KINDS[kind]
    fields: dict[str, Any] = {"page_size": PS, "device": device, "slot_major": slot_major}
    if not dim:
        return pools.pool_of(
            pools.mla(dtype, LAYERS, size, kv_lora_rank=512, qk_rope_head_dim=64, **fields)
        )
    fields |= {"num_kv_heads": 8, "head_dim": dim, "v_head_dim": 16 if device == "cpu" else dim}
    return pools.pool_of(pools.mha(dtype, LAYERS, size, **fields))


def check_room(nbytes: int, device: str) -> None:
    """Skip the test unless that much memory is available."""
    have = ADDRESSES if device == "cpu" else torch.cuda.mem_get_info()[0] - (2 << 30)
    if nbytes > have:
        pytest.skip(f"the pool spans {nbytes / 2**30:.1f} GiB, too much for {device}")


@pytest.mark.parametrize("kind", some("bf16, slot-major", "fp8", "mla-fp4", whole=sorted(KINDS)))
def test_rows_past_2_to_the_31_elements_equal_those_of_a_small_pool(kind: str, device: str) -> None:
    small = make(kind, 3 * PS, device)
    width = next(iter(small.stored.values())).stride(1)  # elements between slots
    past = LIMIT // width + 1
    size = past // PS * PS + 3 * PS
    check_room((size + PS) * small.bytes_per_token, device)
    large = make(kind, size, device)
    stored = next(iter(large.stored.values()))[0]
    assert past * stored.stride(0) >= LIMIT
    assert stored[past:].storage_offset() >= LIMIT
    # Two slots at each end of the large pool, and the same rows in the small one.
    there = torch.tensor([PS, PS + 1, past, large.size + PS - 1], device=device)
    here = torch.arange(PS, PS + 4, device=device)

    def check_equal() -> None:
        for layer in range(LAYERS):
            for a, b in zip(large.get_rows(layer, there), small.get_rows(layer, here), strict=True):
                assert torch.equal(a, b), f"layer {layer}"

    pools.write(large, there)
    pools.write(small, here)
    check_equal()
    large.move_kv_cache(there[[2, 0, 3]], there[[1, 3, 2]])
    small.move_kv_cache(here[[2, 0, 3]], here[[1, 3, 2]])
    check_equal()
    large.on_resume()
    assert not any(part[:, :PS].any() for part in large.stored.values())


def test_attention_reads_slots_past_2_to_the_31_elements(device: str) -> None:
    """Read tokens at both ends of the cache, in two decodes and a chunk."""
    heads, dim, value_dim, lens = 2, 128, 16 if device == "cpu" else 128, [40, 9, 21]
    slots, total = LIMIT // (heads * dim) + 64, sum(lens)
    check_room(2 * slots * heads * (dim + value_dim), device)
    generator = torch.Generator().manual_seed(0)
    k, v, q = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((total, heads, dim), (total, heads, value_dim), (2 + 5, 2 * heads, dim))
    )
    where = torch.cat([torch.arange(1, 31), torch.arange(slots - total + 30, slots)])
    where = where[torch.randperm(total, generator=generator)].to(device)
    k_cache, v_cache = (
        torch.empty((slots, *rows.shape[1:]), dtype=rows.dtype, device=device) for rows in (k, v)
    )
    k_cache[where], v_cache[where] = k, v
    assert int((where * k_cache.stride(0)).max()) >= LIMIT
    shape = BatchShape(rows=[0, 1, 2], q_lens=[1, 1, 5], kv_lens=lens, num_decode=2)
    here, there = (torch.zeros((3, max(lens)), dtype=torch.int32, device=device) for _ in range(2))
    for row, part in enumerate(torch.arange(total, device=device).split(lens)):
        here[row, : len(part)], there[row, : len(part)] = part.int(), where[part].int()
    expected = paged_attention(q, k, v, plan_attention(shape, here, "triton"), dim**-0.5)
    got = paged_attention(q, k_cache, v_cache, plan_attention(shape, there, "triton"), dim**-0.5)
    exact = paged_attention(
        q.float(), k.float(), v.float(), plan_attention(shape, here, "torch"), dim**-0.5
    )
    assert torch.equal(got, expected)
    torch.testing.assert_close(got.float(), exact, atol=1e-2, rtol=2**-7)
