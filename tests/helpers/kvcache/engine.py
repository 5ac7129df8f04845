"""As much of an engine as a prefix cache over all tiers needs; it checks every row that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvcache import PagedTokenToKVPoolAllocator
from kvcache.tiers import DiskTier, HostCacheConfig, HostKVCache, TieredMatch, TieredPrefixCache, WritePolicy
from tests.helpers.kvcache.blocks import make_pool

PS, DEVICE_PAGES = 2, 10


def value(version: int, salt: str | None, tokens: list[int], layer: int) -> float:
    """What the row of the last of these tokens is made of; exact in fp32."""
    return hash((version, salt is None, tuple(tokens), layer)) % (1 << 24)


class Engine:
    """Computes what is not cached and inserts it."""

    def __init__(
        self,
        device: str,
        policy: WritePolicy,
        host_pages: int,
        disk: Path | None = None,
        disk_pages: int = 0,
        **fields: Any,
    ) -> None:
        self.pool = make_pool(DEVICE_PAGES * PS, PS, head_dim=3, device=device)
        config = self.pool.config
        self.forget()
        self.ledger = PagedTokenToKVPoolAllocator(config.size, PS, device)
        page_bytes = PS * config.bytes_per_token
        self.host = HostKVCache(self.pool, HostCacheConfig(size_bytes=host_pages * page_bytes, **fields))
        self.disk = None
        if disk is not None:
            self.disk = DiskTier(disk, disk_pages * 8192, page_bytes=page_bytes, format=self.host.format, owner="test")
        self.cache = TieredPrefixCache(self.ledger, self.host, self.disk, write_policy=policy)

    def run(self, tokens: list[int], salt: str | None = None, version: int | None = None) -> TieredMatch:
        """One request from beginning to end; checks what the cache gave it."""
        match = self.cache.match_prefix(tokens, extra_key=salt)
        self.check(match, tokens, salt)
        self.cache.inc_lock_ref(match.node)
        count = len(tokens) // PS - len(match.pages)
        if self.ledger.available_pages < count:
            self.cache.evict((count - self.ledger.available_pages) * PS)
        pages = self.ledger.alloc_pages(count)
        if pages is not None:
            version = self.cache.version if version is None else version
            self.write(pages, tokens, salt, version, len(match.pages))
            every = [*match.pages.tolist(), *pages.tolist()]
            known = self.cache.insert(tokens, every, version=version, extra_key=salt)
            self.ledger.free_pages(every[len(match.pages) : known // PS])
        self.cache.dec_lock_ref(match.node)
        return match

    def forget(self) -> None:
        """What a pause and a resume may leave. NaN: reading a row that nobody wrote since must not look right."""
        for part in self.pool.stored.values():
            part.fill_(torch.nan)

    def write(self, pages: Any, tokens: list[int], salt: str | None, version: int, first: int) -> None:
        for nth, page in enumerate(pages.tolist(), first):
            for at in range(PS):
                for layer in range(2):
                    made = value(version, salt, tokens[: nth * PS + at + 1], layer)
                    for part in self.pool.stored.values():
                        part[layer, page * PS + at] = made

    def check(self, match: TieredMatch, tokens: list[int], salt: str | None) -> None:
        assert match.length == len(match.pages) * PS <= len(tokens) and match.loaded <= match.length
        for layer in range(2):
            match.transfer.wait(layer)
            for nth, page in enumerate(match.pages.tolist()):
                for at in range(PS):
                    expected = value(self.cache.version, salt, tokens[: nth * PS + at + 1], layer)
                    for part in self.pool.stored.values():
                        row = part[layer, page * PS + at]
                        assert bool((row == expected).all()), "a stale or foreign slot"

    def fill_device(self, *seeds: int) -> None:
        """Requests that need the whole device, one after the other."""
        for seed in seeds:
            self.run([100 + seed] * (DEVICE_PAGES * PS))
