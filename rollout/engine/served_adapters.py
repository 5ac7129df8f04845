"""The adapters of an engine by name: which version is in which slot, and who still needs it."""

from collections.abc import Set
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from memsaver import MemorySaver, StateError
from rollout.errors import WeightUpdateError
from rollout.model.adapter_params import AdapterFolder
from rollout.weights.adapters import AdapterPages, ServedAdapter
from rollout.weights.messages import UpdateReceipt, WeightOffer
from rollout.weights.update import WeightUpdate

Needed = Set[ServedAdapter | None]
"""The adapters of unfinished requests."""


@dataclass(frozen=True)
class _OpenSlot:
    """An update that has not been committed."""

    slot: int
    update: WeightUpdate


class ServedAdapters:
    """The present version of each adapter, and its slot.

    A version that was replaced keeps its slot while requests need it.

    Args:
        pages: The slots.
        rank: Rank of the slots.
        saver: Saver of the slots.
    """

    def __init__(self, pages: AdapterPages, rank: int, saver: MemorySaver) -> None:
        self.pages, self._rank, self._saver = pages, rank, saver
        self._served: dict[str, ServedAdapter] = {}
        self._begun: dict[str, _OpenSlot] = {}
        self._keys = count(1)

    @property
    def versions(self) -> dict[str, int]:
        """Return the version of each adapter."""
        return {name: served.version for name, served in self._served.items()}

    def find(self, name: str) -> ServedAdapter:
        """Return the present version of an adapter.

        Raises:
            ValueError: No adapter has this name.
        """
        if name not in self._served:
            known = ", ".join(self._served) or "none"
            raise ValueError(f"no adapter is named {name!r}; loaded: {known}; call load_adapter")
        return self._served[name]

    def version(self, name: str) -> int | None:
        """Return the version of an adapter; None while there is none, or its content is lost."""
        served = self._served.get(name)
        return None if served is None else self.pages.stores[served.slot - 1].version

    def lost(self) -> list[str]:
        """Return the adapters whose content other users of the saver have discarded."""
        return [name for name in self._served if self.version(name) is None]

    def load(self, path: str | Path, name: str, needed: Needed) -> None:
        """Load a folder of PEFT as the next version of an adapter.

        Args:
            path: The folder.
            name: Name of the adapter.
            needed: The adapters of unfinished requests.

        Raises:
            StateError: All slots are in use. Nothing changed.
            ValueError: The folder does not fit the slots. Nothing changed.
        """
        folder, last = AdapterFolder.open(path), self._served.get(name)
        folder.check(self.pages.shapes, self._rank)
        slot = self._free_slot(name, needed)
        store = self.pages.stores[slot - 1]
        store.load(folder.tensors(self.pages.shapes, self._rank), str(path))
        store.define(0 if last is None else last.version + 1)
        self._serve(name, slot)

    def unload(self, name: str, needed: Needed) -> None:
        """Forget an adapter, whose slot is free then.

        Raises:
            ValueError: No adapter has this name.
            StateError: Unfinished requests need it. Nothing changed.
        """
        if (served := self.find(name)) in needed:
            raise StateError(f"cannot unload adapter {name!r}: unfinished requests use it")
        del self._served[served.name]

    def begin(
        self, name: str, version: int, needed: Needed, overwrite: bool = False
    ) -> WeightOffer:
        """Offer a slot for a version of an adapter; this replaces an open update of it.

        The present version is served until the commit, unless its own slot is the only free one.

        Args:
            name: Name of the adapter, which need not be known.
            version: Number of the version.
            needed: The adapters of unfinished requests.
            overwrite: Count the present version as not needed.

        Raises:
            StateError: All slots are in use. Nothing changed.
            ValueError: The version is older than the present one. Nothing changed.
        """
        last = self._served.get(name)
        if last is not None and version < last.version:
            rule = f"version {version} of adapter {name!r} is older than version {last.version}"
            raise ValueError(f"{rule}, which is served; use a higher one")
        self._begun.pop(name, None)
        slot = self._free_slot(name, needed - {last} if overwrite else needed)
        store = self.pages.stores[slot - 1]
        store.last_version = version  # the slot may have had a later version of another adapter
        update = WeightUpdate(store, self._saver, lambda: None)
        offer = update.begin(version)
        self._begun[name] = _OpenSlot(slot, update)
        return replace(offer, start=(slot - 1) * self.pages.nbytes)

    def update(self, name: str) -> WeightUpdate:
        """Return the open update of an adapter, or raise a WeightUpdateError."""
        if name not in self._begun:
            rule = f"no update of adapter {name!r} is open; call begin_update first"
            raise WeightUpdateError(rule)
        return self._begun[name].update

    def commit(self, name: str, version: int) -> UpdateReceipt:
        """Serve the verified version of an adapter to later requests."""
        receipt = self.update(name).commit(version)
        self._serve(name, self._begun.pop(name).slot)
        return receipt

    def abort(self, name: str, reason: str) -> None:
        """End an update without a commit."""
        if (begun := self._begun.pop(name, None)) is not None:
            begun.update.abort(reason)

    def _serve(self, name: str, slot: int) -> None:
        version = self.pages.stores[slot - 1].last_version
        self._served[name] = ServedAdapter(name, slot, version, next(self._keys))

    def _free_slot(self, name: str, needed: Needed) -> int:
        """Return a slot that nobody needs, that of the adapter's last version only at last."""
        busy = {adapter.slot for adapter in needed if adapter is not None}
        busy |= {served.slot for served in self._served.values() if served.name != name}
        busy |= {begun.slot for other, begun in self._begun.items() if other != name}
        slots = range(1, len(self.pages.stores) + 1)
        free = [slot for slot in slots if slot not in busy]
        if not free:
            names = ", ".join(self._served)
            raise StateError(
                f"no slot is free for adapter {name!r}: {len(slots)} slots have {names} and "
                f"versions that unfinished requests use; unload one, or raise adapters.slots"
            )
        last = self._served.get(name)
        return next((slot for slot in free if last is None or slot != last.slot), free[0])
