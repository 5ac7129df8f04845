"""The other side of a device, which takes the memory that this one does not need now."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Self

from memsaver import MemorySaver, PoolTicket


@dataclass(frozen=True, kw_only=True)
class Partner:
    """A saver of the same device, here or in another process. nbytes: of each of its tags while it
    has memory.
    """

    ticket: PoolTicket
    nbytes: dict[str, int]

    @classmethod
    def of(cls, saver: MemorySaver) -> Self:
        """Returns what another side is told of this saver, all of whose tags are made."""
        tags = saver.report().tags
        return cls(
            ticket=saver.pool_ticket(),
            nbytes={tag: entry.live_bytes for tag, entry in tags.items()},
        )


@contextlib.contextmanager
def handing_over(
    saver: MemorySaver, partner: Partner | None, into: Collection[str]
) -> Iterator[str]:
    """Gives the `release` of pauses in the block. What they free goes to the partner, as far as its
    tags `into`, which get memory next, can use it; the rest, and all where the partner is gone or
    there is none, to the driver. So no more is kept than what takes its place.
    """
    if partner is None or not into:
        yield "driver"
        return
    try:
        yield "keep"
    finally:
        saver.release_kept(partner.ticket, sum(partner.nbytes.get(tag, 0) for tag in into))
