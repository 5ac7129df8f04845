"""Prefix caches: trees of page-aligned token runs that say which pages begin a prompt."""

from kvcache.radix.mamba import MambaInsert, MambaMatch, MambaRadixCache
from kvcache.radix.node import RadixNode

__all__ = ["MambaInsert", "MambaMatch", "MambaRadixCache", "RadixNode"]
