"""The staging copies against torch indexing, in Triton's interpreter if there is no GPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache.ops import staging_copy
from kvcache.ops.staging_copy import Writers, gather_staged, scatter_staged, staged_bytes
from kvcache.staging import pool_layers
from tests.helpers.case_selection import pairwise
from tests.helpers.kvcache.blocks import DEVICE, make_pool

POISON = 171
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
IMPLS = ["torch", "triton"]


def noise(*shape: int, itemsize: int) -> torch.Tensor:
    """Return random bits, which include NaN patterns, as integers of this size."""
    bytes_ = torch.randint(0, 256, (*shape[:-1], shape[-1] * itemsize), dtype=torch.uint8)
    return bytes_.view(BITS[itemsize]).to(DEVICE)


def locations(*slots: int) -> torch.Tensor:
    """Return slots as a strided int64 tensor."""
    return torch.tensor(slots, dtype=torch.int64, device=DEVICE).repeat_interleave(2)[::2]


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


def memory(pages: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a view's storage, including the gaps between its rows."""
    return torch.empty(0, dtype=torch.uint8, device=pages.device).set_(pages.untyped_storage())


def with_surroundings(pages: torch.Tensor) -> torch.Tensor:
    """Copy a view's storage and return the same view of the copy."""
    return (
        memory(pages)
        .clone()
        .view(pages.dtype)
        .as_strided(pages.shape, pages.stride(), pages.storage_offset())
    )


def poisoned(nbytes: int, offset: int = 16) -> torch.Tensor:
    """Return `nbytes` bytes of poison inside a larger poisoned buffer."""
    return torch.full((offset + nbytes + 16,), POISON, dtype=torch.uint8, device=DEVICE)[
        offset : offset + nbytes
    ]


def in_memory_order(
    order: str, layers: int, slots: int, heads: int, width: int, itemsize: int
) -> torch.Tensor:
    """Return random `[L, N, H, W]`, layer-major, slot-major, or as a slice at an odd offset."""
    if order == "layers":
        return noise(layers, slots, heads, width, itemsize=itemsize)
    if order == "slots":
        return noise(slots, layers, heads, width, itemsize=itemsize).transpose(0, 1)
    return noise(layers, slots, heads + 1, width + 3, itemsize=itemsize)[:, :, 1:, 1 : 1 + width]


ROWS = [  # bytes of an element, widths of keys and values, offset of the staged bytes
    (1, (16, 48), 16),  # units of 16 bytes; 48 is not a power of two
    (1, (5, 3), 1),
    (2, (8, 24), 16),
    (2, (8, 24), 2),  # staged at an offset that allows only small units
    (2, (6, 10), 8),
    (4, (4, 1), 4),
    (4, (2, 6), 16),
]


@pytest.mark.parametrize(
    ("impl", "order", "rows"), pairwise(IMPLS, ["layers", "slots", "sliced"], ROWS)
)
def test_gather_and_scatter_equal_indexing(
    impl: Any, order: str, rows: tuple[int, tuple[int, int], int]
) -> None:
    itemsize, widths, offset = rows
    torch.manual_seed(0)
    k, v = (in_memory_order(order, 2, 11, 5, width, itemsize) for width in widths)
    loc = locations(9, 2, 2, 0, 7, 9, 10)  # out of order, and some twice
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
    """Scatter random rows, and check that all other bytes stay unchanged."""
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
def test_staging_copies_handle_more_blocks_than_the_grid_and_no_tokens(
    impl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shrink the limits, so that rows exceed a block and programs copy several blocks."""
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
def test_staging_copies_are_exact_with_offsets_past_2_to_the_31(impl: Any) -> None:
    """Lay slots a gigabyte apart; on the CPU, only the touched pages take memory."""
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


def test_staging_copies_refuse_wrong_heads_and_sizes_before_writing() -> None:
    k = noise(1, 3, 2, 4, itemsize=2)
    before, staged = k.clone(), torch.full((32,), POISON, dtype=torch.uint8, device=DEVICE)
    for first, count, into in ((1, 2, staged), (-1, 2, staged), (0, 0, staged), (0, 2, staged[1:])):
        with pytest.raises(AssertionError):
            gather_staged(k, k, locations(1), first, count, into)
    for heads in ([], [(0, 2), (1, 1)], [(-1, 1)]):
        with pytest.raises(AssertionError, match="overlap"):
            Writers.of(heads, DEVICE)
    with pytest.raises(AssertionError, match="not in a pool of 2"):
        scatter_staged(staged, k, k, locations(1), Writers.of([(1, 2)], DEVICE))
    assert torch.equal(k, before) and (staged == POISON).all()


@pytest.mark.parametrize("slot_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.half, torch.float8_e4m3fn])
def test_pool_layers_are_views_of_the_pool(dtype: torch.dtype, slot_major: bool) -> None:
    pool = make_pool(8, 4, head_dim=4, v_head_dim=8, dtype=dtype, slot_major=slot_major)
    rows = torch.randn(2, 1, 8, device=DEVICE).to(dtype)
    pool.set_kv_buffer(1, locations(5, 9), rows[..., :4], rows)
    for layers, layer, wanted in zip(
        pool_layers(pool), pool.get_kv_buffer(1), (rows[..., :4], rows), strict=True
    ):
        assert layers[1].data_ptr() == layer.data_ptr()
        assert torch.equal(as_bytes(layers[1, [5, 9]]), as_bytes(wanted))
