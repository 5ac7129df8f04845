"""Entries of one weight version in order of use, and those of older versions, which go first."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class Dropped(NamedTuple, Generic[V]):
    """An entry that was taken out; `version` is the one it belongs to."""

    version: int
    key: bytes
    value: V


class VersionedLRU(Generic[V]):
    """Keys of the present version are found, those of older ones only dropped.

    All in O(1). Not thread-safe.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._entries: OrderedDict[bytes, V] = OrderedDict()
        self._older: deque[tuple[int, OrderedDict[bytes, V]]] = deque()  # none is empty

    def __len__(self) -> int:
        """Entries that can be found."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def values(self) -> Iterator[V]:
        """Yields the values of all entries, older versions included."""
        for _, entries in self._older:
            yield from entries.values()
        yield from self._entries.values()

    def use(self, key: bytes) -> V | None:
        """The value, which is now the one used last."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def add(self, key: bytes, value: V) -> None:
        """A new entry, used last."""
        assert key not in self._entries, "an entry is there already"
        self._entries[key] = value

    def remove(self, key: bytes) -> V:
        return self._entries.pop(key)

    def oldest(self) -> Dropped[V] | None:
        """Returns what `drop` would take out."""
        if self._older:
            version, entries = self._older[0]
        else:
            version, entries = self.version, self._entries
        return Dropped(version, *next(iter(entries.items()))) if entries else None

    def drop(self) -> Dropped[V] | None:
        """Takes out an entry of the oldest version, of the present one the least recently used."""
        found = self.oldest()
        if found is None:
            return None
        entries = self._older[0][1] if self._older else self._entries
        del entries[found.key]
        if self._older and not entries:
            self._older.popleft()
        return found

    def raise_version(self, version: int) -> None:
        """Sets all entries aside. ValueError unless `version` is above the present one."""
        if version <= self.version:
            raise ValueError(
                f"version {version} is not above {self.version}; weight versions only grow"
            )
        if self._entries:
            self._older.append((self.version, self._entries))
        self._entries = OrderedDict()
        self.version = version
