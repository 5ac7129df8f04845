"""The host tier: copies are exact and change no other bytes; sizes and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.ops.host_copy import HostCopyPlan, Side, copy_rows
from kvcache.tiers import HostCacheConfig, HostKVCache, host
from memsaver import HostMemoryError
from memsaver.memory import pinned_arena
from memsaver.system.devices import Impl
from tests.helpers.case_selection import pairwise
from tests.helpers.kvcache import pools

LAYERS, PAGES = 3, 8
LAYOUTS = ["layer_first", "page_first"]
POOLS = [name for name in pools.POOLS if name not in ("swa", "hybrid")]


def make_pool(name: str, device: str, page_size: int) -> Any:
    return pools.make(
        name, device=device, page_size=page_size, layers=LAYERS, size=PAGES * page_size
    )


def make(
    name: str, device: str, page_size: int = 3, impl: Impl = "auto", **fields: Any
) -> HostKVCache:
    return HostKVCache(
        make_pool(name, device, page_size), HostCacheConfig(**{"ratio": 1.0} | fields), impl
    )


def poison(pool: Any, seed: int) -> None:
    """Fill a pool with random bytes, which include NaN patterns."""
    generator = torch.Generator().manual_seed(seed)
    for raw in pools.stored(pool):
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def contents(pool: Any) -> list[torch.Tensor]:
    """Copy all bytes of a pool to the CPU, `[L, N, row bytes]` per part."""
    return [raw.flatten(2).cpu().clone() for raw in pools.stored(pool)]


def random_slots(cache: HostKVCache) -> list[torch.Tensor]:
    """Return random host slots, and random device slots to copy from and to, all strided."""
    generator, ps = torch.Generator().manual_seed(0), cache.page_size
    pages = cache.allocator.alloc_pages(PAGES - 2)
    assert pages is not None
    ranges = [cache.slots_of(pages), *[ps + torch.arange(cache.pool.size)] * 2]
    order = [torch.randperm(len(slots), generator=generator) for slots in ranges]
    return [slots[index][: 6 * ps : 2] for slots, index in zip(ranges, order, strict=True)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def host_contents(cache: HostKVCache) -> list[torch.Tensor]:
    """Copy all host bytes, `[L, slots, row bytes]` per part, without the padding page."""
    return [part.host.flatten(1, 2).clone() for part in cache.plan.parts]


@pytest.mark.parametrize(
    ("name", "page_size", "layout", "impl"),
    pairwise(POOLS, [1, 3, 16], LAYOUTS, ["torch", "triton"]),
)
def test_backup_and_load_copy_exactly_the_given_slots(
    name: str, page_size: int, layout: Any, impl: Impl, device: str
) -> None:
    cache = make(name, device, page_size, impl, layout=layout)
    host_slots, source, target = random_slots(cache)
    for part in cache.plan.parts:
        part.host.copy_((torch.arange(part.host.numel()) % 251).view(part.host.shape))
    poison(cache.pool, 1)
    before, expected = contents(cache.pool), host_contents(cache)
    cache.backup_from_device_all_layer(host_slots, source.to(device)).synchronize()
    assert same(contents(cache.pool), before), "a backup wrote to the pool"
    for want, saved in zip(expected, before, strict=True):
        want[:, host_slots - page_size] = saved[:, source]
    assert same(host_contents(cache), expected)

    poison(cache.pool, 2)
    expected = contents(cache.pool)
    cache.load_to_device(host_slots, target).wait()  # both index tensors are on the CPU
    for want, saved in zip(expected, before, strict=True):
        want[:, target] = saved[:, source]
    assert same(contents(cache.pool), expected)


@pytest.mark.gpu
def test_wait_for_a_layer_does_not_wait_for_later_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make("mha", "cuda:0", 16)
    host_slots, source, target = random_slots(cache)
    cache.backup_from_device_all_layer(host_slots, source).synchronize()
    original = host.copy_rows
    held = torch.cuda.Event()

    def slow(plan: Any, rows: Any, slots: Any, layers: range, to_host: bool, impl: Any) -> None:
        if layers.start == 2:
            torch.cuda._sleep(2_000_000_000)
            held.record()
        original(plan, rows, slots, layers, to_host, impl)

    monkeypatch.setattr(host, "copy_rows", slow)
    transfer = cache.load_to_device(host_slots, target)
    transfer.wait(1)
    torch.cuda.current_stream().synchronize()
    assert not transfer.done and not held.query(), "layer 1 waited for layer 2"
    transfer.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLS)
def test_read_page_returns_the_same_bytes_from_both_layouts(
    name: str, layout: Any, device: str
) -> None:
    cache = make(name, device, layout=layout)
    other = make(name, device, layout=LAYOUTS[layout == LAYOUTS[0]])
    strides = [tier.plan.parts[0].host.stride()[:2] for tier in (cache, other)]
    assert strides[0] != strides[1], "both tiers have the same layout"
    poison(cache.pool, 5)
    pages = cache.allocator.alloc_pages(3)
    assert pages is not None
    device_slots = cache.page_size + torch.arange(3 * cache.page_size)
    cache.backup_from_device_all_layer(cache.slots_of(pages), device_slots)
    content = cache.read_page(2)
    slots = device_slots[cache.page_size : 2 * cache.page_size]
    assert torch.equal(
        content, torch.cat([part[:, slots].flatten() for part in contents(cache.pool)])
    )
    there = other.allocator.alloc_pages(2)
    assert there is not None
    other.write_page(2, content)
    assert torch.equal(other.read_page(2), content)


def test_transfers_refuse_wrong_slots_before_copying(device: str) -> None:
    cache = make("mha", device)
    pages = cache.allocator.alloc_pages(2)
    assert pages is not None
    good, device_slots = cache.slots_of(pages), torch.arange(3, 9)
    poison(cache.pool, 0)
    before = contents(cache.pool), host_contents(cache)
    wrong = [(good + 3, device_slots), (good - 3, device_slots), (good, device_slots - 1)]
    wrong += [(good, device_slots + cache.pool.size), (good, device_slots[:-1])]
    for host_slots, slots in wrong:
        for start in (cache.backup_from_device_all_layer, cache.load_to_device):
            with pytest.raises((AssertionError, ValueError)):
                start(host_slots, slots)
    assert same(contents(cache.pool), before[0]) and same(host_contents(cache), before[1])


def test_transfers_refuse_changed_fp8_scales(device: str) -> None:
    cache = make("fp8", device)
    host_slots, source, target = random_slots(cache)
    cache.backup_from_device_all_layer(host_slots, source)
    cache.pool.set_scales(1, 2.0, 1.0)
    for start in (cache.backup_from_device_all_layer, cache.load_to_device):
        with pytest.raises(ValueError, match="fp8 scales have changed"):
            start(host_slots, target)


@pytest.mark.alone
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_copy_rows_is_exact_with_offsets_beyond_32_bits(impl: Impl, device: str) -> None:
    """Copy two rows that are 5 GiB apart in both memories, without touching other memory."""
    far = 5 << 30
    device_block = torch.empty(far + 64, dtype=torch.uint8, device=device)
    host_block = torch.empty(far + 64, dtype=torch.uint8, pin_memory=device != "cpu")
    sides = (
        device_block.as_strided((1, 2, 64), (64, far, 1)),
        host_block.as_strided((1, 2, 1, 64), (64, far, 64, 1)),
    )
    rows = torch.arange(2, device=device)
    device_block[:64], device_block[far:] = 1, 2
    plan = HostCopyPlan([Side(*sides)])
    copy_rows(plan, rows, rows.flip(0), range(1), True, impl)
    if device != "cpu":
        torch.cuda.synchronize()
    assert host_block[:64].eq(2).all() and host_block[far:].eq(1).all()


# ---------------------------------------------------------------- memory


def test_host_tier_has_exact_bytes(device: str) -> None:
    pool = make_pool("odd", device, 3)
    page = 3 * LAYERS * 3 * (5 + 7) * 2
    for config, pages in (
        (HostCacheConfig(ratio=2.0), 2 * PAGES),
        (HostCacheConfig(ratio=0.5), PAGES // 2),
        (HostCacheConfig(size_bytes=5 * page - 1), 4),
        (HostCacheConfig(size_bytes=5 * page), 5),
    ):
        cache = HostKVCache(pool, config)
        assert (cache.nbytes, cache.size, cache.page_bytes) == (pages * page, 3 * pages, page)
        assert sum(part.host.numel() for part in cache.plan.parts) == pages * page
    with pytest.raises(ValueError, match="too small for a page"):
        HostKVCache(pool, HostCacheConfig(size_bytes=page - 1))


def test_invalid_configs_and_lack_of_memory_raise(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    with pytest.raises(ValueError, match="size_bytes=-1 must be positive"):
        HostCacheConfig(size_bytes=-1)
    with pytest.raises(ValueError, match="layout='token_first' must be one of"):
        HostCacheConfig(ratio=1.0, layout="token_first")  # type: ignore[arg-type]
    monkeypatch.setattr(pinned_arena, "available_memory", lambda: 0)
    with pytest.raises(
        HostMemoryError, match=r"more than the .* that may be taken .* make the tier smaller"
    ):
        make("mha", device)


def test_host_memory_is_released_with_its_last_view(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    given: list[int] = []
    original = pinned_arena.give_back
    cache = make("mha", device)
    view = cache.plan.parts[0].host[0, 0]
    address = view.data_ptr()

    def spy(*arguments: Any) -> None:  # other tests' memory may be released meanwhile
        given.extend([arguments[1]] if arguments[0] == address else [])
        original(*arguments)

    monkeypatch.setattr(pinned_arena, "give_back", spy)
    del cache
    assert not given, "the memory was released under a view"
    del view
    assert given == [2 << 20]
