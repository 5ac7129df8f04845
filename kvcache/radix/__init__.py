"""Prefix caches: radix trees that map token prefixes to pages."""

from kvcache.radix.mamba_cache import MambaInsert, MambaMatch, MambaRadixCache
from kvcache.radix.node import RadixNode

__all__ = ["MambaInsert", "MambaMatch", "MambaRadixCache", "RadixNode"]
