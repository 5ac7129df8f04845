"""The adapters of an engine by name: which version is in which slot, and who still needs it."""

from collections.abc import Iterable
from itertools import count
from pathlib import Path

from memsaver import StateError
from rollout.model.adapter_params import AdapterFolder
from rollout.weights.adapters import AdapterPages, ServedAdapter


class ServedAdapters:
    """The present version of each adapter, and its slot.

    A version that was replaced keeps its slot while requests need it.

    Args:
        pages: The slots.
        rank: Rank of the slots.
    """

    def __init__(self, pages: AdapterPages, rank: int) -> None:
        self._pages, self._rank = pages, rank
        self._served: dict[str, ServedAdapter] = {}
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

    def lost(self) -> list[str]:
        """Return the adapters whose content other users of the saver have discarded."""
        stores = self._pages.stores
        return [a.name for a in self._served.values() if stores[a.slot - 1].version is None]

    def load(self, path: str | Path, name: str, needed: Iterable[ServedAdapter | None]) -> None:
        """Load a folder of PEFT as the next version of an adapter.

        Args:
            path: The folder.
            name: Name of the adapter.
            needed: The adapters of unfinished requests.

        Raises:
            StateError: All slots are in use. Nothing changed.
            ValueError: The folder does not fit the slots. Nothing changed, unless the slot of this
                adapter's last version had to be used, which is then unloaded.
        """
        folder, last = AdapterFolder.open(path), self._served.get(name)
        slot = self._free_slot(name, needed)
        store = self._pages.stores[slot - 1]
        folder.check(store.shapes, self._rank)
        if last is not None and last.slot == slot:
            del self._served[name]
        store.load(folder.tensors(store.shapes, self._rank), str(path))
        version = 0 if last is None else last.version + 1
        store.define(version)
        self._pages.scales[slot] = folder.scale
        self._served[name] = ServedAdapter(name, slot, version, next(self._keys))

    def unload(self, name: str, needed: Iterable[ServedAdapter | None]) -> None:
        """Forget an adapter, whose slot is free then.

        Raises:
            ValueError: No adapter has this name.
            StateError: Unfinished requests need it. Nothing changed.
        """
        if (served := self.find(name)) in needed:
            raise StateError(f"cannot unload adapter {name!r}: unfinished requests use it")
        del self._served[served.name]

    def _free_slot(self, name: str, needed: Iterable[ServedAdapter | None]) -> int:
        """Return a slot that nobody needs, that of the adapter's last version only at last."""
        busy = {adapter.slot for adapter in needed if adapter is not None}
        others = {a.slot for a in self._served.values() if a.name != name}
        slots = range(1, len(self._pages.stores) + 1)
        free = [slot for slot in slots if slot not in busy | others]
        if not free:
            names = ", ".join(self._served)
            raise StateError(
                f"no slot is free for adapter {name!r}: {len(slots)} slots have {names} and "
                f"versions that unfinished requests use; unload one, or raise adapters.slots"
            )
        last = self._served.get(name)
        return next((slot for slot in free if last is None or slot != last.slot), free[0])
