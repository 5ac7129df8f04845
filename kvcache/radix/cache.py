"""Prefix caches: of attention K/V, and of models with Mamba layers, with states at some nodes."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvcache.allocators.paged import Int64Array, KVAllocator
from kvcache.pools import MambaPool
from kvcache.radix.node import EMPTY, TOKEN_BYTES, NodeUsage, RadixNode, Tokens, as_run
from kvcache.radix.tree import PrefixTree, Walk


@dataclass  # not frozen: that takes three times as long to make
class PrefixMatch:
    """The longest cached prefix of a key: `length` tokens in whole `pages`, int64 on the CPU.

    Nothing is reserved: lock `node`, or share the pages, before the next eviction or insert.
    """

    length: int
    parts: tuple[Int64Array, ...]  # the pages, by nodes
    node: RadixNode

    @cached_property
    def pages(self) -> Int64Array:
        """Put together when asked for: of 50,000 pages that takes as long as finding them."""
        return np.concatenate([EMPTY, *self.parts])


class RadixCache(PrefixTree):
    """Knows which pages hold the K/V of which token prefixes.

    A request matches its prompt, locks the node, computes the rest, inserts what it computed and
    unlocks. Policies: lru, lfu, fifo, mru, priority (lower ones first, then as lru).
    """

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """The longest prefix in whole pages that this namespace holds under the current version. A
        match that ends inside a node splits it, so that a lock keeps exactly what was matched.
        """
        return self.match_resident(key, extra_key=extra_key)

    def peek(self, key: Tokens, *, extra_key: Hashable = None) -> tuple[int, int]:
        """(tokens that `match_resident` would find, how many are locked). Changes nothing."""
        walk = self._walk(as_run(key, "key"), extra_key)
        locked = sum(node.length for node in walk.path if node.lock_ref)
        if walk.child is not None and walk.child.lock_ref:
            locked += walk.inside
        return walk.length + walk.inside, locked

    def match_resident(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """Matches as match_prefix does, of pages that are on the device now."""
        run = as_run(key, "key")
        self._now += 1
        walk = self._split_end(self._walk(run, extra_key))
        self._touch(walk.path)
        return PrefixMatch(walk.length, walk.parts, walk.end)

    def insert(
        self,
        key: Tokens,
        pages: Tokens,
        *,
        version: int,
        extra_key: Hashable = None,
        priority: int = 0,
    ) -> int:
        """Adds the whole pages of a key, computed under weights `version`; `pages`: their ids.

        Returns the tokens n that the cache took no pages for: those of the prefix that was already
        there, or all of them where `version` is older than the cache's. It is now the owner of
        `pages[n // page_size :]`; the owners of the pages before are as they were, so the caller
        frees the duplicates that it owns. `priority` raises that of every node on the path.
        ValueError, with nothing changed, for a wrong number of pages or a future version.
        """
        run, ids = self._checked_entry(key, pages, version)
        if version < self.version:
            return len(run) // TOKEN_BYTES
        self._now += 1
        walk = self._split_end(self._walk(run, extra_key))
        self._extend(walk, run, ids)
        self._touch(walk.path, priority)
        return walk.length


@dataclass
class MambaMatch(PrefixMatch):
    """`state` is the slot with the states after `length` tokens, to be cloned; None without any.

    paged: tokens whose pages the cache has; past `length` without the states after them.
    """

    state: int | None
    paged: int


@dataclass(frozen=True)
class MambaInsert:
    """`length` as of RadixCache.insert. The slot is the cache's only where `state_taken`."""

    length: int
    state_taken: bool


