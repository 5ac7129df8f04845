"""Paged key/value cache: pools on a memsaver tag, with page ledgers and block tables outside it."""

from kvcache.allocators import KVAllocator, Ledger, PagedTokenToKVPoolAllocator, pages_across
from kvcache.blocks import BlockManager
from kvcache.config import KVCacheConfig, KVCacheDtype, MLACacheConfig, kv_dtype
from kvcache.kv_layout import KVLayout, layout
from kvcache.pools import KVPool, MHATokenToKVPool, MLATokenToKVPool
from kvcache.radix.cache import EvictionPolicy, PrefixMatch, RadixCache
from kvcache.request_tables import HybridReqToTokenPool, ReqHandle, ReqToTokenPool

__all__ = [
    "BlockManager",
    "EvictionPolicy",
    "HybridReqToTokenPool",
    "KVAllocator",
    "KVCacheConfig",
    "KVCacheDtype",
    "KVLayout",
    "KVPool",
    "Ledger",
    "MHATokenToKVPool",
    "MLACacheConfig",
    "MLATokenToKVPool",
    "PagedTokenToKVPoolAllocator",
    "PrefixMatch",
    "RadixCache",
    "ReqHandle",
    "ReqToTokenPool",
    "kv_dtype",
    "layout",
    "pages_across",
]
