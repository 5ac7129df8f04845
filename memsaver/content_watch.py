"""Notices that a tag's content was discarded by somebody else than the tag's owner."""

from __future__ import annotations

from collections.abc import Iterable

from memsaver.errors import format_bytes
from memsaver.saver import MemorySaver


class ContentWatch:
    """Notes of how often the content of tags had been discarded when their owner last knew it.

    The owner of a tag calls `note` when it has given the tag content, or has discarded the content
    itself, and asks `lost` before it uses what lay there.
    """

    def __init__(self, saver: MemorySaver, *tags: str) -> None:
        """Note these tags."""
        self._saver = saver
        self._noted: dict[str, int] = {}
        self.note(*tags)

    def note(self, *tags: str) -> None:
        """Take the content of the tags, or its absence, as known to their owner."""
        self._noted |= {tag: self._saver.discards(tag) for tag in tags}

    def lost(self, *tags: str) -> list[str]:
        """Return the tags whose content was discarded since `note`."""
        return [tag for tag in tags if self._saver.discards(tag) != self._noted.get(tag, 0)]


def lost_by_others(tags: Iterable[str], owner: str) -> str:
    """Say why `owner` does not use the content of these tags, which `ContentWatch.lost` found."""
    names = ", ".join(map(repr, tags))
    return (
        f"the content of tag {names} was discarded by a pause, swap, exchange or resize "
        f"that the {owner} did not make"
    )


def shortfall(saver: MemorySaver, tags: Iterable[str]) -> str | None:
    """Say what of these tags, which are active, has no memory, and how it comes back."""
    for tag in tags:
        if missing := saver.unbacked_bytes(tag):
            nbytes = saver.report(others=False).tags[tag].committed_bytes + missing
            return (
                f"tag {tag!r} has no memory behind its last {format_bytes(missing)} "
                f"(call MemorySaver.resize({tag!r}, {nbytes}))"
            )
    return None
