"""The parts of a prefix tree: keys, nodes, their use, the eviction queue, a version's tree.

Keys are runs of int32 bytes, compared by one memcmp a node: no Python object and no numpy call for
a token or a page. Four bytes a token, because that comparison is as fast as memory is read.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvcache.allocators import Int64Array

Tokens = Sequence[int] | npt.NDArray[np.integer]  # lists, tuples, array('i'), array('q'), numpy

TOKEN_BYTES = 4
_NO_TOKENS = memoryview(b"")  # an empty view can't be cast


def as_run(values: Tokens) -> memoryview:
    """Return the bytes of token ids `[n]`, of at most 32 bits, as int32: a view where the ids are
    int32 already.
    """
    if isinstance(values, list | tuple):
        values = array("i", values)  # twice as fast as numpy on 50,000 ids, and refuses floats
    ids = np.asarray(values)
    assert ids.ndim == 1 and ids.dtype.kind in "iu", f"tokens are integers [n], got {ids.dtype}"
    run = np.ascontiguousarray(ids, dtype=np.int32)
    assert ids.dtype == np.int32 or (run == ids).all(), "token ids have 32 bits"
    return run.data.cast("B") if len(run) else _NO_TOKENS


def common_prefix(run: bytes, key: memoryview) -> int:
    """Return the bytes of the leading tokens that agree; looks at stretches that grow."""
    a, b = np.frombuffer(run, dtype=np.int32), np.frombuffer(key, dtype=np.int32)
    length = min(len(a), len(b))
    start, step = 0, 256
    while start < length:
        stop = min(length, start + step)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return (start + int(differs.argmax())) * TOKEN_BYTES
        start, step = stop, 8 * step
    return length * TOKEN_BYTES


T = TypeVar("T")
Rank = tuple[int, ...]
EMPTY = np.empty(0, dtype=np.int64)
_SLACK = 64


class EvictionQueue(Generic[T]):
    """Items, that of lowest `rank` first. `push`, `pop`: O(log n) amortised; `discard`: O(1).

    The rank of an item that waits may grow: nothing need be done then, as its entry comes up early
    and is put right. An item whose rank falls has to be pushed again. The heap holds at most twice
    as many entries as there are items (and a few): past that it is rebuilt without the outdated
    ones, which the pushes since the last time have paid for.
    """

    def __init__(self, rank: Callable[[T], Rank]) -> None:
        self._rank = rank
        # entries are flat, (*rank, number of the push, item): nested tuples take twice as long to
        # compare
        self._heap: list[tuple[Any, ...]] = []
        self._live: dict[T, tuple[Any, ...]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def entries(self) -> int:
        """Count the heap's entries, outdated ones too."""
        return len(self._heap)

    def is_right(self, item: T, wanted: bool) -> bool:
        """Return whether an item is queued exactly where that is `wanted`, and comes up in time."""
        entry = self._live.get(item)
        if entry is None or not wanted:
            return (entry is not None) == wanted
        return entry[:-2] <= self._rank(item)

    def push(self, item: T) -> None:
        """Add an item, or notice that its rank fell."""
        queued, rank = self._live.get(item), self._rank(item)
        if queued is not None and queued[:-2] <= rank:
            return
        heapq.heappush(self._heap, self._entry(item, rank))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self._live.pop(item, None)

    def pop(self) -> T:
        """Take the item of lowest rank; IndexError without one."""
        while True:
            entry = self._heap[0]
            item: T = entry[-1]
            if self._live.get(item) is not entry:
                heapq.heappop(self._heap)
            elif entry[:-2] != (rank := self._rank(item)):
                heapq.heapreplace(self._heap, self._entry(item, rank))
            else:
                heapq.heappop(self._heap)
                del self._live[item]
                return item

    def _entry(self, item: T, rank: Rank) -> tuple[Any, ...]:
        """Make the entry of an item that alone counts from now on."""
        # between equal ranks the order of pushes decides; items are never compared
        self._pushes += 1
        entry = self._live[item] = (*rank, self._pushes, item)
        return entry


@dataclass(slots=True, eq=False)
class NodeUsage:
    """Holds what policies rank by, in ticks of the cache: one match or insert is one."""

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
class RadixNode(NodeUsage):
    """A run of whole pages of tokens below its parent; to callers only a handle for locks.

    `lock_ref` counts locks on this node or below, `own_lock_ref` those on this node, so that
    lock_ref = own_lock_ref + sum of the children's lock_ref. `state` is a Mamba slot, 0 without
    one. A root has no tokens and is never locked; an evicted node has no parent.
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
    state_usage: NodeUsage | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.run) // TOKEN_BYTES

    @property
    def key(self) -> npt.NDArray[np.int32]:
        """Return the token ids."""
        return np.frombuffer(self.run, dtype=np.int32)

    def use_of_state(self) -> NodeUsage:
        assert self.state_usage is not None
        return self.state_usage

    def path(self) -> Iterator[RadixNode]:
        """Yield this node and its ancestors, without the root."""
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

    def __init__(self, version: int, policy: Callable[[NodeUsage], Rank]) -> None:
        self.version = version
        self.roots: dict[Hashable, RadixNode] = {}  # only those with children
        self.tokens = 0
        self.leaves: EvictionQueue[RadixNode] = EvictionQueue(policy)
        # not locked
        self.states: EvictionQueue[RadixNode] = EvictionQueue(
            lambda node: policy(node.use_of_state())
        )

    def root(self, extra_key: Hashable) -> RadixNode:
        """Return the root of a namespace; an empty one is not kept: misses leave nothing."""
        found = self.roots.get(extra_key)
        return found or RadixNode(0, 0, self, b"", EMPTY, None, extra_key=extra_key, is_root=True)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack += node.children.values()
