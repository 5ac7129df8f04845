"""The tags of one saver, each with its arena, in the order of their first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memsaver.errors import StateError, TagError
from memsaver.tag.arena import CONTENTS, Arena
from memsaver.vmm.backend import Backend


class Tags:
    """The saver holds its lock around what adds a tag; looking is safe at any time."""

    def __init__(self, backend: Backend, reserve_bytes: int) -> None:
        """reserve_bytes: of addresses for each tag, rounded up to pages."""
        self._backend = backend
        self.reserve_bytes = backend.round_up(reserve_bytes)
        self._arenas: dict[str, Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        return iter(tuple(self._arenas.values()))

    def get(self, tag: str) -> Arena:
        if tag not in self._arenas:
            known = ", ".join(map(repr, self._arenas)) or "none yet"
            raise TagError(f"unknown tag {tag!r}; known tags: {known}")
        return self._arenas[tag]

    def select(self, tags: Sequence[str]) -> list[Arena]:
        """Returns each once; no tag means all."""
        return [self.get(tag) for tag in dict.fromkeys(tags or tuple(self._arenas))]

    def open(self, tag: str, content: str | None) -> Arena:
        """The tag's arena, made on first use, to allocate on."""
        check_content(content)
        arena = self._arenas.get(tag)
        if arena is None:
            arena = self._arenas[tag] = Arena(
                tag, content or "discard", self._backend, self.reserve_bytes
            )
        if content is not None and content != arena.content:
            raise TagError(
                f"tag {tag!r} has content={arena.content!r}, not {content!r}; use another tag"
            )
        if arena.paused:
            raise StateError(f"tag {tag!r} is paused; call resume({tag!r}) before allocating on it")
        arena.require_own(f"cannot allocate on {tag!r}")
        arena.cause()  # forget an earlier failure
        return arena

    def forget(self, tag: str) -> None:
        del self._arenas[tag]

    def at(self, address: int) -> Arena:
        """The one whose addresses these are."""
        for arena in self:
            if 0 <= address - arena.address < arena.reservation.nbytes:
                return arena
        raise TagError(
            "the tensor is not in any tag of this saver; make it in a region, or with empty()"
        )

    def paused_at(self, address: int) -> str | None:
        """The tag at this address, if there is no memory behind it. Takes no lock."""
        return next((arena.tag for arena in self if arena.paused_at(address)), None)


def check_content(content: str | None) -> None:
    if content is not None and content not in CONTENTS:
        raise ValueError(f"content={content!r} must be one of {', '.join(map(repr, CONTENTS))}")
