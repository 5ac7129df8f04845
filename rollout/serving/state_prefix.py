"""PrefixBlocks of models with linear layers: a kept prefix is pages and the states after them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvcache import BlockManager, PrefixMatch, ReqHandle
from kvcache.pools import HybridReqToTokenPool
from kvcache.radix import MambaMatch, MambaRadixCache
from rollout.serving.prefix import PrefixBlocks


class StatePrefixBlocks(PrefixBlocks):
    """States can't go back, so a prefill stops where they are to be kept: where the last whole page
    ends before the prompt's last token, and before that at its `branch`, up to where the cache has
    pages without states: other prompts began alike and went on otherwise.

    Answers are not kept: when a sequence ends, its states are past its last whole page. The cache
    has at most the slots that the request table has no row for.
    """

    def __init__(self, blocks: BlockManager) -> None:
        table = blocks.req_to_token
        assert isinstance(table, HybridReqToTokenPool), "Cache.prefix_blocks takes no other"
        self._table, self._states = table, table.mamba
        self._prefixes = MambaRadixCache(blocks.allocator, table.mamba)
        super().__init__(blocks, self._prefixes)

    def keep_at(self, handle: ReqHandle, computed: int, length: int) -> int:
        page = self._prefixes.page_size
        cuts = (self._held[handle].branch, (length - 1) // page * page)
        return min((cut for cut in cuts if cut > computed), default=length)

    def keep(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        """Keeps as the base does, with a copy of the sequence's states, which are those after
        `tokens`; nothing where these end inside a page, or no slot can be had.
        """
        ids, held = array("i", tokens), self._held[handle]
        if len(ids) % self._prefixes.page_size or held.version != self._prefixes.version:
            return
        # again after the eviction, which may take pages that this one would only add states to
        if not (self._wanted(held.length, ids) and self._slot() and self._wanted(held.length, ids)):
            return
        slots = self._states.clone([self._table.mamba_slot(handle)])
        assert slots is not None, "a slot was made free"
        pages = self.blocks.pages(handle)
        kept = self._prefixes.insert(ids, pages, slots[0], version=held.version)
        self.blocks.allocator.share(pages[kept.length // self._prefixes.page_size :])
        if kept.length == held.length:
            super()._begin(handle, self._prefixes.match_prefix(ids))
            self._prefixes.dec_lock_ref(held.node)

    def check_integrity(self) -> None:
        super().check_integrity()
        rows = self._table.size - self._table.available_size()
        kept = len(self._prefixes.state_slots())
        assert rows + kept == self._states.size - self._states.available_size(), (
            "states are held by neither a request nor the cache"
        )

    def _wanted(self, own: int, ids: array[int]) -> bool:
        """Tells whether the cache lacks the states after `ids`, and has either their pages or no
        more than the `own` first tokens': in between this sequence has pages of its own.
        """
        match = self._prefixes.match_prefix(ids)
        return match.length < len(ids) and match.paged in (own, len(ids))

    def _slot(self) -> bool:
        """Makes a slot free that no row needs; False where requests use all that are kept."""
        while self._states.available_size() <= self._table.available_size():
            if not self._prefixes.evict_states(1):
                return False
        return True

    def _begin(self, handle: ReqHandle, match: PrefixMatch) -> None:
        assert isinstance(match, MambaMatch)
        if match.state is not None:
            try:
                self._states.copy([self._table.mamba_slot(handle)], [match.state])
            except BaseException:  # such as the device being out of memory
                self.blocks.release(handle)
                raise
        super()._begin(handle, match)
        self._held[handle] = replace(self._held[handle], branch=match.paged)

    def _insert(self, handle: ReqHandle, tokens: array[int], version: int) -> None:
        """Keeps nothing of a sequence that ends."""
