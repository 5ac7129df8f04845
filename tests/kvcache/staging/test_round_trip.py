"""K/V from prefill ranks to decode ranks through pools, ring and staged bytes, against slices of the full tensors."""

from typing import Any

import pytest
import torch

from kvcache import MHATokenToKVPool, MHATokenToKVPoolFP4
from kvcache.ops.staging import Writers, gather_staged, scatter_staged, staged_bytes
from kvcache.staging import (
    HeadSlice,
    StagingAllocator,
    StagingBuffer,
    head_writers,
    heads_per_rank,
    may_fill,
    pool_layers,
    stack_layers,
)
from tests.helpers.effort import some
from tests.helpers.kvcache.blocks import DEVICE, make_pool
from tests.helpers.kvcache.pools import mha

LAYERS, HEADS, WIDTHS, PAGE = 2, 8, (4, 8), 4
SIZE, TOKENS = 32, 9


def rank_pool(tp_size: int, heads: int, slot_major: bool) -> MHATokenToKVPool:
    pool = make_pool(
        SIZE, PAGE, num_layers=LAYERS, num_kv_heads=heads_per_rank(tp_size, heads), head_dim=WIDTHS[0],
        v_head_dim=WIDTHS[1], dtype=torch.float16, slot_major=slot_major,
    )  # fmt: skip
    for part in pool_layers(pool):
        part.fill_(torch.nan)
    return pool


def own_heads(full: torch.Tensor, tp_size: int, rank: int) -> torch.Tensor:
    """The heads of `[L, tokens, H, W]` that a rank holds."""
    count = heads_per_rank(tp_size, full.shape[2])
    first = rank * full.shape[2] // tp_size
    return full[:, :, first : first + count]


SIZES = [(4, 2, 8), (2, 4, 8), (1, 2, 8), (3, 2, 6), (4, 2, 2)]  # of prefill, of decode, heads
CASES = [("torch", *sizes) for sizes in SIZES] + [("triton", 3, 2, 6), ("triton", 4, 2, 2)]


@pytest.mark.parametrize(
    ("impl", "src_size", "dst_size", "heads"), some(*CASES, whole=[("triton", *sizes) for sizes in SIZES[:3]])
)
def test_decode_ranks_get_their_slice(impl: Any, src_size: int, dst_size: int, heads: int) -> None:
    torch.manual_seed(0)
    full = [torch.randn(LAYERS, TOKENS, heads, width, device=DEVICE).half() for width in WIDTHS]
    src_loc = PAGE + torch.randperm(SIZE, device=DEVICE)[:TOKENS]
    sources = []
    for rank in range(src_size):
        pool = rank_pool(src_size, heads, slot_major=rank % 2 == 1)
        for layer in range(LAYERS):
            k, v = (own_heads(part, src_size, rank)[layer] for part in full)
            pool.set_kv_buffer(layer, src_loc, k, v)
        sources.append(pool)
    for dst in range(dst_size):
        receive(impl, sources, dst_size, dst, full, src_loc)


def receive(
    impl: Any, sources: list[MHATokenToKVPool], dst_size: int, dst: int, full: list[torch.Tensor], src_loc: torch.Tensor
) -> None:
    """In chunks, through a ring that is too small for all of them at once."""
    heads = full[0].shape[2]
    pool = rank_pool(dst_size, heads, slot_major=dst % 2 == 1)
    k, v = pool_layers(pool)
    slices = head_writers(len(sources), dst_size, dst, heads)
    writers = Writers.of([(one.dst_head_start, one.num_heads) for one in slices], DEVICE)
    buffer = StagingBuffer(staged_bytes(k, v, 5, writers.total) + 100, DEVICE)
    ring = StagingAllocator(buffer.size_bytes, alignment=16)
    loc = PAGE + torch.randperm(SIZE, device=DEVICE)[:TOKENS]
    chunks = [slice(0, 4), slice(4, 8), slice(8, 9)]
    sizes = [staged_bytes(k, v, chunk.stop - chunk.start, writers.total) for chunk in chunks]
    assigned = [ring.assign(size) for size in sizes]
    for chunk, size, one in zip(chunks, sizes, assigned, strict=True):
        assert one is not None
        assert may_fill(one.round, one.offset + size, ring.watermark)
        staged = buffer.view(one.offset, size).fill_(255)
        send(impl, sources, slices, src_loc[chunk], staged)
        scatter_staged(staged, k, v, loc[chunk], writers, impl)
        ring.free(one.id)
    for part, whole in zip((k, v), full, strict=True):
        assert torch.equal(part[:, loc], own_heads(whole, dst_size, dst))
        others = torch.ones(part.shape[1], dtype=torch.bool, device=DEVICE)
        others[loc] = False
        assert part[:, others].isnan().all()


