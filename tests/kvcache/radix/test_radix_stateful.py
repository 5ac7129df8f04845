"""Both prefix caches against a set of all cached prefixes, with the page and state of each."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from kvcache import RadixCache
from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.radix import MambaRadixCache
from kvcache.radix.cache import POLICIES
from kvcache.radix.node import RadixNode
from tests.helpers.case_selection import rounds
from tests.helpers.kvcache.pools import make_states

PAGES, STATES = 24, 6
SALTS = [None, "lora"]
Key = tuple[int, ...]
Prefix = tuple[int, str | None, Key]  # version, salt, tokens


class Model:
    """A prefix cache and its model: `prefixes` maps each cached prefix to its last page."""

    steps: ClassVar[dict[str, float]] = {
        "insert": 8,
        "match": 4,
        "lock": 4,
        "unlock": 3,
        "evict": 2,
    }
    steps |= {"raise": 0.4, "reset": 0.05}

    def __init__(self, page_size: int, policy: str) -> None:
        self.ps = page_size
        self.ledger = PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, "cpu")
        self.real: Any = self.make(policy)
        self.prefixes: dict[Prefix, int] = {}
        self.locks: list[tuple[Prefix, RadixNode]] = []
        self.seen: Counter[str] = Counter()

    def make(self, policy: str) -> Any:
        return RadixCache(self.ledger, policy)

    def step(self, dice: random.Random, weights: Sequence[float]) -> None:
        step = dice.choices(list(self.steps), weights)[0]
        salt = dice.choice(SALTS)
        if step == "insert":
            self.insert(self.key(dice), salt, dice.choice([0, 0, 0, 1]))
        elif step == "match" or (step == "lock" and len(self.locks) < 8):
            self.match(self.key(dice), salt, step == "lock")
        elif step == "unlock" and self.locks:
            self.real.dec_lock_ref(self.locks.pop(dice.randrange(len(self.locks)))[1])
        elif step == "evict":
            self.evict(dice.randint(0, dice.choice([2, PAGES]) * self.ps))
        elif step == "states":
            self.evict_states(dice.randint(0, 2))
        elif step == "raise":
            self.real.raise_version(self.real.version + dice.randint(1, 3))
        elif step == "reset":
            self.reset()
        self.check()

    def key(self, dice: random.Random) -> Key:
        """Draw a key from few prefixes, which sometimes diverge or end inside a page."""
        key = [
            token for token in dice.choices((0, 1), k=dice.randint(0, 4)) for _ in range(self.ps)
        ]
        key += [2] * dice.choice([0, 0, 0, dice.randint(0, self.ps)])
        if key and dice.random() < 0.1:
            key[dice.randrange(len(key))] = 3
        return tuple(key)

    def aligned(self, version: int, salt: str | None, key: Key) -> list[Prefix]:
        return [(version, salt, key[:n]) for n in range(self.ps, len(key) + 1, self.ps)]

    def locked(self) -> set[Prefix]:
        return {prefix for at, _ in self.locks for prefix in self.aligned(*at)}

    def in_tree(self) -> tuple[dict[Prefix, int], dict[Prefix, int]]:
        """Collect pages and states by walking the real cache."""
        pages: dict[Prefix, int] = {}
        states: dict[Prefix, int] = {}
        for generation in self.real.generations():
            for node in generation.nodes():
                above = [*node.path()][::-1]
                assert above[0].parent is not None and node.lock_ref >= node.own_lock_ref
                named = self.aligned(
                    generation.version,
                    above[0].parent.extra_key,
                    tuple(int(t) for n in above for t in n.key),
                )
                pages |= dict(zip(named, [int(p) for n in above for p in n.pages], strict=True))
                if node.state:
                    states[named[-1]] = node.state
        return pages, states

    def insert(self, key: Key, salt: str | None, age: int) -> None:
        version = max(0, self.real.version - age)
        whole = len(key) // self.ps
        if self.ledger.available_pages < whole:
            self.evict((whole - self.ledger.available_pages) * self.ps)
        pages = self.ledger.alloc_pages(whole)
        if pages is None:
            self.seen["full of locked pages"] += 1
            return
        given, filled = np.array(key, int), pages.copy()
        kept = self.put(given, filled, version, salt)
        given[:], filled[:] = 9, 9  # the cache must have copied its arguments
        self.ledger.free_pages(pages[: kept // self.ps])
        if version < self.real.version:
            assert kept == whole * self.ps
            return
        named = self.aligned(version, salt, key)
        new = [i for i, prefix in enumerate(named) if prefix not in self.prefixes]
        assert kept == (whole - len(new)) * self.ps
        self.prefixes |= {named[i]: int(pages[i]) for i in new}

    def put(self, key: Any, pages: Any, version: int, salt: str | None) -> int:
        return self.real.insert(key, pages, version=version, extra_key=salt)

    def match(self, key: Key, salt: str | None, lock: bool) -> None:
        match = self.real.match_prefix(key, extra_key=salt)
        expected = self.found(self.aligned(self.real.version, salt, key))
        assert match.pages.tolist() == [self.prefixes[prefix] for prefix in expected]
        assert match.length == len(expected) * self.ps
        self.check_match(match, expected)
        self.seen["hits"] += bool(expected)
        if lock:
            self.real.inc_lock_ref(match.node)
            self.locks.append(((self.real.version, salt, key[: match.length]), match.node))

    def found(self, named: list[Prefix]) -> list[Prefix]:
        return [prefix for prefix in named if prefix in self.prefixes]

    def check_match(self, match: Any, expected: list[Prefix]) -> None:
        pass

    def evict(self, tokens: int) -> None:
        before, free = self.prefixes, self.ledger.available_pages
        rest = before.keys() - self.locked()
        dropped = self.real.evict(tokens)
        self.adopt()
        gone = before.keys() - self.prefixes.keys()
        assert dropped == len(gone) * self.ps == (self.ledger.available_pages - free) * self.ps
        assert dropped >= min(tokens, len(rest) * self.ps)
        self.seen["old ones evicted"] += self.check_order(gone, rest)
        self.seen["locks in the way"] += dropped < tokens and bool(self.locked())

    def adopt(self) -> None:
        """Update the model after an eviction, which must have respected all locks."""
        before, (self.prefixes, _) = self.prefixes, self.in_tree()
        assert self.prefixes.items() <= before.items() and self.locked() <= self.prefixes.keys()

    def check_order(self, gone: set[Prefix], could: set[Prefix]) -> bool:
        """Check that older versions were evicted first; return whether any of them was evicted."""
        old = {version for version, _, _ in gone if version < self.real.version}
        left = {version for version, _, _ in could - gone if version < self.real.version}
        assert not left or all(version <= min(left) for version, _, _ in gone), (
            "an entry was evicted before an older one"
        )
        return bool(old)

    def reset(self) -> None:
        if self.locked():
            with pytest.raises(ValueError, match="locked"):
                self.real.reset()
            return
        self.real.reset()
        self.prefixes = {}

    def check(self) -> None:
        self.real.check_integrity()
        self.ledger.check_integrity()
        assert self.in_tree()[0] == self.prefixes
        assert self.real.protected_size == len(self.locked()) * self.ps
        assert self.real.total_size == len(self.prefixes) * self.ps
        assert sorted(self.real.pages().tolist()) == sorted(self.prefixes.values())
        assert self.ledger.available_pages + len(self.prefixes) == PAGES


class Hybrid(Model):
    """A `MambaRadixCache` and its model, in which `states` maps a prefix to its state slot."""

    steps: ClassVar[dict[str, float]] = {**Model.steps, "states": 3}

    def make(self, policy: str) -> MambaRadixCache:
        self.slots = make_states(STATES)
        self.states: dict[Prefix, int] = {}
        return MambaRadixCache(self.ledger, self.slots, policy)

    def insert(self, key: Key, salt: str | None, age: int) -> None:
        key = key[: len(key) // self.ps * self.ps]
        if not self.slots.available_size():
            self.evict_states(1)
        if key and self.slots.available_size():
            super().insert(key, salt, age)

    def put(self, key: Any, pages: Any, version: int, salt: str | None) -> int:
        state = self.slots.alloc()
        assert state is not None
        done = self.real.insert(key, pages, state, version=version, extra_key=salt)
        prefix = (version, salt, tuple(key.tolist()))
        assert done.state_taken == (version == self.real.version and prefix not in self.states)
        if done.state_taken:
            self.states[prefix] = state
        else:
            self.slots.free(state)
        return done.length

    def found(self, named: list[Prefix]) -> list[Prefix]:
        usable = [i for i, prefix in enumerate(named, 1) if prefix in self.states]
        return named[: usable[-1]] if usable else []

    def check_match(self, match: Any, expected: list[Prefix]) -> None:
        assert match.state == (self.states[expected[-1]] if expected else None)

    def held(self) -> set[Prefix]:
        return {prefix for prefix, _ in self.locks if prefix[2]}

    def evict_states(self, count: int) -> None:
        before, free = self.states, self.slots.available_size()
        rest = before.keys() - self.held()
        dropped = self.real.evict_states(count)
        assert dropped == min(count, len(rest)) == self.slots.available_size() - free
        self.adopt()
        self.check_order(before.keys() - self.states.keys(), rest)

    def adopt(self) -> None:
        super().adopt()
        before, (_, self.states) = self.states, self.in_tree()
        assert self.states.items() <= before.items() and self.held() <= self.states.keys()
        self.seen["tombstones"] += sum(
            not n.state for g in self.real.generations() for n in g.nodes()
        )

    def reset(self) -> None:
        super().reset()
        if not self.prefixes:
            self.states = {}

    def check(self) -> None:
        super().check()
        assert self.in_tree()[1] == self.states
        self.slots.check_integrity()
        assert self.slots.available_size() + len(self.states) == STATES


MODELS = [Model, Hybrid]


@pytest.mark.soak
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_long_random_walk_equals_the_model(page_size: int, kind: type[Model]) -> None:
    """Walk through a full cache with many locks, over several versions."""
    dice = random.Random(page_size)
    model = kind(page_size, "lru")
    for _ in range(rounds(1000, 50_000)):
        model.step(dice, list(model.steps.values()))
    assert (
        min(model.seen[event] for event in ("hits", "old ones evicted", "locks in the way")) >= 5
    ), model.seen
    assert kind is Model or model.seen["tombstones"] > 50


@pytest.mark.soak
@pytest.mark.parametrize("kind", MODELS)
def test_short_walks_with_random_weights_equal_the_model(kind: type[Model]) -> None:
    """Leave operations out of short walks, and draw from all policies."""
    for seed in range(rounds(60, 3000)):
        dice = random.Random(seed)
        model = kind(dice.randint(1, 3), dice.choice(list(POLICIES)))
        weights = [weight * dice.choice([0, 0.3, 1, 3]) for weight in model.steps.values()]
        for _ in range(40):
            model.step(dice, [1 + weights[0], *weights[1:]])
