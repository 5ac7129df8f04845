"""The base class of all engines, and how trainer and engine hand memory over to each other."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from memsaver import Event, MemorySaver, PoolTicket, Release, Report, StateError, Usage
from memsaver.memory import empty_torch_cache
from memsaver.system.devices import place_of
from memsaver.system.interrupts import held
from memsaver.system.torch_defaults import with_torch_defaults
from memsaver.types import check_choice
from rollout.engine.served_adapters import ServedAdapters
from rollout.engine.step_decisions import StepDecisions
from rollout.parallel import TensorParallel
from rollout.tag_names import ADAPTER_SLOTS, KV_CACHE, TAGS, WEIGHTS
from rollout.weights.messages import Manifest, PackedBox, UpdateReceipt, WeightLayout, WriteReceipt
from rollout.weights.pages import WeightPages
from rollout.weights.update import WeightUpdate, require_active

InFlight = Literal["refuse", "recompute", "keep"]
"""What new weights mean for running requests.

With "recompute" they start over under the new version, and keep the tokens that they have. With
"keep" they go on over keys and values of the old version, which no other request uses.
"""
Unfinished = Literal["refuse", "recompute", "keep", "abort"]
"""What `sleep` does with unfinished requests."""


@dataclass(frozen=True, kw_only=True)
class PeerSaver:
    """Description of another saver of the same device, in this process or in another."""

    ticket: PoolTicket  # names the saver's page pool
    nbytes: dict[str, int]  # bytes of each of its tags when resumed

    @classmethod
    def of(cls, saver: MemorySaver) -> Self:
        """Describe a saver, whose tags must all exist already."""
        tags = saver.report(others=False).tags.items()
        return cls(
            ticket=saver.pool_ticket(),
            nbytes={tag: saver.backend.round_up(entry.live_bytes) for tag, entry in tags},
        )


def check_sleep(level: int, unfinished: str) -> None:
    """Raise a ValueError unless `sleep` knows the level and the word for unfinished requests."""
    if level not in (1, 2):
        raise ValueError(
            f"sleep level={level} must be 1 (keep weights on the host) or 2 (discard them)"
        )
    check_choice("unfinished", unfinished, Unfinished)


@contextlib.contextmanager
def handing_over(saver: MemorySaver, peer: PeerSaver | None, into: str | None) -> Iterator[Release]:
    """Yield the `release` argument for pauses, and hand the memory that they free over to the peer.

    At the end of the block, the peer receives at most the bytes of its tag `into`, which is resumed
    next. The rest goes to the driver. So does all of the memory if the peer is gone, or if `peer`
    or `into` is None.
    """
    if peer is None or into is None:
        yield "driver"
        return
    try:
        yield "retain"
    finally:
        saver.release_retained(peer.ticket, peer.nbytes.get(into, 0))


class SaverSide:
    """One side of a device, a trainer or an engine, which owns a saver.

    It hands memory that it frees over to the other side, its peer. Public methods run with torch's
    defaults: a caller's autocast, inference mode, default device and default dtype have no effect.
    """

    saver: MemorySaver
    _peer: PeerSaver | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        with_torch_defaults(cls)

    def as_peer(self) -> PeerSaver:
        """Return the description that the other side needs to hand memory over to this side."""
        return PeerSaver.of(self.saver)

    def hand_over_to(self, peer: PeerSaver | None) -> None:
        """Set the receiver of memory that a sleep frees.

        Args:
            peer: The other side, for calls with `into=`; None: the driver.
        """
        self._peer = peer

    def report(self, *, others: bool = True) -> Report:
        """Return the saver's report, see `MemorySaver.report`.

        Args:
            others: Include `Report.others`, which takes milliseconds where torch holds much memory.
        """
        return self.saver.report(others=others)

    def drain_events(self) -> list[Event]:
        """Return the saver's events since the last call, see `MemorySaver.drain_events`."""
        return self.saver.drain_events()

    def take_usage(self) -> Usage:
        """Return the saver's usage since the last call, see `MemorySaver.take_usage`."""
        return self.saver.take_usage()


