"""The radix tree of cached prefixes, and the prefix cache of attention-only models."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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

Policy = Callable[[NodeUsage], Rank]  # the node of the lowest rank is evicted first

EvictionPolicy = Literal["lru", "mru", "fifo", "lfu", "priority"]
"""Names of the eviction policies of a prefix cache."""

POLICIES: dict[EvictionPolicy, Policy] = {
    "lru": lambda usage: (usage.last_access,),
    "mru": lambda usage: (-usage.last_access,),
    "fifo": lambda usage: (usage.created,),
    "lfu": lambda usage: (usage.hits, usage.last_access),
    "priority": lambda usage: (usage.priority, usage.last_access),
}


@dataclass(slots=True)
class Walk:
    """The result of following a key down a tree."""

    root: RadixNode
    path: list[RadixNode]  # nodes whose runs match completely
    length: int  # tokens in `path`
    child: RadixNode | None  # node whose run matches in part
    inside: int  # tokens of `child` that match, in whole pages

    @property
    def end(self) -> RadixNode:
        return self.path[-1] if self.path else self.root

    @property
    def parts(self) -> tuple[Int64Array, ...]:
        """Return the pages of each node of `path`."""
        return tuple([node.pages for node in self.path])


class PrefixTree:
    """Radix trees of page-aligned token runs, one per namespace (`extra_key`) and weight version.

    The cache is one of the owners of each of its pages and drops out when it evicts the page. A
    page that a sequence also owns becomes free when that sequence ends. The cache is on the CPU and
    not thread-safe. The arguments are those of `RadixCache`.
    """

    def __init__(
        self, allocator: KVAllocator, eviction_policy: EvictionPolicy = "lru", version: int = 0
    ) -> None:
        if eviction_policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"eviction_policy={eviction_policy!r} is unknown; use one of {known}")
        self._policy = POLICIES[eviction_policy]
        self.allocator = allocator
        self.page_size = allocator.page_size
        self._page_bytes = allocator.page_size * TOKEN_BYTES  # bytes of a page's token ids
        self._current = Generation(version, self._policy)
        # Older versions that still have tokens, oldest first.
        self._garbage: dict[int, Generation] = {}
        self._now = 0
        self._evictable = 0
        self._protected = 0

    @property
    def version(self) -> int:
        """Return the weight version whose entries can be matched."""
        return self._current.version

    @property
    def evictable_size(self) -> int:
        """Return the number of tokens that `evict` can drop, of all versions."""
        return self._evictable

    @property
    def protected_size(self) -> int:
        """Return the number of tokens that locks protect from eviction."""
        return self._protected

    @property
    def total_size(self) -> int:
        """Return the number of cached tokens, of all versions."""
        return self._evictable + self._protected

    def pages(self) -> Int64Array:
        """Collect the pages of all versions that the cache owns.

        The cost is proportional to the number of nodes.

        Returns:
            Page numbers, int64 `[n]`.
        """
        return np.concatenate([EMPTY, *(node.pages for node in self._nodes())])

    def rename(self, renamed: Int64Array) -> None:
        """Replace the number of every page that the cache owns.

        Args:
            renamed: New number of every page, int64 `[total_pages + 1]`, as returned by
                `BlockManager.compact`.
        """
        for node in self._nodes():
            node.pages = renamed[node.pages]

    def raise_version(self, version: int) -> None:
        """Start a new weight version, which makes every present entry a miss, in O(1).

        Entries of older versions are evicted first, and locked ones once they are unlocked.

        Args:
            version: The new version, greater than the present one.
        """
        assert version > self.version, f"weight versions only grow: {version} after {self.version}"
        if self._current.tokens:
            self._garbage[self.version] = self._current
        self._current = Generation(version, self._policy)

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Lock a node and its ancestors against eviction, until `dec_lock_ref`.

        Args:
            node: Node of a match.

        Raises:
            ValueError: The node was evicted after it was matched.
        """
        if node.parent is None and not node.is_root:
            raise ValueError(f"{node} was evicted since it was matched; lock it right after that")
        self._lock(node, 1)

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Remove one lock from a node and its ancestors.

        Args:
            node: A node locked with `inc_lock_ref`; its version may be an older one.
        """
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
        # Ancestors have children, so they are not in the queue of leaves.
        self._requeue(node)

    def evict(self, num_tokens: int) -> int:
        """Evict whole leaves, those of older versions first, then in the order of the policy.

        The cost is O(log n) per evicted node, plus freeing its pages, and O(log n) per leaf that
        was used since it was queued.

        Args:
            num_tokens: Tokens to evict at least, as far as they are not locked.

        Returns:
            The number of tokens evicted, which may exceed `num_tokens`.
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
        """Evict everything.

        Raises:
            ValueError: Tokens are locked. Nothing has changed.
        """
        if self._protected:
            raise ValueError(f"{self._protected} tokens are locked; end their requests first")
        gone = list(self._nodes())
        self._garbage.clear()
        self._current = Generation(self.version, self._policy)
        self._evictable = 0
        self._release(gone)

    def check_integrity(self) -> None:
        """Raise AssertionError if counters, locks or queues are inconsistent, in O(tokens)."""
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
        """Check one version; return its numbers of evictable and of locked tokens."""
        nodes = list(generation.nodes())
        for root in generation.roots.values():
            assert root.children and root.is_root and not root.lock_ref, (
                f"{root} is empty or locked"
            )
        for node in (*generation.roots.values(), *nodes):
            for edge, child in node.children.items():
                assert child.parent is node and child.generation is generation, f"{child} is lost"
                assert self._edge(child) == edge, f"{child} is filed under another first page"
        for node in nodes:
            self._check_node(node)
        tokens = sum(node.length for node in nodes)
        locked = sum(node.length for node in nodes if node.lock_ref)
        assert generation.tokens == tokens, f"version {generation.version} has {tokens} tokens"
        assert tokens or generation is self._current, f"version {generation.version} is empty"
        leaves = sum(not node.children and not node.lock_ref for node in nodes)
        assert leaves == len(generation.leaves), "nodes are queued that are not in the tree"
        return tokens - locked, locked

    def _check_node(self, node: RadixNode) -> None:
        assert node.length == len(node.pages) * self.page_size > 0, f"{node} lacks pages"
        below = sum(child.lock_ref for child in node.children.values())
        assert node.lock_ref == node.own_lock_ref + below, f"{node}, {below} locks on children"
        assert node.own_lock_ref >= 0, f"{node} was unlocked too often"
        wanted = not node.children and node.lock_ref == 0
        assert node.generation.leaves.is_right(node, wanted), f"{node} is queued wrongly"

    def generations(self) -> list[Generation]:
        """Return the trees of each version that has tokens, oldest first, the current one last."""
        return [*self._garbage.values(), self._current]

    def _nodes(self) -> Iterator[RadixNode]:
        return itertools.chain.from_iterable(
            generation.nodes() for generation in self.generations()
        )

    def _checked_entry(
        self, key: Tokens, pages: Tokens, version: int
    ) -> tuple[memoryview, Int64Array]:
        """Return the run of a key's whole pages, and the page numbers as int64."""
        run, ids = as_run(key), as_int64(pages)
        whole = len(run) // self._page_bytes
        assert len(ids) == whole, f"{len(key)} tokens fill {whole} whole pages, got {len(ids)}"
        assert version <= self.version, f"version {version} is newer than {self.version}"
        return run[: whole * self._page_bytes], ids

    def _walk(self, key: memoryview, extra_key: Hashable) -> Walk:
        """Follow the whole pages of a run in the current version, without changing the tree."""
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
                common = common_prefix(child.run, key[at:])
                return Walk(root, path, at // TOKEN_BYTES, child, common // size * self.page_size)
            path.append(child)
            node, at = child, end
        return Walk(root, path, at // TOKEN_BYTES, None, 0)

    def _split_end(self, walk: Walk) -> Walk:
        """Split the child that a walk ends inside of; return the walk, which now ends at a node."""
        if walk.child is None:
            return walk
        upper = self._split(walk.child, walk.inside)
        return Walk(walk.root, [*walk.path, upper], walk.length + walk.inside, None, 0)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Move the first `at` tokens of a node to a new parent, so that handles stay valid."""
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
        """Add the rest of a run as a leaf at the end of a walk, and to the walk's path."""
        known = walk.length * TOKEN_BYTES
        if known == len(key):
            return
        parent, generation = walk.end, walk.root.generation
        # Copy, because the caller's arrays may change and a view would keep them alive.
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
        # Only the last node can be a leaf. Its rank may have fallen.
        if path:
            self._requeue(path[-1])

    def _requeue(self, node: RadixNode) -> None:
        """Update the eviction queue for a node that has changed."""
        if node.is_root:
            return
        if node.children or node.lock_ref:
            node.generation.leaves.discard(node)
        else:
            node.generation.leaves.push(node)

    def _remove(self, leaf: RadixNode) -> list[RadixNode]:
        """Remove an unlocked leaf; return the removed nodes, whose pages must be released."""
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
        """Free the pages of removed nodes, in one call."""
        if gone:
            self.allocator.free_pages(np.concatenate([node.pages for node in gone]))
        for node in gone:  # stale queue entries and handles must not keep the arrays alive
            node.parent, node.run, node.pages = None, b"", EMPTY
            node.children.clear()


@dataclass  # not frozen, which would take three times as long to construct
class PrefixMatch:
    """The longest cached prefix of a key.

    The match reserves nothing: lock `node` or share the pages before the next eviction or insert.

    Attributes:
        length: Tokens in the prefix, a multiple of the page size.
        parts: Page numbers, int64 on the CPU, one array per node of the tree.
        node: Node at which the prefix ends.
    """

    length: int
    parts: tuple[Int64Array, ...]
    node: RadixNode

    @cached_property
    def pages(self) -> Int64Array:
        """Return the page numbers of the prefix in one array, concatenated on first access."""
        return np.concatenate([EMPTY, *self.parts])


class RadixCache(PrefixTree):
    """Prefix cache that maps token prefixes to the pages with their keys and values.

    A request matches its prompt, locks the node, computes the rest, inserts its pages and unlocks
    the node. Entries are separate for each namespace (`extra_key`) and weight version.

    Args:
        allocator: Ledger of the pages.
        eviction_policy: Which unlocked leaf is evicted first: the least recently used ("lru"), the
            most recently used ("mru"), the oldest ("fifo"), the least often used ("lfu"), or that
            of lowest priority ("priority"). Ties of the last two go to the least recently used.
        version: Weight version of the first entries.

    Raises:
        ValueError: The eviction policy is unknown.
    """

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """Find the longest cached prefix of a key, in whole pages of the current version.

        A match that ends inside a node splits the node, so that a lock covers only the match.

        Args:
            key: Token ids `[n]`.
            extra_key: Namespace; only entries inserted under an equal one match.

        Returns:
            The match, of length 0 if there is none.
        """
        return self.match_resident(key, extra_key=extra_key)

    def peek(self, key: Tokens, *, extra_key: Hashable = None) -> tuple[int, int]:
        """Count the tokens that `match_resident` would match, without changing the cache.

        Args:
            key: Token ids `[n]`.
            extra_key: Namespace.

        Returns:
            The number of matching tokens, and how many of them are locked.
        """
        walk = self._walk(as_run(key), extra_key)
        locked = sum(node.length for node in walk.path if node.lock_ref)
        if walk.child is not None and walk.child.lock_ref:
            locked += walk.inside
        return walk.length + walk.inside, locked

    def match_resident(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """Find the longest cached prefix whose pages are on the device.

        Unlike `match_prefix` of a cache with tiers, this never loads pages.

        Args:
            key: Token ids `[n]`.
            extra_key: Namespace.

        Returns:
            The match, of length 0 if there is none.
        """
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
        """Add the whole pages of a key to the cache.

        The caller's ownership of `pages[n // page_size :]` passes to the cache, where n is the
        result. The caller still owns the earlier pages, and frees them.

        Args:
            key: Token ids `[m]`; tokens after the last whole page are ignored.
            pages: Page numbers `[m // page_size]`.
            version: Weight version under which the pages were computed.
            extra_key: Namespace.
            priority: Raises the priority of every node on the path to at least this number.

        Returns:
            The tokens n for which the cache took no pages: the prefix that was already cached, or
            all whole pages if `version` is older than the cache's.
        """
        run, ids = self._checked_entry(key, pages, version)
        if version < self.version:
            return len(run) // TOKEN_BYTES
        self._now += 1
        walk = self._split_end(self._walk(run, extra_key))
        self._extend(walk, run, ids)
        self._touch(walk.path, priority)
        return walk.length
