"""Page hashes, which identify the tokens up to the end of a page, and an LRU map keyed by them."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvcache.allocators import Int64Array, as_int64
from kvcache.radix.node import Tokens

HASH_BYTES = 16


def stable_hash(*parts: bytes | memoryview) -> bytes:
    """Hash byte strings and their lengths to 16 bytes, identically on every machine."""
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def page_hashes(tokens: Tokens, page_size: int, namespace: Hashable = None) -> list[bytes]:
    """Compute a hash of 16 bytes for each whole page of a token sequence.

    A page is hashed with the hash of the page before it, and the first page with the namespace.
    Equal hashes thus mean equal tokens from the start of the sequence. `namespace`, such as an
    adapter or a salt, is a str, an int or None, whose hashes are the same in every process.

    Raises:
        ValueError: The namespace has another type.
    """
    ids: Int64Array = as_int64(tokens)
    if not (namespace is None or isinstance(namespace, str | int)):
        raise ValueError(f"a namespace of tiers is a str, an int or None, got {namespace!r}")
    whole = np.ascontiguousarray(ids[: len(ids) // page_size * page_size], dtype="<i8").tobytes()
    parent = stable_hash(f"{type(namespace).__name__} {namespace}".encode())
    hashes = []
    for start in range(0, len(whole), 8 * page_size):
        # Both parts have fixed lengths, so the hash needs no separator.
        page = whole[start : start + 8 * page_size]
        parent = hashlib.blake2b(parent + page, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


V = TypeVar("V")


class Dropped(NamedTuple, Generic[V]):
    """An entry of a `VersionedLRU` and the version that it belongs to."""

    version: int
    key: bytes
    value: V


class VersionedLRU(Generic[V]):
    """LRU map in which only entries of the present version can be found.

    Entries of older versions remain until they are dropped. Not thread-safe.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._entries: OrderedDict[bytes, V] = OrderedDict()
        self._older: deque[tuple[int, OrderedDict[bytes, V]]] = deque()  # none is empty

    def __len__(self) -> int:
        """Return the number of entries of the present version."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def values(self) -> Iterator[V]:
        """Yield the values of all entries, including older versions."""
        for _, entries in self._older:
            yield from entries.values()
        yield from self._entries.values()

    def use(self, key: bytes) -> V | None:
        """Return the value of a key and mark it as most recently used; None if absent."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def add(self, key: bytes, value: V) -> None:
        """Add an entry as the most recently used."""
        assert key not in self._entries, "the key already has an entry"
        self._entries[key] = value

    def remove(self, key: bytes) -> V:
        return self._entries.pop(key)

    def oldest(self) -> Dropped[V] | None:
        """Return the entry that `drop` would remove."""
        version, entries = self._older[0] if self._older else (self.version, self._entries)
        return Dropped(version, *next(iter(entries.items()))) if entries else None

    def drop(self) -> Dropped[V] | None:
        """Remove and return the least recently used entry of the oldest version."""
        oldest = self.oldest()
        if oldest is None:
            return None
        entries = self._older[0][1] if self._older else self._entries
        del entries[oldest.key]
        if self._older and not entries:
            self._older.popleft()
        return oldest

    def raise_version(self, version: int) -> None:
        """Start a new version, greater than the present one; all entries become older entries."""
        assert version > self.version, "weight versions only grow"
        if self._entries:
            self._older.append((self.version, self._entries))
        self._entries = OrderedDict()
        self.version = version