class MambaRadixCache(PrefixTree):
    """RadixCache for hybrid models: a prefix is of use only up to a node that has a Mamba state.

    A lock keeps the pages of the whole path (lock_ref, the "full" lock) but the state of its own
    node alone (own_lock_ref, the "mamba" lock; never above lock_ref). States are evicted on their
    own: an inner node without one is a tombstone, whose pages still serve the nodes below. Every
    leaf has a state: one that loses it goes, with tombstones above that lead nowhere.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        states: MambaPool,
        eviction_policy: str = "lru",
        version: int = 0,
    ) -> None:
        super().__init__(allocator, eviction_policy, version)
        self.states = states
        self._num_states = 0

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> MambaMatch:
        """The longest prefix of this version that ends at a node with a state. Splits nothing."""
        run = as_run(key, "key")
        self._now += 1
        walk = self._walk(run, extra_key)
        path, paged = self._to_state(walk), walk.length + walk.inside
        if not path:
            return MambaMatch(0, (), walk.root, None, paged)
        self._use_state(path[-1])
        self._touch(path)
        length = sum(node.length for node in path)
        return MambaMatch(length, walk.parts, path[-1], path[-1].state, paged)

    def peek(self, key: Tokens, *, extra_key: Hashable = None) -> tuple[int, int]:
        """(tokens that `match_prefix` would find, how many are locked). Changes nothing."""
        path = self._to_state(self._walk(as_run(key, "key"), extra_key))
        return sum(node.length for node in path), sum(node.length for node in path if node.lock_ref)

    def insert(
        self,
        key: Tokens,
        pages: Tokens,
        state: int,
        *,
        version: int,
        extra_key: Hashable = None,
        priority: int = 0,
    ) -> MambaInsert:
        """Adds a key with the slot of the states after it; otherwise as RadixCache.insert.

        A tombstone at that place gets the state; a node that has one keeps its own. ValueError also
        for a key that is empty or ends inside a page: no node could have its state.
        """
        run, ids = self._checked_entry(key, pages, version)
        if not len(key) or len(key) % self.page_size:
            raise ValueError(
                f"{len(key)} tokens are not one or more whole pages of {self.page_size}; "
                "align the key"
            )
        assert state >= 1, "slot 0 holds no request's state"
        if version < self.version:
            return MambaInsert(len(key), False)
        self._now += 1
        walk = self._split_end(self._walk(run, extra_key))
        self._extend(walk, run, ids)
        taken = self._put_state(walk.end, state, priority)
        self._touch(walk.path, priority)
        return MambaInsert(walk.length, taken)

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Keeps the path's pages and the state of `node`; ValueError if one was evicted."""
        self._check_present(node)
        if not (node.is_root or node.state):
            raise ValueError(
                f"the state of {node} was evicted since it was matched; "
                "lock right after match_prefix"
            )
        super().inc_lock_ref(node)

    def evict_states(self, count: int) -> int:
        """Frees states, older versions first and then by policy, until `count` are free or all
        others locked; how many. Inner nodes become tombstones, leaves go with their pages.
        """
        gone: list[RadixNode] = []
        before = self._num_states
        for generation in self.generations():
            while before - self._num_states < count and generation.states:
                node = generation.states.pop()
                if node.children:
                    self._drop_state(node)
                else:
                    gone += self._remove(node)
        self._release(gone)
        return before - self._num_states

    def state_slots(self) -> list[int]:
        """All state slots that the cache owns, of older versions too. Walks all nodes."""
        return [node.state for node in self._nodes() if node.state]

    def reset(self) -> None:
        held = self.state_slots()
        super().reset()
        for slot in held:
            self.states.free(slot)
        self._num_states = 0

    def check_integrity(self) -> None:
        super().check_integrity()
        held = self.state_slots()
        assert len(held) == len(set(held)) == self._num_states, (
            "a state is in the cache twice, or was lost"
        )

    def _check_node(self, node: RadixNode) -> None:
        super()._check_node(node)
        assert node.children or node.state, f"{node} is a leaf without a state"
        assert node.state or not node.own_lock_ref, f"the state of {node} is locked and gone"
        wanted = node.state and not node.own_lock_ref
        assert node.generation.states.is_right(node, bool(wanted)), (
            f"the state of {node} is queued wrongly"
        )

    def _to_state(self, walk: Walk) -> list[RadixNode]:
        """Cuts the walk's path to the deepest node that has a state, and returns it."""
        while walk.path and not walk.path[-1].state:
            walk.path.pop()
        return walk.path

    def _use_state(self, node: RadixNode, priority: int | None = None) -> None:
        # only the state that was used, not those above it: a longer prefix makes the shorter one's
        # state idle
        node.use_of_state().touch(self._now, priority)

    def _put_state(self, node: RadixNode, state: int, priority: int) -> bool:
        taken = not node.state
        if taken:
            node.state, node.state_usage = state, NodeUsage(self._now, self._now)
            self._num_states += 1
            self._requeue(node)
        self._use_state(node, priority)
        return taken

    def _drop_state(self, node: RadixNode) -> None:
        if node.state:
            self.states.free(node.state)
            node.generation.states.discard(node)
            node.state, node.state_usage = 0, None
            self._num_states -= 1

    def _requeue(self, node: RadixNode) -> None:
        super()._requeue(node)
        if node.state and not node.own_lock_ref:
            node.generation.states.push(node)
        else:
            node.generation.states.discard(node)

    def _remove(self, leaf: RadixNode) -> list[RadixNode]:
        """Remove the leaf, and then every ancestor that is left as a leaf without a state.

        Such an ancestor cannot be locked: every lock is that of a state at or below its node.
        """
        gone: list[RadixNode] = []
        node: RadixNode | None = leaf
        while node is not None:
            parent = node.parent
            self._drop_state(node)
            gone += super()._remove(node)
            kept = parent is None or parent.is_root or parent.children or parent.state
            node = None if kept else parent
        return gone
