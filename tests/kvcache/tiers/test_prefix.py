"""The tiered prefix cache: every row of a match is that of its tokens under the present weights."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.tiers import (
    DiskTier,
    HostCacheConfig,
    HostKVCache,
    TieredMatch,
    TieredPrefixCache,
    WritePolicy,
    page_hashes,
)
from memsaver import BackendError, MemorySaver
from tests.helpers.case_selection import rounds
from tests.helpers.kvcache.blocks import make_pool

PS, DEVICE_PAGES, DISK_PAGES = 2, 10, 20


def value(version: int, salt: str | None, tokens: list[int], layer: int) -> float:
    """Return the number that stands for the last token's row, exact in fp32."""
    return hash((version, salt is None, tuple(tokens), layer)) % (1 << 24)


class Engine:
    """A stand-in for an engine, which writes and inserts the rows of tokens that are not cached."""

    def __init__(
        self,
        device: str,
        policy: WritePolicy,
        host_pages: int,
        disk: Any = None,
        saver: Any = None,
        **fields: Any,
    ) -> None:
        self.pool = make_pool(DEVICE_PAGES * PS, PS, saver, head_dim=3, device=device)
        config = self.pool.config
        self.forget()
        self.ledger = PagedTokenToKVPoolAllocator(config.size, PS, device)
        page_bytes = PS * config.bytes_per_token
        self.host = HostKVCache(
            self.pool, HostCacheConfig(size_bytes=host_pages * page_bytes, **fields)
        )
        self.disk = None
        if disk is not None:
            form: Any = {"page_bytes": page_bytes, "format": self.host.format, "owner": "test"}
            self.disk = DiskTier(disk, DISK_PAGES * 8192, **form)
        self.cache = TieredPrefixCache(self.ledger, self.host, self.disk, write_policy=policy)

    def run(
        self, tokens: list[int], salt: str | None = None, version: int | None = None
    ) -> TieredMatch:
        """Run one request, and check the rows of its match."""
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
            all_pages = [*match.pages.tolist(), *pages.tolist()]
            known = self.cache.insert(tokens, all_pages, version=version, extra_key=salt)
            self.ledger.free_pages(all_pages[len(match.pages) : known // PS])
        self.cache.dec_lock_ref(match.node)
        return match

    def forget(self) -> None:
        """Overwrite the pool with NaN, as a pause may, to reveal reads of stale rows."""
        for part in self.pool.stored.values():
            part.fill_(torch.nan)

    def on_disk(self) -> int:
        return 0 if self.disk is None else len(self.disk)

    def rows(
        self, version: int, salt: str | None, tokens: list[int], pages: Any, first: int, layer: int
    ) -> tuple[list[int], torch.Tensor]:
        """Return the slots of pages from number `first` on, and the numbers of their tokens."""
        slots = [page * PS + at for page in pages.tolist() for at in range(PS)]
        ends = range(first * PS + 1, first * PS + len(slots) + 1)
        numbers = [value(version, salt, tokens[:end], layer) for end in ends]
        return slots, torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)

    def write(
        self, pages: Any, tokens: list[int], salt: str | None, version: int, first: int
    ) -> None:
        for layer in range(2):
            slots, numbers = self.rows(version, salt, tokens, pages, first, layer)
            for part in self.pool.stored.values():
                part[layer, slots] = numbers.expand_as(part[layer, slots]).to(part.device)

    def check(self, match: TieredMatch, tokens: list[int], salt: str | None) -> None:
        assert match.length == len(match.pages) * PS <= len(tokens) and match.loaded <= match.length
        for layer in range(2):
            match.transfer.wait(layer)
            version = self.cache.version
            slots, numbers = self.rows(version, salt, tokens, match.pages, 0, layer)
            for part in self.pool.stored.values():
                assert bool((part[layer, slots].cpu() == numbers).all()), "a stale or foreign slot"

    def fill_device(self, *seeds: int) -> None:
        """Run requests that need all device pages, one after another."""
        for seed in seeds:
            self.run([100 + seed] * (DEVICE_PAGES * PS))


POLICIES = get_args(WritePolicy)
PROMPT = list(range(8))


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("layout", "host_pages", "others"),
    [("layer_first", 20, [1]), ("page_first", 20, [1]), ("page_first", 11, [1, 2])],
)
def test_evicted_prefix_is_loaded_from_host_or_disk(
    layout: Any, host_pages: int, others: list[int], device: str, tmp_path: Path
) -> None:
    engine = Engine(device, "write_through", host_pages, tmp_path, layout=layout)
    assert engine.run(PROMPT).length == 0
    assert (engine.run(PROMPT).length, engine.run(PROMPT).loaded) == (8, 0)
    engine.fill_device(*others)
    assert (engine.on_disk() >= 4) == (host_pages == 11)
    match = engine.run([*PROMPT, 9, 9])
    assert (match.length, match.loaded) == (8, 8)
    assert engine.run(PROMPT).loaded == 0, "it was loaded twice"
    engine.cache.check_integrity()


