"""Paged key/value cache: pools on a memsaver tag, page ledger and block tables outside it."""

from kvcache.allocators.paged import PagedTokenToKVPoolAllocator
from kvcache.blocks import BlockManager
from kvcache.config import KVCacheConfig
from kvcache.pools.base import KVPool
from kvcache.pools.mha import MHATokenToKVPool
from kvcache.requests import ReqHandle, ReqToTokenPool

__all__ = [
    "BlockManager",
    "KVCacheConfig",
    "KVPool",
    "MHATokenToKVPool",
    "PagedTokenToKVPoolAllocator",
    "ReqHandle",
    "ReqToTokenPool",
]
