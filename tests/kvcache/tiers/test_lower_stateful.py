"""Host ledger and order of use against a plain list: what is there, what goes first, where it goes, every byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch

from kvcache.tiers import HostCacheConfig, HostKVCache
from kvcache.tiers.lower import LowerTiers
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import make_pool
from tests.helpers.kvcache.host import LAYOUTS

HOST, DEVICE = 5, 8
KEYS = [bytes([i]) * 16 for i in range(10)]


class EndlessDisk:
    """A disk tier in a dictionary, without a budget."""

    def __init__(self, page_bytes: int) -> None:
        self.version, self.page_bytes = 0, page_bytes
        self.pages: dict[bytes, torch.Tensor] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self.pages

    def __len__(self) -> int:
        return len(self.pages)

    use = __contains__

    def put(self, key: bytes, content: torch.Tensor) -> None:
        assert key not in self.pages
        self.pages[key] = content

    def get(self, key: bytes, into: torch.Tensor) -> bool:
        if key in self.pages:
            into.copy_(self.pages[key])
        return key in self.pages

    def raise_version(self, version: int) -> None:
        self.version, self.pages = version, {}

    def clear(self) -> None:
        self.pages = {}


class Model:
    def __init__(self, layout: Literal["layer_first", "page_first"]) -> None:
        self.pool = make_pool(DEVICE * 2, 2, device="cpu")
        size = HOST * 2 * self.pool.bytes_per_token
        self.host = HostKVCache(self.pool, HostCacheConfig(size_bytes=size, layout=layout))
        self.disk = EndlessDisk(self.host.page_bytes)
        self.real = LowerTiers(self.host, self.disk, 0)  # type: ignore[arg-type]
        self.order: list[tuple[int, bytes]] = []  # on the host: version and key, the next to go first
        self.spilled: set[bytes] = set()

    def seed(self, key: bytes) -> float:
        return self.real.version * 100 + key[0] + 1

    def fill(self, pages: Sequence[int], values: Sequence[float]) -> None:
        for part in self.pool.stored.values():
            part.fill_(torch.nan)
            for page, value in zip(pages, values, strict=True):
                part[:, 2 * page : 2 * page + 2] = value

    def use(self, keys: list[bytes], can_add: set[bytes]) -> list[bytes]:
        """The keys that are on the host afterwards, in order; stops where one is neither there nor can be added."""
        version, done = self.real.version, []
        for key in keys:
            if (version, key) in self.order:
                self.order.remove((version, key))
            elif key not in can_add or not self.make_room(set(keys)):
                break
            self.order.append((version, key))
            done.append(key)
        return done

    def make_room(self, wanted: set[bytes]) -> bool:
        if len(self.order) < HOST:
            return True
        version, key = self.order[0]
        if version == self.real.version:
            if key in wanted:
                return False
            self.spilled.add(key)
        del self.order[0]
        return True

    def step(self, dice: random.Random) -> None:
        step = dice.choices(["save", "load", "raise", "clear"], [6, 6, 1, 0.3])[0]
        if step == "raise":
            self.real.raise_version(self.real.version + dice.randint(1, 2))
            self.spilled = set()
        elif step == "clear":
            self.real.clear()
            self.order, self.spilled = [], set()
        else:
            (self.save if step == "save" else self.load)(dice.sample(KEYS, dice.randint(0, DEVICE)))
        self.check()

    def save(self, keys: list[bytes]) -> None:
        pages = np.arange(1, len(keys) + 1)
        self.fill(pages.tolist(), [self.seed(key) for key in keys])
        self.real.save(keys, pages)
        here = [key for key in keys if (self.real.version, key) in self.order]
        self.use(here, set())
        new = [key for key in keys if key not in here]
        for key in new:
            if not self.make_room(set(keys)):
                break
            self.order.append((self.real.version, key))

    def load(self, keys: list[bytes]) -> None:
        expected = self.use(keys, self.spilled)
        self.fill([], [])
        count, transfer = self.real.load(keys, np.arange(1, len(keys) + 1))
        assert count == len(expected) and (transfer is None) == (count == 0)
        for part in self.pool.stored.values():
            for page, key in enumerate(expected, 1):
                assert bool((part[:, 2 * page : 2 * page + 2] == self.seed(key)).all())
            assert bool(part[:, 2 * len(expected) + 2 :].isnan().all()), "more was written than was loaded"

    def check(self) -> None:
        self.real.check_integrity()
        current = {key for version, key in self.order if version == self.real.version}
        assert {key for key in KEYS if key in self.real} == current | self.spilled
        assert self.real.absent(KEYS) == len(KEYS) - len(current)
        assert self.host.allocator.available_pages == HOST - len(self.order)
        for key in self.spilled:
            assert bool((self.disk.pages[key].view(torch.float32) == self.seed(key)).all())


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_walks(layout: Literal["layer_first", "page_first"]) -> None:
    for seed in range(rounds(25, 1000)):
        dice, model = random.Random(seed), Model(layout)
        for _ in range(40):
            model.step(dice)
