"""A prefix cache on a small ledger, and what a request does with it."""

from collections.abc import Hashable, Sequence

from kvcache import PagedTokenToKVPoolAllocator, RadixCache


class Slots:
    """A MambaPool without states."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open = list(range(size, 0, -1))

    def take(self) -> int | None:
        return self.open.pop() if self.open else None

    def free(self, slots: Sequence[int]) -> None:
        assert len(set(slots)) == len(slots) and not set(slots) & set(self.open), f"double free in {slots}"
        self.open += slots


def make_cache(pages: int, page_size: int = 1, policy: str = "lru") -> RadixCache:
    return RadixCache(PagedTokenToKVPoolAllocator(pages * page_size, page_size, "cpu"), policy)


def put(cache: RadixCache, key: Sequence[int], *, salt: Hashable = None, priority: int = 0) -> list[int]:
    """Inserts under the current version with fresh pages and frees the duplicates; the pages handed in."""
    pages = cache.allocator.alloc_pages(len(key) // cache.page_size)  # type: ignore[attr-defined]
    assert pages is not None
    kept = cache.insert(key, pages, version=cache.version, extra_key=salt, priority=priority)
    cache.allocator.free_pages(pages[: kept // cache.page_size])
    cache.check_integrity()
    return pages.tolist()


def held(cache: RadixCache, key: Sequence[int], salt: Hashable = None) -> int:
    """How much of a key is cached, found without counting as a use."""
    return cache.peek(key, extra_key=salt)[0]
