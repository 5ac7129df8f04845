"""Ledgers of a pool's pages: which are free, and which a request gets next."""

from kvcache.allocators.paged import KVAllocator, PagedTokenToKVPoolAllocator, to_device
from kvcache.allocators.windows import Ledger, SWATokenToKVPoolAllocator, pages_across

__all__ = [
    "KVAllocator",
    "Ledger",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "pages_across",
    "to_device",
]
