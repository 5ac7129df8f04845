"""Host ledger and order of use against a plain list: what is there, what goes first, where it goes, every byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import KVCacheConfig, MHATokenToKVPool
from kvcache.tiers import HostCacheConfig, HostKVCache
from kvcache.tiers.lower import LowerTiers
from tests.helpers.effort import rounds

HOST, DEVICE = 5, 8
KEYS = [bytes([i]) * 16 for i in range(10)]
CHOSEN = st.lists(st.sampled_from(KEYS), unique=True, max_size=DEVICE)


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


class LowerMachine(RuleBasedStateMachine):
    @initialize(layout=st.sampled_from(["layer_first", "page_first"]))
    def build(self, layout: str) -> None:
        config = KVCacheConfig(
            num_layers=2, num_kv_heads=1, head_dim=2, size=DEVICE * 2, page_size=2, dtype=torch.float32, device="cpu"
        )
        self.pool = MHATokenToKVPool(config)
        self.host = HostKVCache(self.pool, HostCacheConfig(size_bytes=HOST * 2 * config.bytes_per_token, layout=layout))
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

    @rule(keys=CHOSEN)
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

    @rule(keys=CHOSEN)
    def load(self, keys: list[bytes]) -> None:
        expected = self.use(keys, self.spilled)
        self.fill([], [])
        count, transfer = self.real.load(keys, np.arange(1, len(keys) + 1))
        assert count == len(expected) and (transfer is None) == (count == 0)
        for part in self.pool.stored.values():
            for page, key in enumerate(expected, 1):
                assert bool((part[:, 2 * page : 2 * page + 2] == self.seed(key)).all())
            assert bool(part[:, 2 * len(expected) + 2 :].isnan().all()), "more was written than was loaded"

    @rule(by=st.integers(1, 2))
    def raise_version(self, by: int) -> None:
        self.real.raise_version(self.real.version + by)
        self.spilled = set()

    @rule()
    def clear(self) -> None:
        self.real.clear()
        self.order, self.spilled = [], set()

    @rule()
    def free_twice(self) -> None:
        free = [page for page in range(1, HOST + 1) if not self.host.allocator.ref_counts([page])[0]]
        if free:
            with pytest.raises(ValueError, match="double free"):
                self.host.allocator.free_pages(free)

    @invariant()
    def host_equals_the_list(self) -> None:
        self.real.check_integrity()
        current = {key for version, key in self.order if version == self.real.version}
        assert {key for key in KEYS if key in self.real} == current | self.spilled
        assert self.host.allocator.available_pages == HOST - len(self.order)
        oldest = self.real._pages.oldest()
        assert (oldest and (oldest.version, oldest.key)) == (self.order[0] if self.order else None)
        for key in self.spilled:
            assert bool((self.disk.pages[key].view(torch.float32) == self.seed(key)).all())


TestLowerMachine = pytest.mark.soak(LowerMachine.TestCase)
TestLowerMachine.settings = settings(
    max_examples=rounds(100, 2000), stateful_step_count=40, derandomize=True, deadline=None
)
