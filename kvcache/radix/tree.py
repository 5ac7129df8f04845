"""Defines what both prefix caches are built on: walking, splitting, path locks, eviction."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.allocators.paged import Int64Array, KVAllocator
from kvcache.radix.node import (
    EMPTY,
    TOKEN_BYTES,
    Generation,
    NodeUsage,
    RadixNode,
    Rank,
    Tokens,
    as_ids,
    as_run,
    check_generation,
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

FALLING = frozenset({"mru"})  # where use lowers the rank; everywhere else it never does


@dataclass(slots=True)
class Walk:
    """Says how far a key goes down a tree: `path`, `length` tokens, and `inside` of `child`."""

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
        """The pages of `path`, by nodes."""
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
        self._rank_falls = eviction_policy in FALLING
        self.eviction_policy = eviction_policy
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
        """The weight version that entries are looked up under."""
        return self._current.version

    @property
    def evictable_size(self) -> int:
        """Tokens that `evict` can drop, those of older versions included."""
        return self._evictable

    @property
    def protected_size(self) -> int:
        """Tokens that locks keep."""
        return self._protected

    @property
    def total_size(self) -> int:
        return self._evictable + self._protected

    def pages(self) -> Int64Array:
        """All pages that the cache owns, of older versions too, int64. Walks all nodes."""
        return np.concatenate([EMPTY, *(node.pages for node in self._nodes())])

    def rename(self, renamed: Int64Array) -> None:
        """Replaces the number of every page that the cache owns by `renamed[number]`."""
        for node in self._nodes():
            node.pages = renamed[node.pages]

    def raise_version(self, version: int) -> None:
        """Makes every entry a miss from now on, in O(1). Old entries are evicted before all others,
        locked ones once they are unlocked. ValueError unless `version` is above the present one.
        """
        if version <= self.version:
            raise ValueError(
                f"version {version} is not above {self.version}; weight versions only grow"
            )
        if self._current.tokens:
            self._garbage[self.version] = self._current
        self._current = Generation(version, self._policy)

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Keeps a match's node and all above it until `dec_lock_ref`; ValueError if evicted."""
        self._check_present(node)
        for above in node.path():
            if above.lock_ref == 0:
                self._evictable -= above.length
                self._protected += above.length
            above.lock_ref += 1
        if not node.is_root:
            node.own_lock_ref += 1
        # those above have children, so that they are queued neither before nor after
        self._requeue(node)

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Takes one lock off, of an older version too; ValueError for a node without."""
        self._check_present(node)
        if node.is_root:
            return
        if node.own_lock_ref == 0:
            raise ValueError(
                f"{node} has no lock of its own; call dec_lock_ref once for each inc_lock_ref"
            )
        for above in node.path():
            above.lock_ref -= 1
            if above.lock_ref == 0:
                self._evictable += above.length
                self._protected -= above.length
        node.own_lock_ref -= 1
        # those above have children, so that they are queued neither before nor after
        self._requeue(node)

    def evict(self, num_tokens: int) -> int:
        """Drops whole leaves, older versions first and then by policy, until `num_tokens` tokens
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
        """Drops everything. ValueError, with nothing changed, while something is locked."""
        if self._protected:
            raise ValueError(
                f"{self._protected} tokens are locked; end the requests that "
                "use them before reset()"
            )
        gone = list(self._nodes())
        self._garbage.clear()
        self._current = Generation(self.version, self._policy)
        self._evictable = 0
        self._release(gone)

    def check_integrity(self) -> None:
        """Raises AssertionError when counters, locks or queues are wrong, in O(tokens)."""
        evictable = protected = 0
        for generation in self.generations():
            free, locked = check_generation(generation, self.page_size)
            assert generation is self._current or generation.tokens, (
                f"version {generation.version} is empty and kept"
            )
            evictable, protected = evictable + free, protected + locked
            for node in generation.nodes():
                self._check_node(node)
        assert (evictable, protected) == (self._evictable, self._protected), (
            "sizes differ from a walk"
        )
        pages = self.pages()
        assert len(np.unique(pages)) == len(pages), "a page is in the cache twice"
        assert (self.allocator.ref_counts(pages) > 0).all(), (
            "a page of the cache is free in the ledger"
        )

    def _check_node(self, node: RadixNode) -> None:
        """More that has to hold for a node."""
        wanted = not node.children and node.lock_ref == 0
        assert node.generation.leaves.is_right(node, wanted), (
            f"{node} is queued though used, or not, or too late"
        )

    def generations(self) -> list[Generation]:
        """The trees of every version that holds tokens, oldest first, and of the current one."""
        return [*self._garbage.values(), self._current]

    def _nodes(self) -> Iterator[RadixNode]:
        return itertools.chain.from_iterable(each.nodes() for each in self.generations())

    def _check_present(self, node: RadixNode) -> None:
        if node.parent is None and not node.is_root:
            raise ValueError(
                f"{node} was evicted since it was matched; lock right after match_prefix"
            )

    def _checked_entry(
        self, key: Tokens, pages: Tokens, version: int
    ) -> tuple[memoryview, Int64Array]:
        """The run of a key's whole pages and their ids; ValueError for what can't be inserted."""
        run, ids = as_run(key, "key"), as_ids(pages, "pages")
        whole = len(run) // self._page_bytes
        if len(ids) != whole:
            raise ValueError(
                f"{len(key)} tokens fill {whole} page(s) of {self.page_size}, got {len(ids)}; "
                f"pass the whole pages only, one id a page"
            )
        if version > self.version:
            raise ValueError(
                f"version {version} is above the cache's {self.version}; call raise_version first"
            )
        return run[: whole * self._page_bytes], ids

    def _walk(self, key: memoryview, extra_key: Hashable) -> Walk:
        """Follows the whole pages of a run under the current version. Changes nothing."""
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
        """Returns the same walk, ended at a node: the child that it ends inside of is cut there."""
        if walk.child is None:
            return walk
        upper = self._split(walk.child, walk.inside)
        return Walk(walk.root, [*walk.path, upper], walk.length + walk.inside, None, 0)

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Puts the first `at` tokens of a node into a new one above, so that handles stay good."""
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
        """Adds what is left of a run below the end of a walk, and to its path."""
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
        if path and self._rank_falls:
            self._requeue(path[-1])  # those above have children, so that they are not queued

    def _requeue(self, node: RadixNode) -> None:
        """Brings the eviction queue in line with a node that has changed."""
        if node.is_root:
            return
        if node.children or node.lock_ref:
            node.generation.leaves.discard(node)
        else:
            node.generation.leaves.push(node)

    def _remove(self, leaf: RadixNode) -> list[RadixNode]:
        """Takes an unlocked leaf out; the nodes that went, whose pages are to be released."""
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
        """Gives the pages of removed nodes back, all at once."""
        if gone:
            self.allocator.free_pages(np.concatenate([node.pages for node in gone]))
        for node in gone:  # outdated queue entries and old handles shall not keep the arrays
            node.parent, node.run, node.pages = None, b"", EMPTY
            node.children.clear()
