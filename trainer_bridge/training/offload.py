"""Tracks which of a trainer's tags have memory now, and when giving it back costs no copy."""

from collections.abc import Callable, Hashable
from itertools import chain

from memsaver import MemorySaver
from memsaver.errors import StateError

Version = Callable[[], Hashable]


class Parking:
    """Pauses and resumes tags; without a saver it only remembers which are parked.

    A tag with a version is parked without a copy where its content is still of the version that was
    parked last.
    """

    def __init__(self, saver: MemorySaver | None) -> None:
        self._saver = saver
        self._tags: dict[str, Version | None] = {}
        self._beside: dict[str, tuple[str, ...]] = {}
        self._parked: set[str] = set()

    def add(self, tag: str, version: Version | None = None, beside: tuple[str, ...] = ()) -> None:
        """Adds a tag that has memory now. version: says what its content is called; None: it always
        changes. beside: tags that always change and go with it.
        """
        self._tags[tag] = version
        self._beside[tag] = beside

    def park(self, *tags: str) -> None:
        """Move the tags (none: all) to the host and free their memory."""
        chosen = self._chosen(tags)
        if self._saver is not None:
            for tag in chosen:
                if (version := self._tags[tag]) is not None and tag not in self._parked:
                    self._saver.mark_clean(tag, version())
            self._saver.pause(*self._memory(chosen), content="host")
        self._parked |= set(chosen)

    def restore(self, *tags: str) -> None:
        """Bring the tags (none: all) back, bit-identical, at the same addresses. Out of memory
        changes nothing.
        """
        chosen = self._chosen(tags)
        if self._saver is not None:
            self._saver.resume(*self._memory(chosen))
        self._parked -= set(chosen)

    def require(self, method: str, *tags: str) -> None:
        """Raises a StateError if one of these is parked; a tag that the trainer has not got is none
        of its business.
        """
        for tag in tags:
            if tag in self._parked:
                raise StateError(
                    f"{method}() needs tag {tag!r}, which is parked; call restore({tag!r}) first"
                )

    def _memory(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        return (*tags, *chain.from_iterable(self._beside[tag] for tag in tags))

    def _chosen(self, tags: tuple[str, ...]) -> tuple[str, ...]:
        for tag in tags:
            if tag not in self._tags:
                raise ValueError(
                    f"unknown tag {tag!r}; the trainer has {', '.join(map(repr, self._tags))}"
                )
        return tags or tuple(self._tags)
