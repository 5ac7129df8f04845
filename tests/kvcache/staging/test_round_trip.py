"""K/V from prefill ranks to decode ranks: the kernels against plain indexing, byte by byte, without
a GPU in Triton's interpreter; pools, ring and staged bytes together against slices of the full
tensors.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache.ops import staging_copy
from kvcache.ops.staging_copy import Writers, gather_staged, scatter_staged, staged_bytes
from kvcache.pools import MHATokenToKVPool
from kvcache.staging import (
    HeadSlice,
    StagingAllocator,
    head_writers,
    heads_per_rank,
    may_fill,
    pool_layers,
)
from tests.helpers.effort import pairwise, some
from tests.helpers.kvcache.blocks import DEVICE, make_pool

POISON = 171
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
IMPLS = ["torch", "triton"]


def noise(*shape: int, itemsize: int) -> torch.Tensor:
    """Any bits at all, NaN patterns among them, as integers of this size."""
    bytes_ = torch.randint(0, 256, (*shape[:-1], shape[-1] * itemsize), dtype=torch.uint8)
    return bytes_.view(BITS[itemsize]).to(DEVICE)


def locations(*slots: int) -> torch.Tensor:
    """int64, every other element of a tensor."""
    return torch.tensor(slots, dtype=torch.int64, device=DEVICE).repeat_interleave(2)[::2]


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


def memory(pages: torch.Tensor) -> torch.Tensor:
    """All bytes behind a view, those between its rows too."""
    return torch.empty(0, dtype=torch.uint8, device=pages.device).set_(pages.untyped_storage())


def with_surroundings(pages: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of that memory."""
    return (
        memory(pages)
        .clone()
        .view(pages.dtype)
        .as_strided(pages.shape, pages.stride(), pages.storage_offset())
    )


def poisoned(nbytes: int, offset: int = 16) -> torch.Tensor:
    """That many bytes, in the midst of others that are poisoned, too."""
    return torch.full((offset + nbytes + 16,), POISON, dtype=torch.uint8, device=DEVICE)[
        offset : offset + nbytes
    ]


def in_memory_order(
    order: str, layers: int, slots: int, heads: int, width: int, itemsize: int
) -> torch.Tensor:
    """`[L, N, H, W]` as layer-major and slot-major pools hold it, and cut out of wider rows, at an
    odd place.
    """
    if order == "layers":
        return noise(layers, slots, heads, width, itemsize=itemsize)
    if order == "slots":
        return noise(slots, layers, heads, width, itemsize=itemsize).transpose(0, 1)
    return noise(layers, slots, heads + 1, width + 3, itemsize=itemsize)[:, :, 1:, 1 : 1 + width]


ROWS = [  # bytes of an element, widths of keys and values, where staged
    (1, (16, 48), 16),  # 16 bytes at a time, 48 no power of two
    (1, (5, 3), 1),
    (2, (8, 24), 16),
    (2, (8, 24), 2),  # staged at an odd place
    (2, (6, 10), 8),
    (4, (4, 1), 4),
    (4, (2, 6), 16),
]


@pytest.mark.parametrize(
    ("impl", "order", "rows"), pairwise(IMPLS, ["layers", "slots", "sliced"], ROWS)
)
def test_gather_and_scatter(impl: Any, order: str, rows: tuple[int, tuple[int, int], int]) -> None:
    itemsize, widths, offset = rows
    torch.manual_seed(0)
    k, v = (in_memory_order(order, 2, 11, 5, width, itemsize) for width in widths)
    loc = locations(9, 2, 2, 0, 7, 9, 10)  # scattered, and some twice
    staged = poisoned(staged_bytes(k, v, len(loc), 3), offset)
    parts, expected = (k, v, staged), [with_surroundings(part) for part in (k, v, staged)]
    expected[2].copy_(as_bytes(k[:, loc, 1:4], v[:, loc, 1:4]))
    gather_staged(k, v, loc, 1, 3, staged, impl)
    assert all(
        torch.equal(memory(part), memory(wanted))
        for part, wanted in zip(parts, expected, strict=True)
    )
    check_scatter(impl, k, v, locations(9, 2, 0, 7, 10), [(3, 2), (0, 1), (1, 1)], offset)


