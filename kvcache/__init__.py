"""Paged key/value cache: pools on a memsaver tag, page ledger and block tables outside it."""

from kvcache.allocators import KVAllocator, Ledger, pages_across
from kvcache.blocks import BlockManager
from kvcache.config import KVCacheConfig, MLACacheConfig, kv_dtype
from kvcache.layout import KVLayout, layout
from kvcache.pools import KVPool
from kvcache.radix.cache import PrefixMatch, RadixCache
from kvcache.requests import HybridReqToTokenPool, ReqHandle, ReqToTokenPool

__all__ = [
    "BlockManager",
    "HybridReqToTokenPool",
    "KVAllocator",
    "KVCacheConfig",
    "KVLayout",
    "KVPool",
    "Ledger",
    "MLACacheConfig",
    "PrefixMatch",
    "RadixCache",
    "ReqHandle",
    "ReqToTokenPool",
    "kv_dtype",
    "layout",
    "pages_across",
]
