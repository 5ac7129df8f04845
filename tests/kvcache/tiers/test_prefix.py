"""The cache over all tiers: every row that a match gives is what the present weights make of its tokens."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcache.tiers import DiskTier, TieredPrefixCache, WritePolicy
from memsaver import BackendError
from tests.helpers.effort import rounds
from tests.helpers.kvcache.engine import DEVICE_PAGES, PS, Engine

POLICIES = get_args(WritePolicy)
PROMPT = list(range(8))


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_prefix_comes_back_from_the_host(layout: Any, device: str) -> None:
    engine = Engine(device, "write_through", 20, layout=layout)
    assert engine.run(PROMPT).length == 0
    assert (engine.run(PROMPT).length, engine.run(PROMPT).loaded) == (8, 0)
    engine.fill_device(1)
    match = engine.run([*PROMPT, 9, 9])
    assert (match.length, match.loaded) == (8, 8)
    assert engine.run(PROMPT).loaded == 0, "it was loaded twice"
    engine.cache.check_integrity()


def test_a_prefix_comes_back_from_the_disk(device: str, tmp_path: Path) -> None:
    engine = Engine(device, "write_through", 11, tmp_path, 100)
    engine.run(PROMPT)
    engine.fill_device(1, 2)
    assert engine.disk is not None and len(engine.disk) >= 4
    match = engine.run(PROMPT)
    assert (match.length, match.loaded) == (8, 8)
    engine.cache.check_integrity()


def test_what_is_split_between_tiers(device: str, tmp_path: Path) -> None:
    """The beginning on the device, then the host, then the disk, then nowhere."""
    engine = Engine(device, "write_through", 3, tmp_path, 100)
    engine.run(PROMPT)  # pages 1 to 3 on the host, the fourth found no room
    assert engine.cache.match_prefix(PROMPT).length == 8
    engine.cache.evict(2 * PS)
    assert engine.cache.match_prefix(PROMPT).length == 6
    engine.fill_device(1)  # 3 of its pages push those of the prompt to the disk
    assert engine.disk is not None and len(engine.disk) == 3
    match = engine.run(PROMPT)
    assert (match.length, match.loaded) == (6, 6)
    engine.cache.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_when_pages_are_written(policy: WritePolicy, device: str) -> None:
    engine = Engine(device, policy, 20)
    used = []
    for _ in range(3):
        engine.run(PROMPT)
        used.append(engine.host.allocator.available_pages)
    engine.cache.evict(8)
    used.append(engine.host.allocator.available_pages)
    wanted = {
        "write_through": [16, 16, 16, 16],
        "write_through_selective": [20, 20, 16, 16],
        "write_back": [20, 20, 20, 16],
    }
    assert used == wanted[policy]
    assert engine.run(PROMPT).loaded == 8


def test_what_was_not_hit_twice_is_lost(device: str) -> None:
    engine = Engine(device, "write_through_selective", 20)
    engine.run(PROMPT)
    engine.run(PROMPT)
    engine.cache.evict(8)
    assert engine.run(PROMPT).length == 0
    engine.run(PROMPT)
    assert engine.host.allocator.available_pages == 20, "hits of what was in these device pages before are counted"


def test_a_run_longer_than_the_host_tier(device: str, tmp_path: Path) -> None:
    """Pages that were read from disk for one load do not push each other out before they are on the device."""
    engine = Engine(device, "write_through", 4, tmp_path, 100)
    engine.run(PROMPT)
    engine.run([*PROMPT, *range(20, 28)])  # its last four pages push the first four to the disk
    engine.fill_device(1)
    assert engine.disk is not None and len(engine.disk) == 8
    match = engine.run([*PROMPT, *range(20, 28)])
    assert (match.length, match.loaded) == (8, 8), "four pages are all that the host can take in one load"
    engine.cache.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_hit_under_new_weights(policy: WritePolicy, device: str, tmp_path: Path) -> None:
    engine = Engine(device, policy, 3, tmp_path, 100)
    for _ in range(3):
        engine.run(PROMPT)
    engine.fill_device(1)
    assert engine.run(PROMPT).length > 0
    engine.cache.raise_version(1)
    assert engine.run(PROMPT).length == 0
    assert engine.run(PROMPT[:6], version=0).length == 6, "and what they made is"
    engine.cache.check_integrity()


def test_namespaces_are_kept_apart_below_the_device(device: str) -> None:
    engine = Engine(device, "write_through", 20)
    engine.run(PROMPT, "lora")
    engine.cache.evict(8)
    assert engine.run(PROMPT).length == 0
    engine.cache.evict(8)
    assert engine.run(PROMPT, "lora").loaded == 8
    with pytest.raises(ValueError, match="a namespace of tiers"):
        engine.cache.insert(PROMPT, [1, 2, 3, 4], version=0, extra_key=("a",))


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_survives_a_pause_on_the_host(policy: WritePolicy, device: str) -> None:
    engine = Engine(device, policy, 20)
    engine.run(PROMPT)
    engine.run(PROMPT, "lora")
    engine.cache.move_to_host()
    assert engine.ledger.available_pages == DEVICE_PAGES and engine.cache.total_size == 0
    engine.forget()  # what a pause and a resume leave
    assert engine.run(PROMPT).loaded == engine.run(PROMPT, "lora").loaded == 8
    node = engine.cache.match_prefix(PROMPT).node
    engine.cache.inc_lock_ref(node)
    for drop in (engine.cache.move_to_host, engine.cache.reset):
        with pytest.raises(ValueError, match="locked"):
            drop()
    engine.cache.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_forgets_all_tiers(policy: WritePolicy, device: str, tmp_path: Path) -> None:
    engine = Engine(device, policy, 3, tmp_path, 100)
    for _ in range(3):
        engine.run(PROMPT)
    engine.fill_device(1, 2)
    engine.cache.reset()
    assert engine.host.allocator.available_pages == 3 and list(tmp_path.iterdir()) == []
    assert engine.run(PROMPT).length == 0
    engine.cache.check_integrity()


def test_a_full_disk_costs_its_pages_only(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(device, "write_through", 11, tmp_path, 100)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        engine.run(PROMPT)
        engine.fill_device(1, 2)
        assert engine.run(PROMPT).length == 0
    assert engine.cache.lower.lost_pages > 0 and isinstance(engine.cache.lower.disk_error, BackendError)
    engine.fill_device(1, 2)
    assert engine.run(PROMPT).loaded == 8
    engine.cache.check_integrity()


def test_a_disk_tier_of_another_version(device: str, tmp_path: Path) -> None:
    engine = Engine(device, "write_through", 4)
    disk = DiskTier(tmp_path, 1 << 20, page_bytes=engine.host.page_bytes, format="f", owner="o", version=3)
    with pytest.raises(ValueError, match="the disk tier is for version 3"):
        TieredPrefixCache(engine.ledger, engine.host, disk)
    with pytest.raises(ValueError, match="no write policy 'sometimes'"):
        TieredPrefixCache(engine.ledger, engine.host, write_policy="sometimes")  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_workload_never_sees_a_stale_slot(
    policy: WritePolicy, on_disk: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, seen = random.Random(f"{policy} {on_disk}"), Counter[str]()
    layout = dice.choice(["layer_first", "page_first"])
    engine = Engine(device, policy, 12, tmp_path if on_disk else None, 20, layout=layout)
    allocate, failing = os.posix_fallocate, False

    def sometimes_full(fd: int, offset: int, nbytes: int) -> None:
        if failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", sometimes_full)
    for _ in range(rounds(350, 20_000)):
        step = dice.choices(["run", "evict", "raise", "late", "pause", "disk", "damage"], [60, 8, 3, 3, 1.5, 2, 2])[0]
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
        elif step == "late" and engine.cache.version:  # a request that began under older weights
            pages = engine.ledger.alloc_pages(min(len(tokens) // PS, engine.ledger.available_pages))
            assert pages is not None
            old = engine.cache.version - 1
            engine.write(pages, tokens, salt, old, 0)
            kept = engine.cache.insert(tokens[: len(pages) * PS], pages, version=old, extra_key=salt)
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
    assert min(seen[what] for what in ("device", "loaded", "misses")) >= 10 and seen["raised"] >= 2, seen
    assert (engine.cache.lower.lost_pages > 0) == on_disk