class EngineBase(SaverSide):
    """Engine with weights that are replaced in place and memory on tags.

    A subclass creates the attributes, and decides when an update may begin, commit and abort.

    Attributes:
        store: The weights.
        adapters: The adapters; None in an engine without slots.
        tags: Tags on which the engine has memory.
    """

    store: WeightPages
    adapters: ServedAdapters | None = None
    decisions: StepDecisions
    tags: Sequence[str] = TAGS
    _ranks: TensorParallel
    _expert_parallel = 1
    _update: WeightUpdate

    def drain(self) -> None:
        """Wait for steps under way; the next `step` returns their outputs.

        Methods that need this call it themselves. An engine whose `step` waits has nothing to do.
        """

    # ---------------------------------------------------------------- weights

    @property
    def weights_version(self) -> int:
        """Return the version that was defined last; 0 after loading."""
        return self.store.last_version

    def served_version(self, adapter: str | None = None) -> int | None:
        """Return the version of the weights; None while they are undefined.

        Weights that sleep with their content kept have a version.

        Args:
            adapter: Name of an adapter, whose version is meant then.
        """
        return (
            self.store.version if adapter is None else self._adapters_for("sync").version(adapter)
        )

    @property
    def manifest(self) -> Manifest:
        """Return the places of all parameters in the arena of the weights."""
        return self.store.manifest

    def weight_layout(self, adapter: str | None = None) -> WeightLayout:
        """Return the places of all parameters, from which `Trainer.connect` plans the sync.

        The weights may be asleep.

        Args:
            adapter: Name of an adapter, whose places are meant then.

        Returns:
            The manifest, the device, the shapes of the buffers, and how ranks share the model.
        """
        store = self.store
        if adapter is not None:
            store = self._adapters_for("sync").pages.stores[0]
        buffers = {name: tuple(buffer.shape) for name, buffer in store.buffers.items()}
        place = place_of(self.saver.device)
        return WeightLayout(
            manifest=store.manifest,
            place=place,
            buffers=buffers,
            ranks=self._ranks.size,
            expert_parallel=self._expert_parallel,
        )

    def digest(self) -> int:
        """Read the weights in memory.

        Returns:
            The digest of all parameters.

        Raises:
            StateError: The weights sleep.
        """
        require_active(self.saver, self.store.tag, "read the weights")
        return self.store.digest()

    @held()
    def write_update(
        self, boxes: Sequence[PackedBox], data: Tensor, adapter: str | None = None
    ) -> None:
        """Write boxes into the pages of the open update, for a writer that cannot map them.

        Args:
            boxes: Where the elements go, and where they are in `data`.
            data: The message, uint8 on the CPU.
            adapter: Name of the adapter that is updated; None: the weights.

        Raises:
            WeightUpdateError: No update is open, it is verified already, or a box is outside of the
                weights or the message. Nothing was written. Or other users of the saver discarded
                the pages, which closes the update.
            StateError: The weights sleep.
        """
        self._update_of(adapter).write(boxes, data)

    @held()
    def verify_update(self, receipt: WriteReceipt, adapter: str | None = None) -> UpdateReceipt:
        """Read the written pages back and compare them with the writer's receipt.

        Args:
            receipt: The writer's claims, and values of buffers, which the commit copies.
            adapter: Name of the adapter that is updated; None: the weights.

        Returns:
            The digest that was read back.

        Raises:
            WeightUpdateError: The pages differ from the receipt, or other users of the saver
                discarded them. The update is closed: with shadow pages the old version is still
                served, otherwise the engine is poisoned. Also if no update is open or it is
                verified already; then nothing changed.
            StateError: The weights sleep.
        """
        return self._update_of(adapter).verify(receipt)

    @held()
    def commit_update(self, version: int, adapter: str | None = None) -> UpdateReceipt:
        """Serve the verified version. Addresses do not change.

        Args:
            version: The verified version.
            adapter: Name of the adapter that is updated; None: the weights.

        Returns:
            The version that is served now.

        Raises:
            WeightUpdateError: The version is not verified; nothing changed. Or other users of the
                saver discarded its pages, which closes the update.
            StateError: The weights sleep. Nothing changed.
            LeaseError: A process still maps the shadow pages or the weights. Nothing changed; try
                again.
        """
        return self._update_of(adapter).commit(version)

    @held()
    def abort_update(self, reason: str, adapter: str | None = None) -> None:
        """End the update without a commit, and give aliased pages back.

        After an update with shadow pages, or of an adapter, the engine still serves the old
        version. Otherwise it is poisoned: it refuses to generate until an update commits.

        Args:
            reason: The reason that a poisoned engine reports.
            adapter: Name of the adapter that is updated; None: the weights.
        """
        self.drain()
        if adapter is None:
            self._update.abort(reason)
        else:
            self._adapters_for("abort an update").abort(adapter, reason)

    def _update_of(self, adapter: str | None) -> WeightUpdate:
        """Return the update of the weights, or the open one of an adapter."""
        return self._update if adapter is None else self._adapters_for("sync").update(adapter)

    def _adapters_for(self, action: str) -> ServedAdapters:
        """Return the adapters, or raise a StateError in an engine without slots."""
        if self.adapters is None:
            rule = f"cannot {action} adapters: the engine has no slots for them"
            raise StateError(f"{rule}; build it with adapters=AdapterSlots(...), or merge them")
        return self.adapters

    # ---------------------------------------------------------------- memory

    @held()
    def sleep(
        self,
        level: int = 1,
        unfinished: Unfinished = "refuse",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None:
        """Release the memory of tags. Tags that already sleep are skipped.

        With tiers, cached pages move to the host first, and are found again under the same weights.

        A sleep of the weights ends an open update. An update with shadow pages is rolled back,
        even if the sleep is then refused. Any other update is lost, and the weights are undefined.
        Aliased pages go back to the trainer at either level, which leaves the weights undefined.

        Hosted engines keep their memory outside of the tags; see `report()` and the how-to pages.

        Args:
            level: 1 keeps the weights in host memory. 2 discards them: they are undefined until a
                weight update commits.
            unfinished: "refuse" refuses to sleep while requests are unfinished. "recompute"
                computes them again after the wake-up, under the version that is loaded then. "keep"
                copies their keys and values to the host tier, and they go on over these, whatever
                version is loaded then; those without room there are computed again, as in
                `EngineStats`. Hosted engines refuse both. "abort" ends them with their present
                answers.
            tags: Tags to pause; None: all.
            into: The trainer's tag (of the peer set by `hand_over_to`) that is reloaded next. It
                receives the memory that it needs, and the driver the rest.

        Raises:
            StateError: Names the unfinished requests; nothing changed.
            ValueError: The level, a tag or `unfinished` is unknown; nothing changed.
            LeaseError: Another process maps a tag.
        """
        self.decisions.require_outside("sleep")
        check_sleep(level, unfinished)
        chosen = self._known(tags)
        self._before_sleep(unfinished)
        with handing_over(self.saver, self._peer, into) as release:
            if WEIGHTS in chosen:
                self._update.sleep(level, release, self._before_discard)
            self._sleep_caches([tag for tag in chosen if tag != WEIGHTS], unfinished, release)
        if KV_CACHE in chosen:
            # Torch caches blocks that the steps freed; the other users of the device need them.
            empty_torch_cache(self.saver.device)

    @abstractmethod
    def _before_sleep(self, unfinished: Unfinished) -> None:
        """Refuse by a StateError, or end requests, before anything is paused."""

    def _before_discard(self) -> None:
        """Save what lies among the weights and is not part of an update."""

    @abstractmethod
    def _sleep_caches(self, tags: Sequence[str], unfinished: Unfinished, release: Release) -> None:
        """Pause the given tags, all but the weights', and forget keys and values on them."""

    def prepare_sleep(self) -> None:
        """Allocate the host memory for sleeps at level 1 in the background.

        A sleep that starts earlier waits for the allocation.
        """
        tag = self.store.tag
        self.saver.reserve_host({tag: self.saver.report(others=False).tags[tag].live_bytes})

    def shrink(self) -> None:
        """Announce that the next answers are the last ones before a sleep.

        An elastic KV pool then frees memory as requests end; a pool of fixed size does nothing.
        """

    def _known(self, tags: Sequence[str] | None) -> list[str]:
        """Return the engine's tags among `tags` (None: all); raise a ValueError for unknown tags.

        A tag of `TAGS` on which this engine has no memory is known, and left out. Slots of adapters
        go with the weights.
        """
        if unknown := [tag for tag in tags or () if tag not in TAGS]:
            raise ValueError(f"unknown tags {unknown}; the engine's tags are {', '.join(TAGS)}")
        named = {*self.tags} if tags is None else {*tags}
        if WEIGHTS in named:
            named.add(ADAPTER_SLOTS)
        return [tag for tag in self.tags if tag in named]
