"""Prefix cache of attention K/V."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvcache.radix.keys import TOKEN_BYTES, Int64Array, Tokens, as_run
from kvcache.radix.node import EMPTY, RadixNode
from kvcache.radix.tree import PrefixTree


@dataclass  # not frozen: that takes three times as long to make
class PrefixMatch:
    """The longest cached prefix of a key: `length` tokens (whole pages) in `pages`, int64 on the
    CPU.

    Nothing is reserved: lock `node` (or share the pages) before anything else is evicted or
    inserted.
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
    unlocks. Policies: lru, lfu, fifo, mru, priority (lower ones go first, then the least recently
    used).
    """

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """The longest prefix in whole pages that this namespace holds under the current version. A
        match that ends inside a node splits it, so that a lock keeps exactly what was matched.
        """
        return self.match_resident(key, extra_key=extra_key)

    def peek(self, key: Tokens, *, extra_key: Hashable = None) -> tuple[int, int]:
        """(tokens that `match_resident` would find, how many of them are locked).

        Changes nothing, uses included.
        """
        walk = self._walk(as_run(key, "key"), extra_key)
        locked = sum(node.length for node in walk.path if node.lock_ref)
        if walk.child is not None and walk.child.lock_ref:
            locked += walk.inside
        return walk.length + walk.inside, locked

    def match_resident(self, key: Tokens, *, extra_key: Hashable = None) -> PrefixMatch:
        """Matches as match_prefix does, of pages that are on the device now, also where tiers below
        it could bring back more.
        """
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
        """Adds the whole pages of a key, computed under weights `version`; `pages` are their ids,
        one a page.

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
