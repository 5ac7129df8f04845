"""RadixCache against a brute-force prefix set: every cached page-aligned prefix, one by one, with its page."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import PagedTokenToKVPoolAllocator, RadixCache
from kvcache.radix.node import RadixNode
from kvcache.radix.policies import POLICIES
from tests.helpers.effort import rounds

PAGES = 24
SALTS = [None, "lora"]
Prefix = tuple[int, str | None, tuple[int, ...]]  # version, salt, tokens


class Model:
    """The real cache, and `prefixes`: for each cached prefix the page that holds its last tokens."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.ps = page_size
        self.ledger = PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, "cpu")
        self.real = RadixCache(self.ledger, policy)
        self.prefixes: dict[Prefix, int] = {}
        self.locks: list[tuple[Prefix, RadixNode]] = []
        self.seen: Counter[str] = Counter()

    def aligned(self, version: int, salt: str | None, key: tuple[int, ...]) -> list[Prefix]:
        return [(version, salt, key[:n]) for n in range(self.ps, len(key) + 1, self.ps)]

    def locked(self) -> set[Prefix]:
        return {prefix for at, _ in self.locks for prefix in self.aligned(*at)}

    def in_tree(self) -> dict[Prefix, int]:
        """What the real cache holds, by walking it."""
        found: dict[Prefix, int] = {}
        for generation in self.real.generations():
            for node in generation.nodes():
                above = [*node.path()][::-1]
                key = tuple(int(t) for n in above for t in n.key)
                assert above[0].parent is not None
                named = self.aligned(generation.version, above[0].parent.extra_key, key)
                pages = [int(p) for n in above for p in n.pages]
                found |= dict(zip(named, pages, strict=True))
        return found

    def insert(self, key: tuple[int, ...], salt: str | None, age: int) -> None:
        version = max(0, self.real.version - age)
        whole = len(key) // self.ps
        if self.ledger.available_pages < whole:
            self.evict((whole - self.ledger.available_pages) * self.ps)
        pages = self.ledger.alloc_pages(whole)
        if pages is None:
            self.seen["full of locked pages"] += 1
            return
        kept = self.real.insert(key, pages, version=version, extra_key=salt)
        self.ledger.free_pages(pages[: kept // self.ps])
        if version < self.real.version:
            assert kept == whole * self.ps
            return
        new = [i for i, p in enumerate(self.aligned(version, salt, key)) if p not in self.prefixes]
        assert kept == (whole - len(new)) * self.ps
        for i in new:
            self.prefixes[self.aligned(version, salt, key)[i]] = int(pages[i])

    def match(self, key: tuple[int, ...], salt: str | None, lock: bool) -> None:
        named = self.aligned(self.real.version, salt, key)
        expected = [self.prefixes[p] for p in named if p in self.prefixes]
        match = self.real.match_prefix(key, extra_key=salt)
        assert match.pages.tolist() == expected
        assert match.length == len(expected) * self.ps
        self.seen["hits"] += bool(expected)
        if lock:
            self.real.inc_lock_ref(match.node)
            self.locks.append(((self.real.version, salt, key[: match.length]), match.node))

    def unlock(self, index: int) -> None:
        if self.locks:
            self.real.dec_lock_ref(self.locks.pop(index % len(self.locks))[1])

    def evict(self, tokens: int) -> None:
        before, free = self.prefixes, self.ledger.available_pages
        dropped = self.real.evict(tokens)
        self.prefixes = self.in_tree()
        gone = before.keys() - self.prefixes.keys()
        assert dropped == len(gone) * self.ps == (self.ledger.available_pages - free) * self.ps
        assert not gone & self.locked()
        self.seen["old ones evicted"] += any(p[0] < self.real.version for p in gone)
        self.seen["locks in the way"] += dropped < tokens and bool(self.locked())
        rest = self.prefixes.keys() - self.locked()
        assert dropped >= tokens or not rest
        stale = {p for p in rest if p[0] < self.real.version}
        assert not stale or all(p[0] < self.real.version for p in gone), "a current entry went before an old one"

    def check(self) -> None:
        self.real.check_integrity()
        self.ledger.check_integrity()
        assert self.in_tree() == self.prefixes
        assert self.real.protected_size == len(self.locked()) * self.ps
        assert self.real.total_size == len(self.prefixes) * self.ps
        assert self.ledger.available_pages + len(self.prefixes) == PAGES


KEYS = st.lists(st.integers(0, 1), max_size=12).map(tuple)


class RadixMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3]), policy=st.sampled_from(list(POLICIES)))
    def build(self, page_size: int, policy: str) -> None:
        self.model = Model(page_size, policy)

    @rule(key=KEYS, salt=st.sampled_from(SALTS), age=st.sampled_from([0, 0, 0, 1]))
    def insert(self, key: tuple[int, ...], salt: str | None, age: int) -> None:
        self.model.insert(key, salt, age)

    @rule(key=KEYS, salt=st.sampled_from(SALTS), lock=st.booleans())
    def match(self, key: tuple[int, ...], salt: str | None, lock: bool) -> None:
        self.model.match(key, salt, lock)

    @rule(index=st.integers(0, 20))
    def unlock(self, index: int) -> None:
        self.model.unlock(index)

    @rule(tokens=st.integers(0, 30))
    def evict(self, tokens: int) -> None:
        self.model.evict(tokens)

    @rule(by=st.integers(1, 3))
    def raise_version(self, by: int) -> None:
        self.model.real.raise_version(self.model.real.version + by)

    @rule()
    def reset(self) -> None:
        if self.model.locked():
            with pytest.raises(ValueError, match="locked"):
                self.model.real.reset()
            return
        self.model.real.reset()
        self.model.prefixes = {}

    @invariant()
    def cache_equals_the_prefix_set(self) -> None:
        self.model.check()


TestRadixMachine = pytest.mark.soak(RadixMachine.TestCase)
TestRadixMachine.settings = settings(
    max_examples=rounds(100, 3000), stateful_step_count=40, derandomize=True, deadline=None
)


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_a_long_random_walk(page_size: int) -> None:
    """What Hypothesis rarely reaches: a cache that is full, with many locks, over several versions."""
    dice = random.Random(page_size)
    model = Model(page_size, "lru")
    for _ in range(1500):
        step = dice.choices(["insert", "match", "unlock", "evict", "raise"], [8, 8, 3, 2, 1])[0]
        key = tuple(dice.randint(0, 2) for _ in range(dice.randint(0, 6 * page_size)))
        salt = dice.choice(SALTS)
        if step == "insert":
            model.insert(key, salt, dice.choice([0, 0, 0, 1]))
        elif step == "match":
            model.match(key, salt, lock=len(model.locks) < 8 and dice.random() < 0.5)
        elif step == "unlock":
            model.unlock(dice.randint(0, 99))
        elif step == "evict":
            model.evict(dice.randint(0, PAGES * page_size))
        elif dice.random() < 0.3:
            model.real.raise_version(model.real.version + 1)
        model.check()
    assert min(model.seen[what] for what in ("hits", "old ones evicted", "locks in the way")) >= 10, model.seen
