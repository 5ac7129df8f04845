"""Pages beside the weight store's own: second ones, into which a version is written while the one
before is still served; and the trainer's, where nothing is written or copied, and two tags show one
memory.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memsaver import StateError
from rollout.types import WEIGHTS_SHADOW
from rollout.weights.arena import WeightArena

if TYPE_CHECKING:
    from memsaver import MemorySaver, Ticket


class ShadowPages:
    """Pages of as many bytes as the store's arena, at the same offset of a tag of their own.

    They have memory from `take` to `give_back`. Their address is the same each time: tables that
    hold it are made once.
    """

    def __init__(self, store: WeightArena, saver: "MemorySaver") -> None:
        self._store = store
        self._saver = saver
        self._arena: Tensor | None = None

    @property
    def arena(self) -> Tensor:
        """uint8, as long as the store's."""
        assert self._arena is not None
        return self._arena

    def take(self) -> None:
        """Put memory behind the pages, content undefined.

        OutOfMemory, StateError: nothing was changed.
        """
        if self._arena is None:
            self._arena = self._make()
        elif self._saver.is_paused(WEIGHTS_SHADOW):
            self._saver.resume(WEIGHTS_SHADOW)

    def _make(self) -> Tensor:
        whole, tag = self._store.arena, self._store.tag
        if not self._saver.offset_of(whole):
            arena = self._saver.empty((whole.nbytes,), torch.uint8, tag=WEIGHTS_SHADOW)
            tags = self._saver.report().tags
            if tags[WEIGHTS_SHADOW].live_bytes == tags[tag].live_bytes:
                return arena
            del arena
            self._saver.trim(WEIGHTS_SHADOW)
        raise StateError(
            f"shadow pages need tag {tag} for the weights alone; place the other tensors on "
            f"another tag"
        )

    def copy_all(self) -> None:
        """Copy the weights that are served, for an update that writes some of them only; waits."""
        self.arena.copy_(self._store.arena)
        if self.arena.is_cuda:  # another process goes on to write
            torch.cuda.current_stream(self.arena.device).synchronize()

    def ticket(self) -> "Ticket":
        return self._saver.share(WEIGHTS_SHADOW, writable=True)

    def exchange(self) -> None:
        """Makes the store's addresses show what was written, and these what was served. Waits for
        the device's work. LeaseError where a process maps either: nothing was changed.
        """
        self._saver.exchange(self._store.tag, WEIGHTS_SHADOW)

    def give_back(self) -> None:
        """The memory goes back to the driver; nothing happens without. LeaseError: a writer still
        maps it.
        """
        if self._arena is not None:
            self._saver.pause(WEIGHTS_SHADOW, content="discard")


if TYPE_CHECKING:
    from memsaver import MemorySaver, Ticket


class BorrowedPages:
    """Another saver's pages behind the store's addresses, in place of its own memory, from `take`
    to `give_back`.
    """

    def __init__(self, store: WeightArena, saver: "MemorySaver") -> None:
        self._store = store
        self._saver = saver
        self._alone = False
        self.held = False  # the tag is active with borrowed pages

    def require_possible(self) -> None:
        """StateError where other tensors lie on the tag: they would show the trainer's bytes."""
        # asked once: a report costs milliseconds where torch's caches are large
        if not self._alone:
            arena, tag = self._store.arena, self._store.tag
            if (
                self._saver.offset_of(arena)
                or self._saver.report().tags[tag].live_bytes != arena.nbytes
            ):
                raise StateError(
                    f"borrowed pages need tag {tag} for the weights alone; place the other "
                    f"tensors on another tag"
                )
            self._alone = True

    def require_own(self, action: str) -> None:
        """StateError while the weights lie in borrowed pages."""
        if self.held:
            raise StateError(
                f"cannot {action}: the weights lie in the trainer's pages; "
                f"sleep(tags=[{self._store.tag!r}]) gives them back, wake_up takes memory "
                "of the engine's own"
            )

    def empty(self) -> None:
        """Give back what is behind the tag, own memory or borrowed.

        LeaseError: a process maps it; nothing changed.
        """
        self._saver.pause(self._store.tag, content="discard")
        self.held = False

    def take(self, ticket: "Ticket") -> None:
        """Put the pages behind the tag, which is empty.

        ValueError, LeaseError: they cannot be had; nothing changed.
        """
        self._saver.borrow(self._store.tag, ticket)
        self.held = True

    def give_back(self) -> bool:
        """Gives borrowed pages back; True when there were any, and the tag sleeps then."""
        if not self.held:
            return False
        self.empty()
        return True
