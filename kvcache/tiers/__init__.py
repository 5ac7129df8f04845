"""Where pages of a device pool go when it is full: host memory, then disk."""

from kvcache.tiers.disk import DiskTier
from kvcache.tiers.host import HostCacheConfig, HostKVCache
from kvcache.tiers.keys import page_hashes
from kvcache.tiers.policies import WritePolicy
from kvcache.tiers.prefix import TieredMatch, TieredPrefixCache
from kvcache.tiers.transfer import Transfer

__all__ = [
    "DiskTier",
    "HostCacheConfig",
    "HostKVCache",
    "TieredMatch",
    "TieredPrefixCache",
    "Transfer",
    "WritePolicy",
    "page_hashes",
]
