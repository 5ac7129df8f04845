"""Host pages: bytes come back as they went, wherever they were put, and nothing beside them changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.ops import host_copy
from kvcache.tiers import HostCacheConfig, HostKVCache, Transfer, host
from memsaver import MemorySaver
from memsaver.ops.dispatch import Impl
from tests.helpers.kvcache.host import LAYERS, LAYOUTS, PAGES, POOLS, contents, make, mha, poison


def random_slots(cache: HostKVCache, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots of scattered host pages, and as many scattered device slots, from and to where rows go."""
    generator = torch.Generator().manual_seed(seed)
    pages = cache.allocator.alloc_pages(PAGES - 2)
    assert pages is not None
    host_slots = cache.slots_of(pages)
    host_slots = host_slots[torch.randperm(len(host_slots), generator=generator)][: 5 * cache.page_size - 1]
    slots = [cache.page_size + torch.randperm(cache.pool.size, generator=generator)[: len(host_slots)] for _ in "ab"]
    return host_slots, *slots


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", POOLS)
def test_round_trip(name: str, page_size: int, layout: Any, impl: Impl, device: str) -> None:
    cache = make(name, device, page_size, impl, layout=layout)
    host_slots, source, target = random_slots(cache, 0)
    poison(cache.pool, 1)
    before = contents(cache.pool)
    cache._block.copy_(torch.arange(cache.nbytes) % 251)
    untouched = cache._block.clone()
    cache.backup_from_device_all_layer(host_slots, source.to(device)).synchronize()
    assert all(torch.equal(a, b) for a, b in zip(contents(cache.pool), before, strict=True)), "a backup wrote to it"
    changed = int((cache._block != untouched).sum())
    assert changed <= len(host_slots) * cache.pool.bytes_per_token
    beside = torch.ones(cache.size + page_size, dtype=torch.bool).index_fill(0, host_slots, False)[page_size:]
    for part in cache.plan.parts:
        old = untouched.as_strided(part.host.shape, part.host.stride(), part.host.storage_offset())
        assert torch.equal(part.host.flatten(1, 2)[:, beside], old.flatten(1, 2)[:, beside]), (
            "another host slot changed"
        )

    poison(cache.pool, 2)
    expected = contents(cache.pool)
    cache.load_to_device(host_slots, target.to(device)).wait()
    for want, saved in zip(expected, before, strict=True):
        want[:, target] = saved[:, source]
    assert all(torch.equal(a, b) for a, b in zip(contents(cache.pool), expected, strict=True))


def test_slots_may_be_strided_and_on_the_cpu(device: str) -> None:
    cache = make("mha", device)
    poison(cache.pool, 0)
    before = contents(cache.pool)
    pages = cache.allocator.alloc_pages(4)
    assert pages is not None
    host_slots = cache.slots_of(pages)[::2]
    cache.backup_from_device_all_layer(host_slots, torch.arange(3, 15, device=device)[::2]).wait()
    poison(cache.pool, 1)
    cache.load_to_device(host_slots, torch.arange(4, 16)[::2]).wait()
    for now, old in zip(contents(cache.pool), before, strict=True):
        assert torch.equal(now[:, 4:16:2], old[:, 3:15:2])


def test_a_layer_is_loaded_alone_and_layers_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, copied = make("mla", device), []
    original = host.copy_rows

    def spy(plan: Any, rows: Any, slots: Any, layers: range, to_host: bool, impl: Any) -> None:
        copied.append((layers, to_host))
        original(plan, rows, slots, layers, to_host, impl)

    monkeypatch.setattr(host, "copy_rows", spy)
    host_slots, source, target = random_slots(cache, 3)
    poison(cache.pool, 0)
    before = contents(cache.pool)
    cache.backup_from_device_all_layer(host_slots, source).wait()
    poison(cache.pool, 1)
    expected = contents(cache.pool)
    cache.load_to_device_per_layer(host_slots, target, 1).wait(1)
    expected[0][1, target] = before[0][1, source]
    assert torch.equal(contents(cache.pool)[0], expected[0]), "another layer changed"
    cache.load_to_device(host_slots, target).wait(0)
    one_by_one = [(range(layer, layer + 1), False) for layer in range(LAYERS)]
    assert copied == [(range(LAYERS), True), (range(1, 2), False), *one_by_one]


def test_waiting_for_a_layer_that_is_not_copied(device: str) -> None:
    cache = make("mha", device)
    host_slots, _, target = random_slots(cache, 0)
    transfer = cache.load_to_device_per_layer(host_slots, target, 2)
    transfer.wait(2)
    with pytest.raises(ValueError, match=r"layer 1 is not copied here"):
        transfer.wait(1)
    transfer.synchronize()
    assert transfer.done
    assert Transfer(range(1), {}).done


