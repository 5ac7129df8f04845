"""Defines what every engine has whose weights are replaced in place and whose memory is on tags;
and the other side of a device, which takes the memory that this one does not need now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from memsaver import Event, MemorySaver, PoolTicket, Release, Report, Usage
from memsaver.system.devices import place_of
from memsaver.system.interrupts import held
from rollout.tag_names import TAGS
from rollout.weights.messages import Manifest, PackedBox, UpdateReceipt, WeightLayout, WriteReceipt
from rollout.weights.pages import WeightPages
from rollout.weights.update import WeightUpdate


@dataclass(frozen=True, kw_only=True)
class PeerSaver:
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


def check_sleep_level(level: int) -> None:
    """Raise a ValueError unless `sleep` knows the level."""
    if level not in (1, 2):
        raise ValueError(
            f"sleep level={level} must be 1 (keep weights on the host) or 2 (discard them)"
        )


@contextlib.contextmanager
def handing_over(saver: MemorySaver, peer: PeerSaver | None, into: str | None) -> Iterator[Release]:
    """Gives the `release` of pauses in the block. What they free goes to the peer, as far as its
    tag `into`, which gets memory next, can use it; the rest, and all where the peer is gone or
    there is none, to the driver. So no more is kept than what takes its place.
    """
    if peer is None or into is None:
        yield "driver"
        return
    try:
        yield "retain"
    finally:
        saver.release_retained(peer.ticket, peer.nbytes.get(into, 0))


class SaverSide:
    """One side of a device, a trainer or an engine: what it tells of its saver, and who gets the
    memory that it does not need now.
    """

    saver: MemorySaver
    _peer: PeerSaver | None = None

    def as_peer(self) -> PeerSaver:
        """Return what the other side of this device is told, to hand memory over to this one."""
        return PeerSaver.of(self.saver)

    def hand_over_to(self, peer: PeerSaver | None) -> None:
        """Say who gets the memory that `into=` names; None: the driver."""
        self._peer = peer

    def report(self, *, others: bool = True) -> Report:
        """See `MemorySaver.report`."""
        return self.saver.report(others=others)

    def drain_events(self) -> list[Event]:
        return self.saver.drain_events()

    def take_usage(self) -> Usage:
        """See `MemorySaver.take_usage`."""
        return self.saver.take_usage()


class EngineBase(SaverSide):
    """A subclass makes these, and says when weights may be offered, committed and given up.

    tags: that it has memory on.
    """

    store: WeightPages
    tags: Sequence[str] = TAGS
    _update: WeightUpdate

    # ---------------------------------------------------------------- weights

    @property
    def weights_version(self) -> int:
        """The version last defined; 0 after loading."""
        return self.store.last_version

    def served_version(self) -> int | None:
        """Returns the version of the weights, also while they sleep with their content kept; None
        while they are undefined.
        """
        return self.store.version

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest

    def weight_layout(self) -> WeightLayout:
        """Returns where every parameter lies, for `Trainer.connect` to plan with; also while the
        weights sleep.
        """
        buffers = {name: tuple(buffer.shape) for name, buffer in self.store.buffers.items()}
        place = place_of(self.saver.device)
        return WeightLayout(manifest=self.manifest, place=place, buffers=buffers)

    @held()
    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """Put boxes of `data` (uint8, on the CPU) into the pages of the open update, for a writer
        that cannot map them.

        WeightUpdateError: no update is open, it is verified, or a box is outside; nothing was
        written then.
        """
        self._update.write(boxes, data)

    @held()
    def verify_update(self, receipt: WriteReceipt) -> UpdateReceipt:
        """Read the written pages back, and compare with what the writer says it wrote. The commit
        puts the receipt's buffers in place.

        WeightUpdateError says what differs, and ends the update: with shadow pages the old version
        goes on being served, otherwise the engine is poisoned.
        """
        return self._update.verify(receipt)

    @held()
    def commit_update(self, version: int) -> UpdateReceipt:
        """Serve the version that was verified. Addresses stay."""
        return self._update.commit(version)

    @held()
    def abort_update(self, reason: str) -> None:
        """End the update. One with shadow pages, open or refused, leaves the version that is
        served; otherwise the engine is poisoned: it refuses to generate, giving `reason`, until an
        update commits. Aliased pages go back.
        """
        self._update.abort(reason)

    # ---------------------------------------------------------------- memory

    def prepare_sleep(self) -> None:
        """Begin to obtain, beside other work, the host memory that sleeps at level 1 keep the
        weights in. A sleep meanwhile waits for it.
        """
        tag = self.store.tag
        self.saver.reserve_host({tag: self.saver.report(others=False).tags[tag].live_bytes})

    def shrink(self) -> None:
        """Say that what is asked for next are the last answers before a sleep, and that others wait
        for memory. Without effect where a KV cache has one size.
        """

    def _known(self, tags: Sequence[str] | None) -> list[str]:
        """The ones of `tags` that the engine has memory on; ValueError for a name that none has."""
        if unknown := [tag for tag in tags or () if tag not in TAGS]:
            raise ValueError(f"unknown tags {unknown}; the engine's tags are {', '.join(TAGS)}")
        return [tag for tag in self.tags if tags is None or tag in tags]
