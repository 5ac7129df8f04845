"""Defines the parts of a prefix tree: keys, nodes, their use, the eviction queue, a version's tree.

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

from kvcache.allocators.paged import Int64Array

Tokens = Sequence[int] | npt.NDArray[np.integer]  # lists, tuples, array('i'), array('q'), numpy

TOKEN_BYTES = 4
_BOUNDS = np.iinfo(np.int32)
_NO_TOKENS = memoryview(b"")  # an empty view can't be cast


def as_ids(values: Tokens, name: str) -> Int64Array:
    """int64 `[n]`, a view of a dense int64 array. ValueError for anything else."""
    return np.ascontiguousarray(_integers(values, name, "q"), dtype=np.int64)


def as_run(values: Tokens, name: str) -> memoryview:
    """The bytes of ids as int32, a view of array('i') and of a dense int32 array. ValueError as of
    `as_ids`, and for ids of more than 32 bits.
    """
    if isinstance(values, array) and values.typecode == "i" and values:
        return memoryview(values).cast("B")
    ids = _integers(values, name, "i")
    if ids.dtype != np.int32 and not _fit(ids):
        raise ValueError(f"{name} must be integers of 32 bits, got {ids.min()} to {ids.max()}")
    return np.ascontiguousarray(ids, dtype=np.int32).data.cast("B") if len(ids) else _NO_TOKENS


def common_prefix(run: bytes, key: memoryview) -> int:
    """Bytes of the leading tokens that agree, looked for in stretches that grow."""
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


def _fit(ids: npt.NDArray[np.integer]) -> bool:
    """Tells whether int32 can hold them; makes one pass where none is negative."""
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    if not len(ids) or unsigned.max() <= _BOUNDS.max:
        return True
    return bool(_BOUNDS.min <= ids.min() <= ids.max() <= _BOUNDS.max)


def _integers(values: Tokens, name: str, typecode: str) -> npt.NDArray[np.integer]:
    """One dimension of integers of any width; of lists that of `typecode`."""
    if isinstance(values, list | tuple):
        try:
            # twice as fast as numpy on 50,000 ids, and refuses floats
            values = array(typecode, values)
        except (TypeError, OverflowError) as error:
            bits = 8 * array(typecode).itemsize
            raise ValueError(f"{name} must be integers of {bits} bits: {error}") from error
    ids = np.asarray(values)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one-dimensional integers, got {ids.dtype} of shape {ids.shape}"
        )
    return ids


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

    def __contains__(self, item: T) -> bool:
        return item in self._live

    @property
    def entries(self) -> int:
        """Counts the heap's entries, outdated ones too."""
        return len(self._heap)

    def is_right(self, item: T, wanted: bool) -> bool:
        """Tells whether an item is queued exactly where that is `wanted`, and comes up in time."""
        entry = self._live.get(item)
        if entry is None or not wanted:
            return (entry is not None) == wanted
        return entry[:-2] <= self._rank(item)

    def push(self, item: T) -> None:
        """Adds an item, or notices that its rank fell."""
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
        """Takes the item of lowest rank; IndexError without one."""
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
        """Its only one that counts from here on."""
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
        """Tokens."""
        return len(self.run) // TOKEN_BYTES

    @property
    def key(self) -> npt.NDArray[np.int32]:
        """The token ids."""
        return np.frombuffer(self.run, dtype=np.int32)

    def use_of_state(self) -> NodeUsage:
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
        """The root of a namespace; an empty one is not kept, so that misses leave nothing."""
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


def check_generation(generation: Generation, page_size: int) -> tuple[int, int]:
    """Tokens that can be evicted, and locked ones; AssertionError for a contradiction."""
    evictable = protected = 0
    nodes = list(generation.nodes())
    for root in generation.roots.values():
        assert root.children and root.is_root and root.lock_ref == 0, f"{root} is empty or locked"
        _check_children(root, page_size)
    for node in nodes:
        _check_node(node, page_size)
        if node.lock_ref:
            protected += node.length
        else:
            evictable += node.length
    assert generation.tokens == evictable + protected, (
        f"version {generation.version} counts {generation.tokens} tokens"
    )
    leaves = sum(not node.children and node.lock_ref == 0 for node in nodes)
    assert leaves == len(generation.leaves), (
        "the eviction queue holds nodes that are not in the tree"
    )
    return evictable, protected


def _check_node(node: RadixNode, page_size: int) -> None:
    assert node.length and node.length == len(node.pages) * page_size, (
        f"{node} has {len(node.pages)} pages"
    )
    below = sum(child.lock_ref for child in node.children.values())
    assert node.lock_ref == node.own_lock_ref + below, (
        f"{node} has {node.own_lock_ref} locks and {below} below it"
    )
    assert node.own_lock_ref >= 0, f"{node} was unlocked too often"
    _check_children(node, page_size)


def _check_children(node: RadixNode, page_size: int) -> None:
    for edge, child in node.children.items():
        assert child.parent is node and child.generation is node.generation, (
            f"{child} has another parent"
        )
        assert child.run[: page_size * TOKEN_BYTES] == edge, (
            f"{child} is under another run's first page"
        )
