"""The prefix cache of models with linear layers, which also caches states at some nodes."""

from collections.abc import Hashable
from dataclasses import dataclass

from kvcache.allocators import KVAllocator
from kvcache.pools import MambaPool
from kvcache.radix.cache import EvictionPolicy, PrefixMatch, PrefixTree, Walk
from kvcache.radix.node import NodeUsage, RadixNode, Tokens, as_run


@dataclass
class MambaMatch(PrefixMatch):
    """The longest cached prefix of a key that ends at a state."""

    state: int | None  # slot with the states after `length` tokens, to be cloned; None if 0 tokens
    paged: int  # tokens whose pages are cached, which may exceed `length`


@dataclass(frozen=True)
class MambaInsert:
    """The result of `MambaRadixCache.insert`."""

    length: int  # tokens for which the cache took no pages, as `RadixCache.insert` returns
    state_taken: bool  # whether the cache now owns the slot; if not, the caller still does


class MambaRadixCache(PrefixTree):
    """Prefix cache of hybrid models, where a prefix is usable only up to a node with a state.

    A lock protects the pages of the whole path (`lock_ref`, the "full" lock) but only the state of
    its own node (`own_lock_ref`, the "mamba" lock, never above `lock_ref`).

    States are evicted separately from pages. An inner node without a state is a tombstone, whose
    pages still serve its descendants. Every leaf has a state: a leaf that loses its state is
    removed, together with ancestors that become leaves without a state.

    The cached slots were allocated from `states`. Other arguments are as in `RadixCache`.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        states: MambaPool,
        eviction_policy: EvictionPolicy = "lru",
        version: int = 0,
    ) -> None:
        super().__init__(allocator, eviction_policy, version)
        self.states = states
        self._num_states = 0

    def match_prefix(self, key: Tokens, *, extra_key: Hashable = None) -> MambaMatch:
        """Find the longest cached prefix of the current version that ends at a state.

        Only entries inserted under an equal `extra_key` match. The length is 0 if there is no
        match. No node is split.
        """
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
        """Count the tokens that `match_prefix` would match, and how many of them are locked.

        The cache does not change.
        """
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
        """Add a key's pages and the states after its last token to the cache.

        `key` must consist of one or more whole pages, because states are stored at nodes. `state`
        is the slot of the states. If the node at the end of the key already has a state, it keeps
        that state. Other arguments and the ownership of pages are as in `RadixCache.insert`.
        """
        run, ids = self._checked_entry(key, pages, version)
        assert len(key) and not len(key) % self.page_size, f"{len(key)} tokens end inside a page"
        assert state >= 1, "slot 0 is for padding and has no request's state"
        if version < self.version:
            return MambaInsert(len(key), False)
        self._now += 1
        walk = self._split_end(self._walk(run, extra_key))
        self._extend(walk, run, ids)
        taken = self._put_state(walk.end, state, priority)
        self._touch(walk.path, priority)
        return MambaInsert(walk.length, taken)

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Lock the pages of a path and the state of its last node, until `dec_lock_ref`.

        Raises:
            ValueError: The node or its state was evicted after it was matched.
        """
        if node.parent is not None and not node.state:
            raise ValueError(f"the state of {node} was evicted since it was matched")
        super().inc_lock_ref(node)

    def evict_states(self, count: int) -> int:
        """Evict up to `count` unlocked states, and return how many were evicted.

        States of older versions are evicted first, then states in the order of the policy. An inner
        node becomes a tombstone; a leaf is removed with its pages.
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
        """Collect the state slots of all versions that the cache owns.

        The cost is proportional to the number of nodes.
        """
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
        """Truncate the walk's path to the deepest node that has a state, and return it."""
        while walk.path and not walk.path[-1].state:
            walk.path.pop()
        return walk.path

    def _use_state(self, node: RadixNode, priority: int | None = None) -> None:
        # Touch only the state that was used: states of ancestors are idle in a longer match.
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
        """Remove a leaf, and then every ancestor that becomes a leaf without a state.

        Such an ancestor cannot be locked, because every lock protects a state at or below its node.
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
