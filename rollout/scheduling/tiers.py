"""Prefix blocks with host and disk tiers below the device pool."""

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvcache import BlockManager, PrefixMatch, ReqHandle
from kvcache.pools import TokenPool
from kvcache.tiers import DiskTier, HostKVCache, HostTransfer, TieredPrefixCache, page_hashes
from rollout.config import KVTiers
from rollout.scheduling.prefix import PrefixBlocks, Swapped

_log = logging.getLogger("rollout")


class TieredBlocks(PrefixBlocks):
    """Prefix blocks whose cached pages and preempted samples move to host and disk.

    A swap saves a sample's whole pages on the host by their hashes, like cached pages, and its last
    tokens in a private host page. The sample then continues where it stopped, and nothing is
    computed twice. Pages that the host drops meanwhile are read from disk or computed again.

    Loads run during steps: a step waits, layer by layer, for the copies that `loads` returns.
    """

    def __init__(self, blocks: BlockManager, config: KVTiers) -> None:
        pool = blocks.pool
        assert isinstance(pool, TokenPool), "Cache.prefix_blocks checks this"
        host = HostKVCache(pool, config.host)
        self.tiers = TieredPrefixCache(
            blocks.allocator, host, _disk(config, host), write_policy=config.write_policy
        )
        super().__init__(blocks, self.tiers)
        self._swaps = config.preemption == "swap"
        self._keep_asleep = config.keep_asleep
        self._loads: list[HostTransfer] = []

    def admit(
        self,
        tokens: Sequence[int],
        swapped: Swapped | None = None,
        namespace: int | None = None,
    ) -> tuple[ReqHandle, int] | None:
        try:
            admitted = super().admit(tokens, namespace=namespace)
            if admitted is None or swapped is None:
                return admitted
            handle, computed = admitted
            try:
                return handle, self._restore(handle, computed, swapped)
            except BaseException:  # for example, the device is out of memory
                self.release(handle, tokens[:computed])
                raise
        finally:
            if swapped is not None:
                self.forget(swapped)

    def swap_out(self, handle: ReqHandle, tokens: Sequence[int]) -> Swapped | None:
        held = self._held[handle]
        if not self._swaps or held.version != self.tiers.version:
            return None
        hashes = page_hashes(tokens, self.tiers.page_size, held.namespace)
        kept = self.tiers.save(hashes, self.blocks.pages(handle)[: len(hashes)])
        page, whole = 0, len(hashes) * self.tiers.page_size
        if kept and whole < len(tokens):
            slots = torch.from_numpy(self.blocks.token_ids(handle, whole, len(tokens)))
            page = self.tiers.store_private(slots, hashes)
        try:
            self.tiers.wait_for_copies()  # the caller frees the sequence's pages next
        except BaseException:
            if page:
                self.tiers.lower.free_private(page)
            raise
        return Swapped(tokens=len(tokens), version=held.version, page=page) if kept else None

    def forget(self, swapped: Swapped) -> None:
        if swapped.page:
            self.tiers.lower.free_private(swapped.page)

    def loads(self) -> tuple[HostTransfer, ...]:
        self._loads = [load for load in self._loads if not load.done]
        return tuple(self._loads)

    def release(self, handle: ReqHandle, tokens: Sequence[int]) -> None:
        for load in self.loads():  # left by a failed step; the freed pages may be written next
            load.wait()
        super().release(handle, tokens)

    def move_below(self, keep: bool) -> None:
        if keep and self._keep_asleep:
            self._notice_format()
            self.tiers.move_to_host()
        else:
            self.clear()

    def clear(self) -> None:
        super().clear()
        self.tiers.finish_copies()

    def swapped_pages(self) -> int:
        return self.tiers.lower.private_pages

    def _match(self, tokens: Sequence[int], namespace: int | None) -> PrefixMatch:
        match = self.tiers.match_prefix(tokens, extra_key=namespace)
        if match.loaded:
            self._loads.append(match.transfer)
            self.loaded_tokens += match.loaded
        return match

    def _restore(self, handle: ReqHandle, computed: int, swapped: Swapped) -> int:
        """Load the last page of a swapped sample; return the number of computed tokens.

        `computed` is the number of tokens that the prefix cache has provided.
        """
        whole = swapped.tokens // self.tiers.page_size * self.tiers.page_size
        stale = swapped.version != self.tiers.version
        if stale or computed < whole:
            why = "the weights changed" if stale else "the tiers dropped pages"
            text = "a swapped sample computes %d of %d tokens again: %s"
            _log.info(text, swapped.tokens - computed, swapped.tokens, why)
        elif computed == whole and swapped.page:
            slots = self.grow(np.array([handle.row]), np.array([swapped.tokens]))
            if slots is not None:
                self._loads.append(self.tiers.load_private(swapped.page, slots))
                computed = swapped.tokens
        return computed

    def _notice_format(self) -> None:
        before = self._format
        super()._notice_format()
        if self._format != before:
            self.tiers.lower.host.accept_scales()


def _disk(config: KVTiers, host: HostKVCache) -> DiskTier | None:
    """Build the disk tier with a unique owner: other engines number their versions differently."""
    if config.disk_directory is None or config.disk_bytes is None:
        return None
    return DiskTier(
        Path(config.disk_directory),
        config.disk_bytes,
        page_bytes=host.page_bytes,
        format=host.format,
        owner=uuid.uuid4().hex,
    )
