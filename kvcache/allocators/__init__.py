"""Ledgers of a pool's pages: which are free, and which a request gets next."""

from kvcache.allocators.base import KVAllocator, to_device
from kvcache.allocators.paged import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

__all__ = [
    "KVAllocator",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "to_device",
]
