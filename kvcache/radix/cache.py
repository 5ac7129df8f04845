"""Prefix caches: trees of page-aligned token runs that say which pages begin a prompt."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvcache.allocators import Int64Array, KVAllocator, as_int64
from kvcache.radix.node import (
    EMPTY,
    TOKEN_BYTES,
    Generation,
    NodeUsage,
    RadixNode,
    Rank,
    Tokens,
    as_run,
    common_prefix,
)

Policy = Callable[[NodeUsage], Rank]  # the entry of the lowest rank is evicted first

POLICIES: dict[str, Policy] = {
    "lru": lambda usage: (usage.last_access,),
    "mru": lambda usage: (-usage.last_access,),
    "fifo": lambda usage: (usage.created,),
    "lfu": lambda usage: (usage.hits, usage.last_access),
    "priority": lambda usage: (usage.priority, usage.last_access),
}


@dataclass(slots=True)
class Walk:
    """The way of a key down a tree: `path`, `length` tokens, and `inside` of `child`."""

    root: RadixNode
    path: list[RadixNode]
    length: int
    child: RadixNode | None
    inside: int

    @property
    def end(self) -> RadixNode:
        return self.path[-1] if self.path else self.root

    @property
    def parts(self) -> tuple[Int64Array, ...]:
        """Return the pages of `path`, by nodes."""
        return tuple([node.pages for node in self.path])


class PrefixTree:
    """Trees of page-aligned runs, one a namespace (`extra_key`) and weight version. Not
    thread-safe; on the CPU only.

    The cache is one owner of every page in it, and drops that owner when it evicts the page; a page
    that a sequence shares becomes available when that sequence lets go too.
    """

    def __init__(
        self, allocator: KVAllocator, eviction_policy: str = "lru", version: int = 0
    ) -> None:
        if eviction_policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"no eviction policy {eviction_policy!r}; there are {known}")
        self._policy = POLICIES[eviction_policy]
        self.allocator = allocator
        self.page_size = allocator.page_size
        self._page_bytes = allocator.page_size * TOKEN_BYTES  # of token ids
        self._current = Generation(version, self._policy)
        # older versions that still hold tokens, oldest first
        self._garbage: dict[int, Generation] = {}
        self._now = 0
        self._evictable = 0
        self._protected = 0

    @property
    def version(self) -> int:
        """Return the weight version that entries are looked up under."""
        return self._current.version

    @property
    def evictable_size(self) -> int:
        """Return the tokens that `evict` can drop, those of older versions included."""
        return self._evictable

    @property
    def protected_size(self) -> int:
        """Return the tokens that locks keep."""
        return self._protected

    @property
    def total_size(self) -> int:
        return self._evictable + self._protected

    def pages(self) -> Int64Array:
        """Return all pages that the cache owns, of older versions too, int64; walks all nodes."""
        return np.concatenate([EMPTY, *(node.pages for node in self._nodes())])

    def rename(self, renamed: Int64Array) -> None:
        """Replace the number of every page that the cache owns by `renamed[number]`."""
        for node in self._nodes():
            node.pages = renamed[node.pages]

    def raise_version(self, version: int) -> None:
        """Make every entry a miss, in O(1). `version` is above the present one.

        Old entries are evicted before all others, locked ones once they are unlocked.
        """
        assert version > self.version, f"weight versions only grow: {version} after {self.version}"
        if self._current.tokens:
            self._garbage[self.version] = self._current
        self._current = Generation(version, self._policy)

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Keep a match's node and all above it until `dec_lock_ref`; ValueError if evicted."""
        if node.parent is None and not node.is_root:
            raise ValueError(f"{node} was evicted since it was matched; lock right after that")
        self._lock(node, 1)

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Take one lock off a node, of an older version too."""
        assert node.is_root or node.own_lock_ref, f"{node} has no lock of its own"
        self._lock(node, -1)

    def _lock(self, node: RadixNode, change: int) -> None:
        for above in node.path():
            if 0 in (above.lock_ref, above.lock_ref + change):  # the first lock or the last
                self._evictable -= change * above.length
                self._protected += change * above.length
            above.lock_ref += change
        if not node.is_root:
            node.own_lock_ref += change
        # nodes above have children, so that they are queued neither before nor after
        self._requeue(node)

    def evict(self, num_tokens: int) -> int:
        """Drop whole leaves, older versions first and then by policy, until `num_tokens` tokens
        are gone or nothing is left to drop; the number of tokens dropped. Costs O(log n) a node
        that goes, besides freeing its pages, and a leaf that comes up having been used since it was
        queued: at most all of them, once.
        """
        gone: list[RadixNode] = []
        before = self._evictable
        for generation in self.generations():
            while before - self._evictable < num_tokens and generation.leaves:
                gone += self._remove(generation.leaves.pop())
        dropped = before - self._evictable
        self._release(gone)
        return dropped

    def reset(self) -> None:
        """Drop everything; ValueError, with nothing changed, while something is locked."""
        if self._protected:
            raise ValueError(f"{self._protected} tokens are locked; end their requests first")
        gone = list(self._nodes())
        self._garbage.clear()
        self._current = Generation(self.version, self._policy)
        self._evictable = 0
        self._release(gone)

    def check_integrity(self) -> None:
        """Raise AssertionError when counters, locks or queues are wrong, in O(tokens)."""
        evictable = protected = 0
        for generation in self.generations():
            free, locked = self._check_generation(generation)
            evictable, protected = evictable + free, protected + locked
        sizes = self._evictable, self._protected
        assert (evictable, protected) == sizes, (
            f"a walk finds {evictable}, {protected}, not {sizes}"
        )
        pages = self.pages()
        assert len(np.unique(pages)) == len(pages), "a page is in the cache twice"
        assert self.allocator.ref_counts(pages).all(), "a page of the cache is free in the ledger"

    def _check_generation(self, generation: Generation) -> tuple[int, int]:
        """Return the tokens that can be evicted, and the locked ones."""
        nodes = list(generation.nodes())
        for root in generation.roots.values():
            assert root.children and root.is_root and not root.lock_ref, (
                f"{root} is empty or locked"
            )
        for node in (*generation.roots.values(), *nodes):
            for edge, child in node.children.items():
                assert child.parent is node and child.generation is generation, f"{child} is lost"
                assert self._edge(child) == edge, f"{child} is under another run's first page"
        for node in nodes:
            self._check_node(node)
        tokens = sum(node.length for node in nodes)
        locked = sum(node.length for node in nodes if node.lock_ref)
        assert generation.tokens == tokens, f"version {generation.version} has {tokens} tokens"
        assert tokens or generation is self._current, f"version {generation.version} is empty"
        leaves = sum(not node.children and not node.lock_ref for node in nodes)
        assert leaves == len(generation.leaves), "nodes that are not in the tree are queued"
        return tokens - locked, locked

    def _check_node(self, node: RadixNode) -> None:
        assert node.length == len(node.pages) * self.page_size > 0, f"{node} has other pages"
        below = sum(child.lock_ref for child in node.children.values())
        assert node.lock_ref == node.own_lock_ref + below, f"{node}, {below} of them below"
        assert node.own_lock_ref >= 0, f"{node} was unlocked too often"
        wanted = not node.children and node.lock_ref == 0
        assert node.generation.leaves.is_right(node, wanted), f"{node} is queued wrongly"

    def generations(self) -> list[Generation]:
        """Return the trees of every version that holds tokens, oldest first, and the current."""
        return [*self._garbage.values(), self._current]

    def _nodes(self) -> Iterator[RadixNode]:
        return itertools.chain.from_iterable(
            generation.nodes() for generation in self.generations()
        )

    def _checked_entry(
        self, key: Tokens, pages: Tokens, version: int
    ) -> tuple[memoryview, Int64Array]:
        """Return the run of a key's whole pages, and their ids."""
        run, ids = as_run(key), as_int64(pages)
        whole = len(run) // self._page_bytes
        assert len(ids) == whole, f"{len(key)} tokens fill {whole} whole pages, got {len(ids)}"
        assert version <= self.version, f"version {version} is to come, after {self.version}"
        return run[: whole * self._page_bytes], ids

    def _walk(self, key: memoryview, extra_key: Hashable) -> Walk:
        """Follow the whole pages of a run under the current version; changes nothing."""
        root = node = self._current.root(extra_key)
        path: list[RadixNode] = []
        at, size = 0, self._page_bytes
        last = len(key) - size
        while at <= last and node.children:
            child = node.children.get(key[at : at + size].tobytes())
            if child is None:
                break
            end = at + len(child.run)
            if end > len(key) or not child.run.startswith(key[at:end]):
                agree = common_prefix(child.run, key[at:])
                return Walk(root, path, at // TOKEN_BYTES, child, agree // size * self.page_size)
            path.append(child)
            node, at = child, end
        return Walk(root, path, at // TOKEN_BYTES, None, 0)

    def _split_end(self, walk: Walk) -> Walk:
        """Return the same walk, ended at a node: the child that it ends inside of is cut there."""
        if walk.child is None:
            return walk
        upper = self._split(walk.child, walk.inside)
        return Walk(walk.root, [*walk.path, upper], walk.length + walk.inside, None, 0)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Put the first `at` tokens of a node into a new one above, so that handles stay good."""
        parent = node.parent
        assert parent is not None and 0 < at < node.length
        cut, byte = at // self.page_size, at * TOKEN_BYTES
        pages, born, used = node.pages[:cut].copy(), node.created, node.last_access
        upper = RadixNode(born, used, node.generation, node.run[:byte], pages, parent)
        upper.hits, upper.priority, upper.lock_ref = node.hits, node.priority, node.lock_ref
        parent.children[self._edge(upper)] = upper
        node.run, node.pages, node.parent = node.run[byte:], node.pages[cut:].copy(), upper
        upper.children[self._edge(node)] = node
        return upper

    def _extend(self, walk: Walk, key: memoryview, pages: Int64Array) -> None:
        """Add what is left of a run below the end of a walk, and to its path."""
        known = walk.length * TOKEN_BYTES
        if known == len(key):
            return
        parent, generation = walk.end, walk.root.generation
        # copies: the caller's arrays may change, and a view would keep all of them alive
        own_run, own_pages = key[known:].tobytes(), pages[walk.length // self.page_size :].copy()
        leaf = RadixNode(self._now, self._now, generation, own_run, own_pages, parent)
        generation.roots[walk.root.extra_key] = walk.root
        if not parent.children:
            generation.leaves.discard(parent)
        parent.children[self._edge(leaf)] = leaf
        generation.leaves.push(leaf)
        generation.tokens += leaf.length
        self._evictable += leaf.length
        walk.path.append(leaf)

    def _edge(self, node: RadixNode) -> bytes:
        return node.run[: self._page_bytes]

    def _touch(self, path: Sequence[RadixNode], priority: int | None = None) -> None:
        for node in path:
            node.touch(self._now, priority)
        if path:  # its rank may have fallen; nodes above have children and are not queued
            self._requeue(path[-1])

    def _requeue(self, node: RadixNode) -> None:
        """Bring the eviction queue in line with a node that has changed."""
        if node.is_root:
            return
        if node.children or node.lock_ref:
            node.generation.leaves.discard(node)
        else:
            node.generation.leaves.push(node)

    def _remove(self, leaf: RadixNode) -> list[RadixNode]:
        """Take an unlocked leaf out; return the nodes that went, whose pages are to be released."""
        parent, generation = leaf.parent, leaf.generation
        assert parent is not None and not leaf.children and leaf.lock_ref == 0
        del parent.children[self._edge(leaf)]
        leaf.parent = None
        length = leaf.length
        generation.tokens -= length
        self._evictable -= length
        generation.leaves.discard(leaf)
        if not generation.tokens:
            self._garbage.pop(generation.version, None)
        if parent.children:
            return [leaf]
        if parent.is_root:
            del generation.roots[parent.extra_key]
        self._requeue(parent)  # a leaf now
        return [leaf]

    def _release(self, gone: list[RadixNode]) -> None:
        """Give the pages of removed nodes back, all together."""
        if gone:
            self.allocator.free_pages(np.concatenate([node.pages for node in gone]))
        for node in gone:  # outdated queue entries and old handles shall not keep the arrays
            node.parent, node.run, node.pages = None, b"", EMPTY
            node.children.clear()


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
        """Return the pages in one array; of 50,000 that takes as long as finding them."""
        return np.concatenate([EMPTY, *self.parts])


class RadixCache(PrefixTree):
    """Knows which pages hold the K/V of which token prefixes.

    A request matches its prompt, locks the node, computes the rest, inserts what it computed and
    unlocks. Policies: lru, lfu, fifo, mru, priority (lower ones first, then as lru).
    """

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """Return the longest prefix in whole pages that this namespace holds under the current
        version. A match that ends inside a node splits it: a lock keeps exactly what was matched.
        """
        return self.match_resident(key, extra_key=extra_key)

    def peek(self, key: Tokens, *, extra_key: Hashable = None) -> tuple[int, int]:
        """Return the tokens that `match_resident` would find, and how many of them are locked."""
        walk = self._walk(as_run(key), extra_key)
        locked = sum(node.length for node in walk.path if node.lock_ref)
        if walk.child is not None and walk.child.lock_ref:
            locked += walk.inside
        return walk.length + walk.inside, locked

    def match_resident(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """Match as `match_prefix` does, of pages that are on the device now."""
        self._now += 1
        walk = self._split_end(self._walk(as_run(key), extra_key))
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
        """Add the whole pages of a key, computed under weights `version`; `pages`: their ids.

        The cache becomes the owner of the pages that it lacked. The owners of the others stay as
        they were, so the caller frees the duplicates that it owns. `priority` raises that of every
        node on the path.

        Returns:
            The tokens n that the cache took no pages for: those of the prefix that was there
            already, or all of them where `version` is older than the cache's. The cache owns
            `pages[n // page_size :]` now.
        """
        run, ids = self._checked_entry(key, pages, version)
        if version < self.version:
            return len(run) // TOKEN_BYTES
        self._now += 1
        walk = self._split_end(self._walk(run, extra_key))
        self._extend(walk, run, ids)
        self._touch(walk.path, priority)
        return walk.length