def test_match_ends_before_the_page_that_no_tier_has(device: str, tmp_path: Path) -> None:
    """Match a prefix on the device, then on the host, then on the disk, without its last page."""
    engine = Engine(device, "write_through", 3, tmp_path)
    engine.run(PROMPT)  # pages 1 to 3 are copied to the host, which has no room for the fourth
    assert engine.cache.match_prefix(PROMPT).length == 8
    engine.cache.evict(2 * PS)
    assert engine.cache.match_prefix(PROMPT).length == 6
    engine.fill_device(1)  # 3 of its pages displace the prompt's pages to the disk
    assert engine.on_disk() == 3
    match = engine.run(PROMPT)
    assert (match.length, match.loaded) == (6, 6)
    engine.cache.check_integrity()


def test_each_tier_evicts_the_least_recently_used_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no call evicts a page that it asks for, with a host of three pages."""
    lower = Engine("cpu", "write_through", 3, tmp_path).cache.lower
    keys = page_hashes(range(20), PS)
    assert lower.disk is not None

    def check(on_host: set[int], on_disk: set[int]) -> None:
        assert {i for i, key in enumerate(keys) if not lower.absent([key])} == on_host
        assert {i for i, key in enumerate(keys) if lower.disk and key in lower.disk} == on_disk
        lower.check_integrity()

    def pages(*numbers: int) -> tuple[list[bytes], Any]:
        return [keys[i] for i in numbers], np.arange(1, len(numbers) + 1)

    lower.save(*pages(0, 1, 2))
    lower.save(*pages(0, 3))
    check({0, 2, 3}, {1})
    lower.save(*pages(3, 4, 5, 6))
    check({3, 4, 5}, {0, 1, 2})
    assert lower.load(*pages(1, 3)) == (0, None)  # loading 1 would evict 3
    assert lower.load(*pages(1, 7))[0] == 1  # 7 is not stored, so the load ends before it
    check({1, 4, 5}, {0, 1, 2, 3})
    assert lower.load(*pages(4))[0] == 1 and lower.load(*pages(8, 4)) == (0, None)
    lower.save(*pages(6))
    check({1, 4, 6}, {0, 1, 2, 3, 5})
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        lower.save(*pages(7, 8))  # 1 is already on disk; 4 is lost
        check({6, 7, 8}, {0, 1, 2, 3, 5})
    assert lower.lost_pages == 1 and isinstance(lower.disk_error, BackendError)
    lower.raise_version(1)
    check(set(), set())
    lower.save(*pages(0, 1))
    check({0, 1}, set())
    lower.save(*pages(2, 3))  # the last page of the older version is not written to disk
    check({1, 2, 3}, {0})


@pytest.mark.parametrize(
    ("policy", "free"),
    [
        ("write_through", [16, 16, 16, 16]),
        ("write_through_selective", [20, 20, 16, 16]),
        ("write_back", [20, 20, 20, 16]),
    ],
)
def test_write_policy_decides_when_pages_are_copied(
    policy: WritePolicy, free: list[int], device: str
) -> None:
    engine = Engine(device, policy, 20)
    for left in free[:3]:
        engine.run(PROMPT)
        assert engine.host.allocator.available_pages == left
    engine.cache.evict(8)
    assert engine.host.allocator.available_pages == free[3]
    assert engine.run(PROMPT).loaded == 8


def test_selective_policy_loses_pages_without_a_second_hit(device: str) -> None:
    engine = Engine(device, "write_through_selective", 20)
    engine.run(PROMPT)
    engine.run(PROMPT)
    engine.cache.evict(8)
    assert engine.run(PROMPT).length == 0
    engine.run(PROMPT)
    assert engine.host.allocator.available_pages == 20, (
        "hits of the pages' earlier content are counted"
    )


@pytest.mark.parametrize("forget", ["raise_version", "reset"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_page_is_hit_after_new_weights_or_a_reset(
    policy: WritePolicy, forget: str, device: str, tmp_path: Path
) -> None:
    engine = Engine(device, policy, 3, tmp_path)
    for _ in range(3):
        engine.run(PROMPT)
    engine.fill_device(1, 2)
    assert engine.run(PROMPT).length > 0
    if forget == "reset":
        engine.cache.reset()
        assert engine.host.allocator.available_pages == 3 and list(tmp_path.iterdir()) == []
    else:
        engine.cache.raise_version(1)
    assert engine.run(PROMPT).length == 0
    assert engine.run(PROMPT[:6], version=0).length == 6, "new entries are not hit"
    engine.cache.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_move_to_host_preserves_prefixes_over_a_pause(policy: WritePolicy, device: str) -> None:
    saver = MemorySaver(device)
    engine = Engine(device, policy, 20, saver=saver)
    engine.run(PROMPT)
    engine.run(PROMPT, "lora")
    engine.cache.move_to_host()
    assert engine.ledger.available_pages == DEVICE_PAGES and engine.cache.total_size == 0
    saver.pause("kv_cache")
    saver.resume("kv_cache")
    engine.forget()
    assert engine.run(PROMPT).loaded == engine.run(PROMPT, "lora").loaded == 8
    node = engine.cache.match_prefix(PROMPT).node
    engine.cache.inc_lock_ref(node)
    for drop in (engine.cache.move_to_host, engine.cache.reset):
        with pytest.raises(ValueError, match="locked"):
            drop()
    engine.cache.check_integrity()
    saver.close()


@pytest.mark.soak
@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_workload_never_hits_a_stale_slot(
    policy: WritePolicy, on_disk: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, seen = random.Random(f"{policy} {on_disk}"), Counter[str]()
    layout = dice.choice(["layer_first", "page_first"])
    engine = Engine(device, policy, 12, tmp_path if on_disk else None, layout=layout)
    allocate, failing = os.posix_fallocate, False
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *given: (full if failing else allocate)(*given)
    )
    for _ in range(rounds(350, 20_000)):
        step = dice.choices(
            ["run", "evict", "raise", "late", "pause", "disk", "damage"], [60, 8, 3, 3, 1.5, 2, 2]
        )[0]
        tokens = [dice.randint(0, 1) for _ in range(dice.randint(0, 8 * PS))]
        salt = dice.choice([None, None, "lora"])
        if step == "run":
            match = engine.run(tokens, salt)
            seen["device"] += match.length > match.loaded
            seen["loaded"] += match.loaded > 0
            seen["misses"] += match.length == 0
        elif step == "evict":
            engine.cache.evict(dice.randint(0, DEVICE_PAGES * PS))
        elif step == "raise":
            engine.cache.raise_version(engine.cache.version + dice.randint(1, 2))
            seen["raised"] += 1
        elif step == "late" and engine.cache.version:  # a request that started under older weights
            pages = engine.ledger.alloc_pages(min(len(tokens) // PS, engine.ledger.available_pages))
            assert pages is not None
            old = engine.cache.version - 1
            engine.write(pages, tokens, salt, old, 0)
            kept = engine.cache.insert(
                tokens[: len(pages) * PS], pages, version=old, extra_key=salt
            )
            engine.ledger.free_pages(pages[: kept // PS])
        elif step == "pause":
            engine.cache.move_to_host()
            engine.forget()
        elif step == "disk":
            failing = not failing
        elif step == "damage" and (files := sorted(tmp_path.glob("*.kvpage"))):
            os.truncate(dice.choice(files), dice.choice([0, 4096, 8191]))
        engine.cache.check_integrity()
        engine.ledger.check_integrity()
        assert engine.ledger.available_pages + engine.cache.total_size // PS == DEVICE_PAGES
    assert (
        min(seen[event] for event in ("device", "loaded", "misses")) >= 10 and seen["raised"] >= 2
    ), seen
    assert (engine.cache.lower.lost_pages > 0) == on_disk
