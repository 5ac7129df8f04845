"""Detect that a tag's content was discarded by other code than the tag's owner."""

from collections.abc import Iterable

from memsaver.errors import format_bytes
from memsaver.saver import MemorySaver


class ContentWatch:
    """Record of how often the content of tags had been discarded when their owner last knew it.

    The owner of a tag calls `note` after it writes the tag's content or discards it, and calls
    `lost` before it uses the content. The watch has no lock, because its owner calls it from one
    thread. It does not notice a discard by another thread between `lost` and the use.

    Args:
        saver: The saver that has the tags.
        *tags: Tags to note now.
    """

    def __init__(self, saver: MemorySaver, *tags: str) -> None:
        self._saver = saver
        self._noted: dict[str, int] = {}
        self.note(*tags)

    def note(self, *tags: str) -> None:
        """Record that the owner knows the present content of the tags, or its absence.

        Args:
            *tags: Tags to note.
        """
        self._noted |= {tag: self._saver.discards(tag) for tag in tags}

    def lost(self, *tags: str) -> list[str]:
        """Return the tags whose content was discarded since `note`.

        For a tag that was never noted, every discard counts.

        Args:
            *tags: Tags to compare.

        Returns:
            The tags whose present content their owner does not know.
        """
        return [tag for tag in tags if self._saver.discards(tag) != self._noted.get(tag, 0)]


def lost_by_others(tags: Iterable[str], owner: str) -> str:
    """Return the error message for the tags that `ContentWatch.lost` reports to `owner`."""
    names = ", ".join(map(repr, tags))
    return (
        f"the content of tag {names} was discarded by a pause, swap, exchange or resize "
        f"that the {owner} did not make"
    )


def shortfall(saver: MemorySaver, tags: Iterable[str]) -> str | None:
    """Return the error message for the first active tag that lacks memory, or ``None``."""
    for tag in tags:
        if missing := saver.unbacked_bytes(tag):
            nbytes = saver.report(others=False).tags[tag].committed_bytes + missing
            return (
                f"tag {tag!r} has no memory behind its last {format_bytes(missing)} "
                f"(call MemorySaver.resize({tag!r}, {nbytes}))"
            )
    return None
