"""The prefix cache of models with linear layers: pages everywhere, states at some nodes."""

from collections.abc import Hashable
from dataclasses import dataclass

from kvcache.allocators import KVAllocator
from kvcache.pools import MambaPool
from kvcache.radix.cache import PrefixMatch, PrefixTree, Walk
from kvcache.radix.node import NodeUsage, RadixNode, Tokens, as_run


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
        """Return the longest prefix of this version that ends at a state; splits nothing."""
        self._now += 1
        walk = self._walk(as_run(key), extra_key)
        path, paged = self._to_state(walk), walk.length + walk.inside
        if not path:
            return MambaMatch(0, (), walk.root, None, paged)
        self._use_state(path[-1])
        self._touch(path)
        length = sum(node.length for node in path)
        return MambaMatch(length, walk.parts, path[-1], path[-1].state, paged)

    def peek(self, key: Tokens, *, extra_key: Hashable = None) -> tuple[int, int]:
        """Return the tokens that `match_prefix` would find, and how many of them are locked."""
        path = self._to_state(self._walk(as_run(key), extra_key))
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
        """Add a key with the slot of the states after it; otherwise as `RadixCache.insert`.

        A tombstone at that place gets the state; a node that has one keeps its own. A key is one or
        more whole pages: no other node could have its state.
        """
        run, ids = self._checked_entry(key, pages, version)
        assert len(key) and not len(key) % self.page_size, f"{len(key)} tokens end inside a page"
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
        """Keep the path's pages and the state of `node`; ValueError if one was evicted."""
        if node.parent is not None and not node.state:
            raise ValueError(f"the state of {node} was evicted since it was matched")
        super().inc_lock_ref(node)

    def evict_states(self, count: int) -> int:
        """Free states, older versions first and then by policy, until `count` are free or all
        others locked; return how many. Inner nodes become tombstones, leaves go with their pages.
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
        """Return all state slots that the cache owns, of older versions too; walks all nodes."""
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
        assert len(held) == len(set(held)) == self._num_states, "a state is held twice, or was lost"

    def _check_node(self, node: RadixNode) -> None:
        super()._check_node(node)
        assert node.children or node.state, f"{node} is a leaf without a state"
        assert node.state or not node.own_lock_ref, f"the state of {node} is locked and gone"
        wanted = bool(node.state) and not node.own_lock_ref
        assert node.generation.states.is_right(node, wanted), f"state of {node} is queued wrongly"

    def _to_state(self, walk: Walk) -> list[RadixNode]:
        """Cut the walk's path to the deepest node that has a state, and return it."""
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