@pytest.mark.gpu
def test_compute_waits_for_its_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make("mha", "cuda:0", 16)
    host_slots, source, target = random_slots(cache, 0)
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
def test_pages_as_bytes(name: str, layout: Any, device: str) -> None:
    """What the disk keeps is the same from both layouts, and comes back."""
    cache, other = make(name, device, layout=layout), make(name, device, layout=LAYOUTS[layout == LAYOUTS[0]])
    poison(cache.pool, 5)
    pages = cache.allocator.alloc_pages(3)
    assert pages is not None
    device_slots = cache.page_size + torch.arange(3 * cache.page_size)
    cache.backup_from_device_all_layer(cache.slots_of(pages), device_slots)
    content = cache.read_page(2)
    assert content.shape == (cache.page_size * cache.pool.bytes_per_token,)
    slots = device_slots[cache.page_size : 2 * cache.page_size]
    rows = [part[:, slots].flatten() for part in contents(cache.pool)]
    assert torch.equal(content, torch.cat(rows))
    there = other.allocator.alloc_pages(2)
    assert there is not None
    other.write_page(2, content)
    assert torch.equal(other.read_page(2), content)


def test_wrong_slots_copy_nothing(device: str) -> None:
    cache = make("mha", device)
    pages = cache.allocator.alloc_pages(2)
    assert pages is not None
    good = cache.slots_of(pages)
    cache._block.zero_()
    poison(cache.pool, 0)
    device_slots = torch.arange(3, 9)
    wrong: list[tuple[torch.Tensor, torch.Tensor, str]] = [
        (good + 3, device_slots, "host page 3 is free"),
        (good - 3, device_slots, "page 0"),
        (good + 1000, device_slots, "never issued"),
        (good, device_slots - 1, "page 0 is padding"),
        (good, device_slots + cache.pool.size, "device slots must be"),
        (good, device_slots[:-1], "one a host slot"),
        (good, device_slots.int(), "int64"),
    ]
    for host_slots, slots, message in wrong:
        with pytest.raises(ValueError, match=message):
            cache.backup_from_device_all_layer(host_slots, slots)
        with pytest.raises(ValueError, match=message):
            cache.load_to_device(host_slots, slots)
    with pytest.raises(ValueError, match="layer 3 is not in this pool"):
        cache.load_to_device_per_layer(good, device_slots, LAYERS)
    with pytest.raises(ValueError, match="host page 5 is free"):
        cache.read_page(5)
    with pytest.raises(ValueError, match="a page is uint8"):
        cache.write_page(1, torch.zeros(5, dtype=torch.uint8))
    assert not cache._block.any()


def test_double_free_is_told(device: str) -> None:
    cache = make("mha", device)
    pages = cache.allocator.alloc_pages(2)
    assert pages is not None
    cache.allocator.free_pages(pages)
    with pytest.raises(ValueError, match="double free"):
        cache.allocator.free_pages(pages)
    cache.allocator.check_integrity()


def test_scales_that_change_are_refused(device: str) -> None:
    cache = make("fp8", device)
    host_slots, source, target = random_slots(cache, 0)
    cache.backup_from_device_all_layer(host_slots, source)
    cache.pool.set_scales(1, 2.0, 1.0)
    cache.load_to_device_per_layer(host_slots, target, 0).wait()
    for start in (cache.backup_from_device_all_layer, cache.load_to_device):
        with pytest.raises(ValueError, match="fp8 scales of layer 1 changed"):
            start(host_slots, target)


def test_empty_transfers(device: str) -> None:
    cache = make("mha", device)
    none = torch.empty(0, dtype=torch.int64)
    cache.backup_from_device_all_layer(none, none).wait()
    cache.load_to_device(none, none).wait(2)


def test_pages_outlive_a_pause_of_the_pool(device: str) -> None:
    saver = MemorySaver(device)
    pool_class = type(POOLS["mha"](device, 4))
    cache = HostKVCache(pool_class(mha(device, 4), saver), HostCacheConfig(ratio=1.0))
    host_slots, source, target = random_slots(cache, 0)
    poison(cache.pool, 0)
    before = contents(cache.pool)
    cache.backup_from_device_all_layer(host_slots, source).synchronize()
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    cache.pool.on_resume()
    cache.load_to_device(host_slots, target).wait()
    for now, old in zip(contents(cache.pool), before, strict=True):
        assert torch.equal(now[:, target], old[:, source])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_offsets_beyond_32_bits(impl: Impl, device: str) -> None:
    """Strides that only int64 can follow: two rows, 5 GiB apart on both sides, nothing touched between them."""
    far = 5 << 30
    device_block = torch.empty(far + 64, dtype=torch.uint8, device=device)
    host_block = memory_of(far + 64, device)
    plan = host_copy.HostCopyPlan(
        [
            host_copy.Side(
                device_block.as_strided((1, 2, 64), (64, far, 1)),
                host_block.as_strided((1, 2, 1, 64), (64, far, 64, 1)),
            )
        ]
    )
    rows = torch.arange(2, device=device)
    device_block[:64], device_block[far:] = 1, 2
    host_copy.copy_rows(plan, rows, rows.flip(0), range(1), True, impl)
    if device != "cpu":
        torch.cuda.synchronize()
    assert host_block[:64].eq(2).all() and host_block[far:].eq(1).all()


def memory_of(nbytes: int, device: str) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
