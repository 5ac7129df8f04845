"""Pools on a tag: what is kept of a token, how, and where; a class for each kind of layer."""

from kvcache.pools.base import HostCopy, KVPool
from kvcache.pools.double_sparse import DoubleSparseTokenToKVPool
from kvcache.pools.hybrid_requests import HybridReqToTokenPool
from kvcache.pools.mamba import MambaConfig, MambaPool
from kvcache.pools.mha import MHATokenToKVPool, MHATokenToKVPoolFP4
from kvcache.pools.mla import MLATokenToKVPool, MLATokenToKVPoolFP4
from kvcache.pools.routed import HybridLinearKVPool, RoutedKVPool, SWAKVPool
from kvcache.pools.token import TokenPool

__all__ = [
    "DoubleSparseTokenToKVPool",
    "HostCopy",
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "KVPool",
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "MambaConfig",
    "MambaPool",
    "RoutedKVPool",
    "SWAKVPool",
    "TokenPool",
]
