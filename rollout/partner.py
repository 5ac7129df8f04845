"""The other side of a device, which takes the memory that this one does not need now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
        tags = saver.report(others=False).tags.items()
        return cls(
            ticket=saver.pool_ticket(),
            nbytes={tag: saver.backend.round_up(entry.live_bytes) for tag, entry in tags},
        )


@contextlib.contextmanager
def handing_over(saver: MemorySaver, partner: Partner | None, into: str | None) -> Iterator[str]:
    """Gives the `release` of pauses in the block. What they free goes to the partner, as far as its
    tag `into`, which gets memory next, can use it; the rest, and all where the partner is gone or
    there is none, to the driver. So no more is kept than what takes its place.
    """
    if partner is None or into is None:
        yield "driver"
        return
    try:
        yield "keep"
    finally:
        saver.release_kept(partner.ticket, partner.nbytes.get(into, 0))
