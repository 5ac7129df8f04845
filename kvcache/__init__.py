"""Paged key/value cache: pools on a memsaver tag, page ledger and block tables outside it."""

from kvcache.allocators.base import KVAllocator
from kvcache.allocators.paged import PagedTokenToKVPoolAllocator
from kvcache.allocators.swa import SWATokenToKVPoolAllocator
from kvcache.allocators.token import TokenToKVPoolAllocator
from kvcache.blocks import BlockManager
from kvcache.config import KVCacheConfig, MLACacheConfig, kv_dtype
from kvcache.layout import KVLayout, layout
from kvcache.pools.base import HostCopy, KVPool
from kvcache.pools.double_sparse import DoubleSparseTokenToKVPool
from kvcache.pools.hybrid_requests import HybridReqToTokenPool
from kvcache.pools.mamba import MambaConfig, MambaPool
from kvcache.pools.mha import MHATokenToKVPool, MHATokenToKVPoolFP4
from kvcache.pools.mla import MLATokenToKVPool, MLATokenToKVPoolFP4
from kvcache.pools.routed import HybridLinearKVPool, SWAKVPool
from kvcache.radix import MambaInsert, MambaMatch, MambaRadixCache, PrefixMatch, RadixCache
from kvcache.requests import ReqHandle, ReqToTokenPool
from kvcache.staging import (
    ALLOC_OVERSIZED,
    StagingAllocator,
    StagingBuffer,
    compute_head_slice_params,
)
from kvcache.windows import Ledger, pages_across

__all__ = [
    "ALLOC_OVERSIZED",
    "BlockManager",
    "DoubleSparseTokenToKVPool",
    "HostCopy",
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "KVAllocator",
    "KVCacheConfig",
    "KVLayout",
    "KVPool",
    "Ledger",
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MLACacheConfig",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "MambaConfig",
    "MambaInsert",
    "MambaMatch",
    "MambaPool",
    "MambaRadixCache",
    "PagedTokenToKVPoolAllocator",
    "PrefixMatch",
    "RadixCache",
    "ReqHandle",
    "ReqToTokenPool",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "StagingAllocator",
    "StagingBuffer",
    "TokenToKVPoolAllocator",
    "compute_head_slice_params",
    "kv_dtype",
    "layout",
    "pages_across",
]
