"""The host tier's memory: how many bytes, each in one place, checked, and given back."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest

from kvcache.tiers import HostCacheConfig, HostKVCache
from kvcache.tiers import memory as memory_module
from memsaver import HostMemoryError
from tests.helpers.kvcache.host import LAYERS, LAYOUTS, PAGES, POOLS, make


def test_bytes_are_exact(device: str) -> None:
    pool = POOLS["odd heads"](device, 3)
    page = 3 * LAYERS * 3 * (5 + 7) * 2
    assert HostKVCache(pool, HostCacheConfig(ratio=2.0)).nbytes == 2 * PAGES * page
    assert HostKVCache(pool, HostCacheConfig(ratio=0.5)).nbytes == PAGES // 2 * page
    assert HostKVCache(pool, HostCacheConfig(size_bytes=5 * page - 1)).nbytes == 4 * page
    cache = HostKVCache(pool, HostCacheConfig(size_bytes=5 * page))
    assert (cache.nbytes, cache.size, cache.page_bytes) == (5 * page, 15, page)
    assert sum(part.host.numel() for part in cache.plan.parts) == cache._block.numel() == 5 * page
    with pytest.raises(ValueError, match="hold no page"):
        HostKVCache(pool, HostCacheConfig(size_bytes=page - 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_belongs_to_one_row(layout: Any) -> None:
    cache = make("double-sparse", "cpu", layout=layout)
    cache._block.zero_()
    for part in cache.plan.parts:
        part.host.add_(1)
    assert bool((cache._block == 1).all())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either ratio or size_bytes"),
        ({"ratio": 1.0, "size_bytes": 1}, "either ratio or size_bytes"),
        ({"ratio": 0.0}, "positive"),
        ({"size_bytes": -1}, "positive"),
        ({"ratio": 1.0, "layout": "token_first"}, "no layout"),
    ],
)
def test_wrong_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostCacheConfig(**fields)


def test_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: 2 << 20)
    with pytest.raises(HostMemoryError, match=r"more than 0.8 .* make the tier smaller"):
        make("mha", device)


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    given = []
    original = memory_module.host_pages.give_back
    monkeypatch.setattr(memory_module.host_pages, "give_back", lambda *a: (given.append(a[:2]), original(*a)))
    cache = make("mha", device)
    address, view = cache._block.data_ptr(), cache._block[:10]
    del cache
    gc.collect()
    assert not given, "somebody still looks at it"
    del view
    gc.collect()
    assert given == [(address, 2 << 20)]


def test_layouts_differ() -> None:
    """So that the tests above do test two layouts."""
    strides = [make("mha", "cpu", layout=layout).plan.parts[0].host.stride() for layout in LAYOUTS]
    assert all(a[:2] != b[:2] for a, b in itertools.combinations(strides, 2))
