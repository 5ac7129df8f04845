"""Defines what the wake-up cycle drives: an `Engine`, or a handle on a `RolloutActor`; and the
other side of a device, which takes the memory that this one does not need now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from memsaver import MemorySaver, PoolTicket
from rollout.types import (
    CommitReceipt,
    Completion,
    PackedBox,
    SamplingParams,
    VerifyReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)

if TYPE_CHECKING:
    from torch import Tensor

    from memsaver import Event, Report, Ticket, Usage

Progress = Callable[[int, int, int], None]
"""Called after every step with (finished samples, total samples, tokens generated so far). A beam
search counts as beam_width samples; its tokens count anew when it is preempted.
"""


class SyncTarget(Protocol):
    """A target whose weights can be replaced in place.

    Contracts: `Engine`; order: `rollout/weights/update.py`.
    """

    def weight_layout(self) -> WeightLayout: ...

    def served_version(self) -> int | None: ...

    def begin_update(
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer: ...

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None: ...

    def verify_update(self, receipt: WriteReceipt) -> VerifyReceipt: ...

    def commit_update(self, version: int) -> CommitReceipt: ...

    def adopt_update(
        self, version: int, ticket: Ticket, layout_hash: str, digest: int | None = None
    ) -> CommitReceipt: ...

    def abort_update(self, reason: str) -> None: ...


class Rollout(SyncTarget, Protocol):
    """A generating engine whose memory can be put to sleep and whose weights can be replaced in
    place.
    """

    @property
    def weights_version(self) -> int: ...

    def unavailable_reason(self) -> str | None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]: ...

    def sleep(
        self,
        level: int = 1,
        unfinished: str = "raise",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None: ...

    def as_partner(self) -> Partner: ...

    def hand_over_to(self, partner: Partner | None) -> None: ...

    def wind_down(self) -> None: ...

    def report(self) -> Report: ...

    def drain_events(self) -> list[Event]: ...

    def take_usage(self) -> Usage: ...


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
