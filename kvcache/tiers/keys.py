"""Names of pages, made of the tokens up to their end; and what is named so, in order of use."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvcache.allocators import Int64Array, as_int64
from kvcache.radix.node import Tokens

HASH_BYTES = 16


def stable_hash(*parts: bytes | memoryview) -> bytes:
    """Return 16 bytes that depend on each part and its length; the same on every machine."""
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def page_hashes(tokens: Tokens, page_size: int, namespace: Hashable = None) -> list[bytes]:
    """Return a hash for each whole page: of the hash before (first: the namespace) and its tokens.

    So equal hashes mean equal tokens from the beginning on. ValueError for a namespace (adapter,
    salt) that is no str, int or None: what others hash to need not be the same in the next process.
    """
    ids: Int64Array = as_int64(tokens)
    if not (namespace is None or isinstance(namespace, str | int)):
        raise ValueError(f"a namespace of tiers is a str, an int or None, got {namespace!r}")
    whole = np.ascontiguousarray(ids[: len(ids) // page_size * page_size], dtype="<i8").tobytes()
    parent = stable_hash(f"{type(namespace).__name__} {namespace}".encode())
    hashes = []
    for start in range(0, len(whole), 8 * page_size):
        # both lengths are fixed, so that nothing has to part them
        page = whole[start : start + 8 * page_size]
        parent = hashlib.blake2b(parent + page, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


V = TypeVar("V")


class Dropped(NamedTuple, Generic[V]):
    """An entry that was taken out; `version` is the one it belongs to."""

    version: int
    key: bytes
    value: V


class VersionedLRU(Generic[V]):
    """Keys of the present version are found, older ones only dropped. Not thread-safe."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._entries: OrderedDict[bytes, V] = OrderedDict()
        self._older: deque[tuple[int, OrderedDict[bytes, V]]] = deque()  # none is empty

    def __len__(self) -> int:
        """Return the number of entries that can be found."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def values(self) -> Iterator[V]:
        """Yield the values of all entries, older versions included."""
        for _, entries in self._older:
            yield from entries.values()
        yield from self._entries.values()

    def use(self, key: bytes) -> V | None:
        """Return the value, which is now the one used last."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def add(self, key: bytes, value: V) -> None:
        """Add an entry, used last."""
        assert key not in self._entries, "an entry is there already"
        self._entries[key] = value

    def remove(self, key: bytes) -> V:
        return self._entries.pop(key)

    def oldest(self) -> Dropped[V] | None:
        """Return what `drop` would take out."""
        version, entries = self._older[0] if self._older else (self.version, self._entries)
        return Dropped(version, *next(iter(entries.items()))) if entries else None

    def drop(self) -> Dropped[V] | None:
        """Take out an entry of the oldest version, of the present one the least recently used."""
        found = self.oldest()
        if found is None:
            return None
        entries = self._older[0][1] if self._older else self._entries
        del entries[found.key]
        if self._older and not entries:
            self._older.popleft()
        return found

    def raise_version(self, version: int) -> None:
        """Set all entries aside; `version` is above the present one."""
        assert version > self.version, "weight versions only grow"
        if self._entries:
            self._older.append((self.version, self._entries))
        self._entries = OrderedDict()
        self.version = version
