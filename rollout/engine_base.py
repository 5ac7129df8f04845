"""Holds what every engine has whose weights are replaced in place and whose memory is on tags."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memsaver import Event, MemorySaver, Report, Usage
from memsaver.common.machine import place_of
from memsaver.common.signals import held
from rollout.protocols import Partner
from rollout.types import TAGS, Manifest, PackedBox, VerifyReceipt, WeightLayout, WriteReceipt
from rollout.weights.arena import WeightArena
from rollout.weights.update import WeightUpdate


class EngineBase:
    """A subclass makes these, and says when weights may be offered, committed and given up.

    tags: that it has memory on.
    """

    saver: MemorySaver
    store: WeightArena
    tags: Sequence[str] = TAGS
    _update: WeightUpdate
    _partner: Partner | None = None

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
        return WeightLayout(manifest=self.manifest, place=place_of(self.saver.device))

    @held()
    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """Put boxes of `data` (uint8, on the CPU) into the pages of the open update, for a writer
        that cannot map them.

        WeightUpdateError: no update is open, it is verified, or a box is outside; nothing was
        written then.
        """
        self._update.write(boxes, data)

    @held()
    def verify_update(self, receipt: WriteReceipt) -> VerifyReceipt:
        """Read the written pages back, and compare with what the writer says it wrote.

        WeightUpdateError says what differs, and ends the update: with shadow pages the old version
        goes on being served, otherwise the engine is poisoned.
        """
        return self._update.verify(receipt)

    # ---------------------------------------------------------------- memory

    def as_partner(self) -> Partner:
        """Returns what the trainer of this device is told, to hand memory over to the engine."""
        return Partner.of(self.saver)

    def hand_over_to(self, partner: Partner | None) -> None:
        """Say who gets the memory in `sleep(into=)`; None: the driver."""
        self._partner = partner

    def wind_down(self) -> None:
        """Say that what is asked for next are the last answers before a sleep, and that others wait
        for memory. Without effect where a KV cache has one size.
        """

    def report(self, *, others: bool = True) -> Report:
        """See `MemorySaver.report`."""
        return self.saver.report(others=others)

    def drain_events(self) -> list[Event]:
        return self.saver.drain_events()

    def take_usage(self) -> Usage:
        """See `MemorySaver.take_usage`."""
        return self.saver.take_usage()

    def _known(self, tags: Sequence[str] | None) -> list[str]:
        """The ones of `tags` that the engine has memory on; ValueError for a name that none has."""
        if unknown := [tag for tag in tags or () if tag not in TAGS]:
            raise ValueError(f"unknown tags {unknown}; the engine's tags are {', '.join(TAGS)}")
        return [tag for tag in self.tags if tags is None or tag in tags]
