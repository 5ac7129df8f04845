"""KV pools on a memsaver tag, one class for each kind of attention layer."""

from kvcache.pools.mamba_pool import MambaConfig, MambaPool
from kvcache.pools.routed import HybridLinearKVPool, RoutedKVPool, SWAKVPool
from kvcache.pools.token_pools import (
    DoubleSparseTokenToKVPool,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    TokenPool,
)

__all__ = [
    "DoubleSparseTokenToKVPool",
    "HybridLinearKVPool",
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "MambaConfig",
    "MambaPool",
    "RoutedKVPool",
    "SWAKVPool",
    "TokenPool",
]
