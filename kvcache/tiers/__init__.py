"""Tiers below a device pool: pages evicted from it move to host memory, then to disk."""

from kvcache.tiers.disk import DiskTier
from kvcache.tiers.host import HostCacheConfig, HostKVCache, HostTransfer, Layout
from kvcache.tiers.keys import page_hashes
from kvcache.tiers.tiered_prefix import TieredMatch, TieredPrefixCache, WritePolicy

__all__ = [
    "DiskTier",
    "HostCacheConfig",
    "HostKVCache",
    "HostTransfer",
    "Layout",
    "TieredMatch",
    "TieredPrefixCache",
    "WritePolicy",
    "page_hashes",
]
