"""Defines the parts of a prefix tree: nodes, their use so far, the tree of one weight version."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.radix.keys import TOKEN_BYTES, Int64Array
from kvcache.radix.queue import EvictionQueue, Rank

EMPTY = np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Usage:
    """Holds what policies rank by.

    Times are ticks of the cache's own clock: one match or insert is one tick.
    """

    created: int
    last_access: int
    hits: int = field(default=0, kw_only=True)
    priority: int = field(default=0, kw_only=True)

    def touch(self, now: int, priority: int | None = None) -> None:
        self.last_access = now
        self.hits += 1
        if priority is not None and priority > self.priority:
            self.priority = priority


@dataclass(slots=True, eq=False)
class RadixNode(Usage):
    """A run of whole pages of tokens below its parent; callers hold one as a handle for locks and
    read nothing else.

    `lock_ref` counts locks on this node or below, `own_lock_ref` those on this node, so that
    lock_ref = own_lock_ref + sum of the children's lock_ref. `state` is a Mamba slot, 0 without
    one. A root has no tokens and is never locked; a node that was evicted has no parent and is no
    root.
    """

    generation: Generation
    run: bytes  # int32 token ids
    pages: Int64Array  # replaced and never written, so that matches may keep it
    parent: RadixNode | None
    extra_key: Hashable = None  # of a root
    is_root: bool = False
    # by the bytes of a child's first page of tokens
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    lock_ref: int = 0
    own_lock_ref: int = 0
    state: int = 0
    state_usage: Usage | None = None

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.run) // TOKEN_BYTES

    @property
    def key(self) -> npt.NDArray[np.int32]:
        """The token ids."""
        return np.frombuffer(self.run, dtype=np.int32)

    def use_of_state(self) -> Usage:
        assert self.state_usage is not None
        return self.state_usage

    def path(self) -> Iterator[RadixNode]:
        """This node and its ancestors, without the root."""
        node: RadixNode | None = self
        while node is not None and not node.is_root:
            yield node
            node = node.parent

    def __repr__(self) -> str:
        kind = "root" if self.is_root else "evicted node" if self.parent is None else "node"
        version = self.generation.version
        return f"<{kind} of version {version}, {self.length} tokens, {self.lock_ref} lock(s)>"


class Generation:
    """All trees of one weight version, and what of them can be evicted."""

    def __init__(self, version: int, policy: Callable[[Usage], Rank]) -> None:
        self.version = version
        self.roots: dict[Hashable, RadixNode] = {}  # only those with children
        self.tokens = 0
        self.leaves: EvictionQueue[RadixNode] = EvictionQueue(policy)
        # not locked
        self.states: EvictionQueue[RadixNode] = EvictionQueue(
            lambda node: policy(node.use_of_state())
        )

    def root(self, extra_key: Hashable) -> RadixNode:
        """The root of a namespace; an empty one is made up and not kept, so that misses leave
        nothing behind.
        """
        found = self.roots.get(extra_key)
        return found or RadixNode(0, 0, self, b"", EMPTY, None, extra_key=extra_key, is_root=True)

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack += node.children.values()
