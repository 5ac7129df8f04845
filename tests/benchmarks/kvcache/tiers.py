"""Pages between a device pool and the host, beside plain pinned copies, and the disk; Qwen2.5-7B's
shape.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch

from kvcache.pools import MHATokenToKVPool
from kvcache.tiers import DiskTier, HostCacheConfig, HostKVCache, Transfer, page_hashes
from kvcache.tiers.host import Layout
from tests.benchmarks.common import GIB, MIB, Figures, Scale, Times, figures, timed
from tests.benchmarks.kvcache.pools import DIM, HEADS, LAYERS, PAGE_SIZE, make_pool

PAGE_BYTES = LAYERS * PAGE_SIZE * 2 * HEADS * DIM * 2
DISK = "/var/tmp"  # /tmp may be in memory
OUT, IN = "plain copy out", "plain copy in"
# ours -> the copy that it is measured by
WAYS = {"back up": OUT, "load": IN, "load, a call a layer": IN}


def host(scale: Scale) -> Figures:
    """Half of a pool's pages out to scattered places of the host, and in from there to the pool's
    other half.

    "load" is one call with a launch and an event a layer, as the engine has it. Rates are from call
    to idle device, each in turn with a plain copy of as many bytes.
    """
    found = []
    sizes = {"tiny": 4 * PAGE_BYTES} if scale.tiny else {"256 MiB": 256 * MIB, "1 GiB": GIB}
    for name, nbytes in sizes.items():
        for layout in get_args(Layout):
            found += _host(scale, f"{name}, {layout}", layout, nbytes // PAGE_BYTES)
    return found


def _host(scale: Scale, name: str, layout: Layout, pages: int) -> Figures:
    ways = Ways(make_pool(scale.device, 2 * pages * PAGE_SIZE), layout, pages)
    ways.check()
    nbytes = pages * PAGE_BYTES
    runs, times = {**_plain_copies(scale, nbytes), **ways.runs()}, Times()
    for _ in times.rounds:
        for key, run in runs.items():
            times(key, run)
    ms = times.medians
    rates = {key: nbytes / GIB / (ms[key] / 1e3) for key in runs}
    shares = {key: 100 * ms[copy] / ms[key] for key, copy in WAYS.items()}
    return figures(rates, "GiB/s", f"{name}, ") + figures(shares, "% of pinned copy", f"{name}, ")


class Ways:
    """`pages` random pages of a pool to random ones of its host tier, and from there to other pages
    of the pool.
    """

    def __init__(self, pool: MHATokenToKVPool, layout: Layout, pages: int) -> None:
        self.pool, self.cache = pool, HostKVCache(pool, HostCacheConfig(ratio=1.0, layout=layout))
        assert self.cache.allocator.alloc_pages(2 * pages) is not None
        torch.manual_seed(0)
        slots = [self.cache.slots_of(1 + torch.randperm(2 * pages).numpy()) for _ in range(2)]
        self.source, self.target = slots[0].to(pool.device).split(pages * PAGE_SIZE)
        self.held = slots[1][: pages * PAGE_SIZE]

    def runs(self) -> dict[str, Callable[[], object]]:
        return dict(zip(WAYS, (self.back_up, self.load, self.load_by_layer), strict=True))

    def back_up(self) -> Transfer:
        return self.cache.backup_from_device_all_layer(self.held, self.source)

    def load(self) -> Transfer:
        return self.cache.load_to_device(self.held, self.target)

    def load_by_layer(self) -> Transfer:
        return [
            self.cache.load_to_device_per_layer(self.held, self.target, layer)
            for layer in range(LAYERS)
        ][-1]

    def check(self) -> None:
        """AssertionError unless random bytes come back, whichever way they are loaded."""
        for part in self.pool.stored.values():
            part.view(torch.uint8).random_(256)
        self.back_up().wait()
        for load in (self.load, self.load_by_layer):
            for part in self.pool.stored.values():
                part[:, self.target] = 0
            load().wait()
            for part in self.pool.stored.values():
                rows = part.view(torch.uint8)  # random bf16 may be NaN
                assert torch.equal(rows[:, self.target], rows[:, self.source]), load.__name__


def _plain_copies(scale: Scale, nbytes: int) -> dict[str, Callable[[], object]]:
    here = torch.zeros(nbytes, dtype=torch.uint8, device=scale.device)
    there = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=scale.on_gpu)
    return {
        OUT: lambda: there.copy_(here, non_blocking=True),
        IN: lambda: here.copy_(there, non_blocking=True),
    }


def disk(scale: Scale) -> Figures:
    """One thread puts pages and gets them."""
    pages = scale.choose(300, 4)
    content = torch.randint(0, 256, (pages, PAGE_BYTES), dtype=torch.uint8)
    back, keys = torch.zeros_like(content), page_hashes(range(pages), 1)
    with tempfile.TemporaryDirectory(dir=None if scale.tiny else DISK) as folder:
        tier = DiskTier(
            Path(folder),
            2 * pages * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            format="",
            owner="benchmark",
        )
        ms = {
            "put": timed(
                lambda: [tier.put(key, page) for key, page in zip(keys, content, strict=True)]
            ),
            "get": timed(
                lambda: [tier.get(key, page) for key, page in zip(keys, back, strict=True)]
            ),
        }
        tier.close()
    assert torch.equal(content, back)
    rates = {what: pages * PAGE_BYTES / GIB / (each / 1e3) for what, each in ms.items()}
    return figures(rates, "GiB/s", f"pages of {PAGE_BYTES / MIB:.1f} MiB, ")
