"""Weights that lie in the trainer's own pages: nothing is written or copied, two tags show one
memory.
"""

from typing import TYPE_CHECKING

from memsaver import StateError
from rollout.weights.arena import WeightArena

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
