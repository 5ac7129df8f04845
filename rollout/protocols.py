"""Protocols of the engines that the wake-up cycle drives, in this process or behind an actor."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from memsaver import Ticket
from rollout.engine.engine_base import PeerSaver
from rollout.requests import Completion, SamplingParams
from rollout.weights.messages import (
    PackedBox,
    UpdateReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)


class UpdatableEngine(Protocol):
    """An engine whose weights can be replaced in place.

    `Engine` documents the methods in full, and `rollout/weights/update.py` their legal order. An
    engine with slots for adapters also takes `adapter`, the name of the one that is meant.
    """

    def weight_layout(self) -> WeightLayout:
        """Return the places of all parameters, from which the writer plans the sync.

        Returns:
            The manifest, the device, and the shapes of the buffers.
        """

    def served_version(self) -> int | None:
        """Return the version of the weights.

        Returns:
            The version; None while the weights are undefined.
        """

    def begin_update(
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer:
        """Offer pages into which a new version can be written.

        Engines that are stepped also take `in_flight`, as `Engine.begin_update` does.

        Args:
            version: Number of the new version.
            shadow: Offer a second copy of the pages; the present version is served meanwhile.
            names: Only these parameters will be written; None: all.

        Returns:
            The offer, with a ticket to the pages.
        """

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None:
        """Write boxes into the offered pages, for a writer that cannot map them.

        Args:
            boxes: Where the elements go, and where they are in `data`.
            data: The message, uint8 on the CPU.
        """

    def verify_update(self, receipt: WriteReceipt) -> UpdateReceipt:
        """Read the written pages back and compare them with the writer's receipt.

        Args:
            receipt: The writer's claims.

        Returns:
            The digest that was read back.
        """

    def commit_update(self, version: int) -> UpdateReceipt:
        """Serve the verified version.

        Args:
            version: The verified version.

        Returns:
            The version that is served now.
        """

    def alias_update(
        self,
        version: int,
        ticket: Ticket,
        layout_hash: str,
        digest: int | None = None,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> UpdateReceipt:
        """Serve another saver's pages as a new version, without a copy.

        Args:
            version: Number of the new version.
            ticket: Ticket to the pages, which are laid out as this engine's manifest says.
            layout_hash: Hash of that layout.
            digest: Expected digest of the pages, which are read back; None: they are not read.
            buffers: Values of buffers, as in `WriteReceipt`.

        Returns:
            The version that is served now.
        """

    def abort_update(self, reason: str) -> None:
        """End the update without a commit.

        Args:
            reason: The reason that an engine without defined weights reports.
        """


class ShardedEngine(ABC):
    """An engine that this process calls, whose weights are divided between other processes."""

    @property
    @abstractmethod
    def shards(self) -> Sequence[UpdatableEngine]:
        """Return the targets of a sync, one per process that has weights."""


def sync_targets(engines: Iterable[UpdatableEngine | ShardedEngine]) -> list[UpdatableEngine]:
    """Return the targets of a sync with engines: the shards of those that have several."""
    targets: list[UpdatableEngine] = []
    for engine in engines:
        targets += engine.shards if isinstance(engine, ShardedEngine) else [engine]
    return targets


class Rollout(UpdatableEngine, Protocol):
    """A generating engine that can sleep, and whose weights can be replaced in place."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Continue every prompt.

        Args:
            prompts: Token ids.
            params: Sampling parameters, for all prompts or one per prompt.

        Returns:
            The samples, [prompt][sample].
        """

    def sleep(
        self, level: int = 1, *, tags: Sequence[str] | None = None, into: str | None = None
    ) -> None:
        """Release the memory of tags.

        Args:
            level: 1 keeps the weights on the host, 2 discards them.
            tags: Tags to pause; None: all.
            into: The trainer's tag that is resumed next and receives the memory.
        """

    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        """Map memory behind tags at their addresses.

        Args:
            tags: Tags to resume; None: all.
            partly: Let an elastic KV pool start small and grow.
        """

    def prepare_sleep(self) -> None:
        """Allocate the host memory for sleeps at level 1 in the background."""

    def as_peer(self) -> PeerSaver:
        """Return the description that the trainer needs to hand memory over to this engine.

        Returns:
            The saver's page pool and the bytes of its tags.
        """

    def hand_over_to(self, peer: PeerSaver | None) -> None:
        """Set the receiver of memory that a sleep frees.

        Args:
            peer: The trainer's side, for calls with `into=`; None: the driver.
        """

    def shrink(self) -> None:
        """Announce that the next answers are the last ones before a sleep."""
