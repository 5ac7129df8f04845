"""Parts of a prefix tree: token runs, nodes, eviction queues and the trees of one weight version.

A run stores token ids as int32 bytes. One memcmp per node compares runs at memory speed, without a
Python object or numpy call per token or page.
"""

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
    """Return token ids `[n]` as int32 bytes; a view if the ids are already contiguous int32."""
    if isinstance(values, list | tuple):
        values = array("i", values)  # twice as fast as numpy on 50,000 ids, and rejects floats
    ids = np.asarray(values)
    assert ids.ndim == 1 and ids.dtype.kind in "iu", f"tokens are integers [n], got {ids.dtype}"
    run = np.ascontiguousarray(ids, dtype=np.int32)
    assert ids.dtype == np.int32 or (run == ids).all(), "token ids do not fit int32"
    return run.data.cast("B") if len(run) else _NO_TOKENS


def common_prefix(run: bytes, key: memoryview) -> int:
    """Return the length in bytes of the common leading tokens.

    The comparison works on chunks of growing size, so a short common prefix costs little.
    """
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
    """Priority queue that pops the item of lowest `rank`, with lazy deletion.

    `push` and `pop` take amortized O(log n), `discard` O(1). If the rank of a queued item grows,
    its entry comes up early and `pop` corrects it. If the rank falls, the item has to be pushed
    again. The heap contains at most twice as many entries as items, plus a few; beyond that it is
    rebuilt without the stale entries, a cost amortized over the pushes since the last rebuild.
    """

    def __init__(self, rank: Callable[[T], Rank]) -> None:
        self._rank = rank
        # Entries are flat tuples (*rank, push number, item), which compare twice as fast as nested
        # ones.
        self._heap: list[tuple[Any, ...]] = []
        self._live: dict[T, tuple[Any, ...]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def entries(self) -> int:
        """Return the number of heap entries, including stale ones."""
        return len(self._heap)

    def is_right(self, item: T, wanted: bool) -> bool:
        """Return whether an item is queued if and only if `wanted`, with a rank not too high."""
        entry = self._live.get(item)
        if entry is None or not wanted:
            return (entry is not None) == wanted
        return entry[:-2] <= self._rank(item)

    def push(self, item: T) -> None:
        """Add an item, or update a queued item whose rank has fallen."""
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
        """Remove and return the item of lowest rank; raise IndexError if the queue is empty."""
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
        """Create an entry of an item that supersedes its earlier entries."""
        # The push number breaks ties between equal ranks, so that items are never compared.
        self._pushes += 1
        entry = self._live[item] = (*rank, self._pushes, item)
        return entry


@dataclass(slots=True, eq=False)
class NodeUsage:
    """The usage of a node, by which eviction policies rank it.

    Times are counted in ticks; a match or an insert is one tick.
    """

    created: int
    last_access: int
    hits: int = field(default=0, kw_only=True)
    priority: int = field(default=0, kw_only=True)  # highest of the inserts through the node

    def touch(self, now: int, priority: int | None = None) -> None:
        self.last_access = now
        self.hits += 1
        if priority is not None and priority > self.priority:
            self.priority = priority


@dataclass(slots=True, eq=False)
class RadixNode(NodeUsage):
    """A node of a prefix tree, a run of whole pages. Callers use it only as a handle for locks.

    A root has no tokens and is never locked. Roots and evicted nodes have no parent.
    """

    generation: "Generation"  # trees of the node's weight version
    run: bytes  # token ids as int32
    pages: Int64Array  # replaced but never written to, so that a match may keep the array
    parent: "RadixNode | None"
    extra_key: Hashable = None  # namespace of a root
    is_root: bool = False
    # By the run of their first page.
    children: "dict[bytes, RadixNode]" = field(default_factory=dict)
    lock_ref: int = 0  # locks on this node or its descendants: own_lock_ref plus the children's
    own_lock_ref: int = 0  # locks on this node
    state: int = 0  # slot of a Mamba state; 0 without one
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

    def path(self) -> "Iterator[RadixNode]":
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
    """The trees of one weight version, with the queues of nodes and states that can be evicted."""

    def __init__(self, version: int, policy: Callable[[NodeUsage], Rank]) -> None:
        self.version = version
        self.roots: dict[Hashable, RadixNode] = {}  # only roots with children
        self.tokens = 0
        self.leaves: EvictionQueue[RadixNode] = EvictionQueue(policy)
        # Nodes with a state that is not locked.
        self.states: EvictionQueue[RadixNode] = EvictionQueue(
            lambda node: policy(node.use_of_state())
        )

    def root(self, extra_key: Hashable) -> RadixNode:
        """Return the root of a namespace; a new root is not kept, so that misses cost nothing."""
        root = self.roots.get(extra_key)
        return root or RadixNode(0, 0, self, b"", EMPTY, None, extra_key=extra_key, is_root=True)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node except roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack += node.children.values()
