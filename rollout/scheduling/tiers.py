"""Prefix blocks with host and disk tiers below the device pool."""

import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
        private = swapped is not None and swapped.private
        try:
            admitted = super().admit(() if private else tokens, namespace=namespace)
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

    def swap_out(
        self, handle: ReqHandle, tokens: Sequence[int], private: bool = False
    ) -> Swapped | None:
        self._notice_format()  # first, because it may raise the version
        held = self._held[handle]
        present = held.version == self.tiers.version
        if not private and not (self._swaps and present):
            return None
        hashes = page_hashes(tokens, self.tiers.page_size, held.namespace) if present else []
        if private:
            return self._park(handle, len(tokens), held.version, hashes)
        kept = self.tiers.save(hashes, self.blocks.pages(handle)[: len(hashes)])
        pages: tuple[int, ...] = ()
        whole = len(hashes) * self.tiers.page_size
        if kept and whole < len(tokens):
            pages = self._store(handle, whole, len(tokens), hashes)
        else:
            self.tiers.wait_for_copies()  # the caller frees the sequence's pages next
        return Swapped(tokens=len(tokens), version=held.version, pages=pages) if kept else None

    def _park(
        self, handle: ReqHandle, tokens: int, version: int, hashes: Sequence[bytes]
    ) -> Swapped | None:
        """Keep all that a sequence has computed on the host; what is there is not copied again.

        So siblings share the pages of their prompt there.
        """
        self.tiers.save(hashes, self.blocks.pages(handle)[: len(hashes)])
        shared = self.tiers.share_private(hashes)
        whole = len(shared) * self.tiers.page_size
        own: tuple[int, ...] = ()
        with contextlib.ExitStack() as undo:
            undo.callback(self.tiers.lower.free_private, shared)
            if whole == tokens:
                self.tiers.wait_for_copies()  # the caller frees the sequence's pages next
            elif not (own := self._store(handle, whole, tokens)):
                return None
            undo.pop_all()
        how: Any = {"private": True, "format": self._format}
        return Swapped(tokens=tokens, version=version, pages=(*shared, *own), **how)

    def _store(
        self, handle: ReqHandle, first: int, last: int, wanted: Sequence[bytes] = ()
    ) -> tuple[int, ...]:
        """Copy the keys and values of tokens [first, last) to host pages without hashes."""
        slots = torch.from_numpy(self.blocks.token_ids(handle, first, last))
        pages = self.tiers.store_private(slots, wanted)
        try:
            self.tiers.wait_for_copies()  # the caller frees the sequence's pages next
        except BaseException:
            self.tiers.lower.free_private(pages)
            raise
        return pages

    def forget(self, swapped: Swapped) -> None:
        self.tiers.lower.free_private(swapped.pages)

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
        """Load a swapped sample's own pages; return the number of computed tokens.

        `computed` is the number of tokens that the prefix cache has provided.
        """
        if swapped.private:
            return self._unpark(handle, swapped)
        whole = swapped.tokens // self.tiers.page_size * self.tiers.page_size
        stale = swapped.version != self.tiers.version
        if stale or computed < whole:
            why = "the weights changed" if stale else "the tiers dropped pages"
            text = "a swapped sample computes %d of %d tokens again: %s"
            _log.info(text, swapped.tokens - computed, swapped.tokens, why)
        elif computed == whole and swapped.pages and self._load(handle, swapped):
            computed = swapped.tokens
        return computed

    def _unpark(self, handle: ReqHandle, swapped: Swapped) -> int:
        """Load all that a parked sample had computed, under the version of then."""
        if swapped.format != self._format or not self._load(handle, swapped):
            return 0
        self._held[handle] = replace(self._held[handle], version=swapped.version)
        return swapped.tokens

    def _load(self, handle: ReqHandle, swapped: Swapped) -> bool:
        """Start to load a swapped sample's own pages; return False if device pages are short."""
        slots = self.grow(np.array([handle.row]), np.array([swapped.tokens]))
        if slots is None:
            return False
        self._loads.append(self.tiers.load_private(swapped.pages, slots))
        return True

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