def send(
    impl: Any, sources: list[MHATokenToKVPool], slices: tuple[HeadSlice, ...], loc: torch.Tensor, staged: torch.Tensor
) -> None:
    """Every writer fills its part of a chunk's range."""
    at = 0
    for one in slices:
        k, v = pool_layers(sources[one.src_tp_rank])
        size = staged_bytes(k, v, len(loc), one.num_heads)
        gather_staged(k, v, loc, one.src_head_start, one.num_heads, staged[at : at + size], impl)
        at += size
    assert at == len(staged)


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pool_layers_are_the_pool(dtype: torch.dtype, slot_major: bool) -> None:
    pool = make_pool(8, 4, num_layers=3, num_kv_heads=2, head_dim=4, v_head_dim=8, dtype=dtype, slot_major=slot_major)
    for part, width, nth in zip(pool_layers(pool), (4, 8), (0, 1), strict=True):
        assert part.shape == (3, 12, 2, width)
        for layer in range(3):
            view = pool.get_kv_buffer(layer)[nth]
            assert part[layer].data_ptr() == view.data_ptr()
            assert part[layer].stride() == view.stride()


def test_layers_that_do_not_fit_are_refused() -> None:
    block = torch.zeros(6, 2, 1, 2)
    assert stack_layers([block[1]]).shape == (1, 2, 1, 2)
    assert torch.equal(stack_layers([block[1], block[3], block[5]]), block[1::2])
    for layers in ([block[0], block[1], block[3]], [block[1], block[0]], [block[0], torch.zeros(2, 1, 2)]):
        with pytest.raises(ValueError, match="even distances"):
            stack_layers(layers)
    fp4 = MHATokenToKVPoolFP4(mha(torch.float4_e2m1fn_x2))
    with pytest.raises(ValueError, match="view"):
        pool_layers(fp4)


def test_the_buffer() -> None:
    buffer = StagingBuffer(100, DEVICE)
    assert (buffer.size_bytes, buffer.tensor.dtype, buffer.tensor.is_contiguous()) == (100, torch.uint8, True)
    view = buffer.view(90, 10)
    assert (view.data_ptr(), len(view)) == (buffer.address + 90, 10)
    for offset, nbytes in ((90, 11), (-1, 5), (5, -1)):
        with pytest.raises(ValueError, match="outside this buffer of 100"):
            buffer.view(offset, nbytes)
    with pytest.raises(ValueError, match="size_bytes must be positive, got 0"):
        StagingBuffer(0, DEVICE)
    with pytest.raises(ValueError, match="custom_mem_pool needs a CUDA device, got cpu"):
        StagingBuffer(100, "cpu", object())  # type: ignore[arg-type]


@pytest.mark.gpu
def test_the_buffer_lies_in_the_savers_pool() -> None:
    from memsaver import MemorySaver

    saver = MemorySaver(device="cuda:0")
    buffer = StagingBuffer(2**20, "cuda:0", saver.mem_pool("staging"))
    assert saver.offset_of(buffer.tensor) >= 0
    buffer.tensor.fill_(7)
    assert int(buffer.view(2**20 - 1, 1)) == 7