def check_scatter(
    impl: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    heads: Sequence[tuple[int, int]],
    offset: int,
) -> None:
    """Head 2 has no writer.

    All other slots and heads, and what lies between the rows, stay as they are.
    """
    writers = Writers.of(heads, DEVICE)
    staged = poisoned(staged_bytes(k, v, len(loc), writers.total), offset)
    sent, expected = [], (with_surroundings(k), with_surroundings(v))
    for first, count in heads:
        for pages in expected:
            rows = noise(k.shape[0], len(loc), count, pages.shape[3], itemsize=k.element_size())
            pages[:, loc, first : first + count] = rows
            sent.append(rows)
    staged.copy_(as_bytes(*sent))
    scatter_staged(staged, k, v, loc, writers, impl)
    for pages, wanted in zip((k, v), expected, strict=True):
        assert torch.equal(memory(pages), memory(wanted))


@pytest.mark.parametrize("impl", IMPLS)
def test_many_blocks_long_rows_and_no_tokens(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a program, more blocks than the grid takes: programs go round."""
    monkeypatch.setattr(staging_copy, "MAX_BLOCK", 32)
    monkeypatch.setattr(staging_copy, "MAX_BLOCKS", 3)
    torch.manual_seed(1)
    k, v = noise(1, 9, 4, 10, itemsize=1), noise(1, 9, 4, 3, itemsize=1)
    loc = locations(8, 1, 3, 5)
    staged = poisoned(staged_bytes(k, v, 4, 4))
    gather_staged(k, v, loc, 0, 4, staged, impl)
    assert torch.equal(staged, as_bytes(k[:, loc], v[:, loc]))
    check_scatter(impl, k, v, loc, [(0, 4)], 16)
    before, nothing = k.clone(), torch.empty(0, dtype=torch.uint8, device=DEVICE)
    gather_staged(k, k, locations(), 0, 4, nothing, impl)
    scatter_staged(nothing, k, k, locations(), Writers.of([(0, 4)], DEVICE), impl)
    assert torch.equal(k, before)


@pytest.mark.parametrize("impl", IMPLS)
def test_offsets_past_2_to_the_31(impl: Any) -> None:
    """Slots a gigabyte apart, of memory that is reserved and hardly touched."""
    far = 2**30 + 1
    block = torch.empty(3 * far + 64, dtype=torch.uint8, device=DEVICE)
    k = block.as_strided((1, 4, 2, 3), (1, far, 3, 1))
    v = block.as_strided((1, 4, 2, 3), (1, far, 3, 1), 32)
    loc = locations(3, 0)
    k[:, loc], v[:, loc] = noise(1, 2, 2, 3, itemsize=1), noise(1, 2, 2, 3, itemsize=1)
    staged = poisoned(staged_bytes(k, v, 2, 1))
    gather_staged(k, v, loc, 1, 1, staged, impl)
    assert torch.equal(staged, as_bytes(k[:, loc, 1:], v[:, loc, 1:]))
    scatter_staged(staged, k, v, locations(2, 3), Writers.of([(0, 1)], DEVICE), impl)
    assert torch.equal(k[:, [2, 3], 0], k[:, loc, 1])
    assert torch.equal(v[:, [2, 3], 0], v[:, loc, 1])


def test_wrong_heads_and_ranges_are_refused_before_anything_is_written() -> None:
    k = noise(1, 3, 2, 4, itemsize=2)
    before, staged = k.clone(), torch.full((32,), POISON, dtype=torch.uint8, device=DEVICE)
    for first, count, into in ((1, 2, staged), (-1, 2, staged), (0, 0, staged), (0, 2, staged[1:])):
        with pytest.raises(AssertionError):
            gather_staged(k, k, locations(1), first, count, into)
    for heads in ([], [(0, 2), (1, 1)], [(-1, 1)]):
        with pytest.raises(AssertionError, match="share heads"):
            Writers.of(heads, DEVICE)
    with pytest.raises(AssertionError, match="not in a pool of 2"):
        scatter_staged(staged, k, k, locations(1), Writers.of([(1, 2)], DEVICE))
    assert torch.equal(k, before) and (staged == POISON).all()


# ---------------------------------------------------------------- ranks

LAYERS, WIDTHS, PAGE = 2, (4, 8), 4
SIZE, TOKENS = 32, 9


def rank_pool(tp_size: int, heads: int, dtype: torch.dtype, slot_major: bool) -> MHATokenToKVPool:
    fields: Any = {
        "num_kv_heads": heads_per_rank(tp_size, heads),
        "dtype": dtype,
        "slot_major": slot_major,
    }
    pool = make_pool(
        SIZE, PAGE, num_layers=LAYERS, head_dim=WIDTHS[0], v_head_dim=WIDTHS[1], **fields
    )
    for part in pool_layers(pool):
        part.view(torch.uint8).fill_(255)  # NaN
    return pool


def own_heads(full: torch.Tensor, tp_size: int, rank: int) -> torch.Tensor:
    """The heads of `[L, tokens, H, W]` that a rank holds."""
    count = heads_per_rank(tp_size, full.shape[2])
    first = rank * full.shape[2] // tp_size
    return full[:, :, first : first + count]


# of prefill, of decode, heads
SIZES = [
    (4, 2, 8, torch.half),
    (2, 4, 8, torch.float32),
    (1, 2, 8, torch.bfloat16),
    (3, 2, 6, torch.half),
]
SIZES += [(4, 2, 2, torch.float8_e4m3fn)]
CASES = [("torch", *sizes) for sizes in SIZES] + [("triton", *sizes) for sizes in SIZES[3:]]


@pytest.mark.parametrize(
    ("impl", "src_size", "dst_size", "heads", "dtype"),
    some(*CASES, whole=[("triton", *sizes) for sizes in SIZES[:3]]),
)
def test_decode_ranks_get_their_slice(
    impl: Any, src_size: int, dst_size: int, heads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    full = [torch.randn(LAYERS, TOKENS, heads, width, device=DEVICE).to(dtype) for width in WIDTHS]
    src_loc = PAGE + torch.randperm(SIZE, device=DEVICE)[:TOKENS]
    sources = []
    for rank in range(src_size):
        pool = rank_pool(src_size, heads, dtype, slot_major=rank % 2 == 1)
        for layer in range(LAYERS):
            k, v = (own_heads(part, src_size, rank)[layer] for part in full)
            pool.set_kv_buffer(layer, src_loc, k, v)
        sources.append(pool)
    for dst in range(dst_size):
        receive(impl, sources, dst_size, dst, full, src_loc)


def receive(
    impl: Any,
    sources: list[MHATokenToKVPool],
    dst_size: int,
    dst: int,
    full: list[torch.Tensor],
    src_loc: torch.Tensor,
) -> None:
    """In chunks, through a ring that is too small for all of them at once."""
    heads = full[0].shape[2]
    pool = rank_pool(dst_size, heads, full[0].dtype, slot_major=dst % 2 == 1)
    k, v = pool_layers(pool)
    slices = head_writers(len(sources), dst_size, dst, heads)
    writers = Writers.of([(one.dst_head_start, one.num_heads) for one in slices], DEVICE)
    buffer = poisoned(staged_bytes(k, v, 5, writers.total) + 100)
    ring = StagingAllocator(len(buffer), alignment=16)
    loc = PAGE + torch.randperm(SIZE, device=DEVICE)[:TOKENS]
    chunks = [slice(0, 4), slice(4, 8), slice(8, 9)]
    sizes = [staged_bytes(k, v, chunk.stop - chunk.start, writers.total) for chunk in chunks]
    assigned = [ring.assign(size) for size in sizes]
    for chunk, size, one in zip(chunks, sizes, assigned, strict=True):
        assert one is not None
        assert may_fill(one.round, one.offset + size, ring.watermark)
        staged = buffer[one.offset : one.offset + size].fill_(255)
        send(impl, sources, slices, src_loc[chunk], staged)
        scatter_staged(staged, k, v, loc[chunk], writers, impl)
        ring.free(one.id)
    for nth, whole in enumerate(full):
        got = torch.stack(
            [pool.get_kv_buffer(layer)[nth].view(torch.uint8) for layer in range(LAYERS)]
        )
        expected = torch.full_like(got, 255)
        expected[:, loc] = own_heads(whole, dst_size, dst).contiguous().view(torch.uint8)
        assert torch.equal(got, expected)


def send(
    impl: Any,
    sources: list[MHATokenToKVPool],
    slices: tuple[HeadSlice, ...],
    loc: torch.Tensor,
    staged: torch.Tensor,
) -> None:
    """Every writer fills its part of a chunk's range."""
    at = 0
    for one in slices:
        k, v = pool_layers(sources[one.src_tp_rank])
        size = staged_bytes(k, v, len(loc), one.num_heads)
        gather_staged(k, v, loc, one.src_head_start, one.num_heads, staged[at : at + size], impl)
        at += size
    assert at == len(staged)
