"""The tags of one saver, and the accounts of their memory for reports."""

from collections.abc import Callable, Collection, Iterator, Sequence

from memsaver.errors import StateError, TagError
from memsaver.memory.backend import Backend
from memsaver.memory.page_pool import PagePool
from memsaver.memory.torch_allocator import TorchUse
from memsaver.report import PAGE_POOL, Report, TagReport, Usage
from memsaver.tag.arena import Arena
from memsaver.tag.saving import live_ranges
from memsaver.types import Content, check_choice


class Tags:
    """Arenas of one saver by tag, in the order of their first use.

    The saver holds its lock around methods that add or remove a tag. Lookups are safe at any time.
    """

    def __init__(self, backend: Backend, reserve_bytes: int) -> None:
        self._backend = backend
        self.reserve_bytes = backend.round_up(reserve_bytes)  # address space of each tag
        self._arenas: dict[str, Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        return iter(tuple(self._arenas.values()))

    def get(self, tag: str) -> Arena:
        if tag not in self._arenas:
            known = ", ".join(map(repr, self._arenas)) or "none yet"
            raise TagError(f"unknown tag {tag!r}; the known tags are: {known}")
        return self._arenas[tag]

    def select(self, tags: Sequence[str]) -> list[Arena]:
        """Return each tag's arena once; no tag means all."""
        return [self.get(tag) for tag in dict.fromkeys(tags or tuple(self._arenas))]

    def open(self, tag: str, content: Content | None) -> Arena:
        """Return the tag's arena for an allocation; create it on first use."""
        check_content(content)
        arena = self._arenas.get(tag)
        if arena is None:
            arena = self._arenas[tag] = Arena(
                tag, content or "discard", self._backend, self.reserve_bytes
            )
        if content is not None and content != arena.content:
            raise TagError(
                f"tag {tag!r} has content={arena.content!r}, not {content!r}; use a different tag"
            )
        if arena.paused:
            raise StateError(f"tag {tag!r} is paused; call resume({tag!r}) before allocating on it")
        arena.require_own(f"cannot allocate on {tag!r}")
        arena.cause()  # clear an earlier failure
        return arena

    def forget(self, tag: str) -> None:
        del self._arenas[tag]

    def at(self, address: int) -> Arena:
        """Return the arena whose address range contains an address."""
        for arena in self:
            if 0 <= address - arena.address < arena.reservation.nbytes:
                return arena
        raise TagError(
            "the tensor is not in any tag of this saver; make it in a region, or with empty()"
        )


def check_content(content: Content | None) -> None:
    if content is not None:
        check_choice("content", content, Content)


class Accounts:
    """Accounts of the memory that a saver's tags and page pool hold.

    The saver holds its lock around every call except `usage`.
    """

    def __init__(self, backend: Backend, pool: PagePool, tags: Tags) -> None:
        self.backend, self.pool, self.tags = backend, pool, tags
        self._torch_use = TorchUse(backend.device)

    def report(self, leases: Callable[[str], Collection[int]], others: bool) -> Report:
        """Build the saver's report; `leases` returns the leases of a tag."""
        tags = {arena.tag: _report(arena, len(leases(arena.tag))) for arena in self.tags}
        return Report(
            device=str(self.backend.device),
            limit_bytes=self.backend.limit_bytes,
            committed_bytes=self.backend.committed_bytes,
            pool_bytes=self.pool.held_bytes,
            backup_bytes=sum(tag.backup_bytes for tag in tags.values()),
            tags=tags,
            others=self.backend.other_holders() if others else {},
        )

    def usage(self) -> Usage:
        now, peak, used = self._torch_use.take(
            tuple((arena.tag, arena.stats.blocks, arena.stats.frees) for arena in self.tags)
        )
        holders = self.holders()
        backups = [arena.backup for arena in self.tags]
        if not holders[PAGE_POOL]:
            del holders[PAGE_POOL]
        return Usage(
            tags=holders,
            torch_bytes=now,
            torch_peak_bytes=peak,
            device_used_bytes=used,
            host_bytes=sum(backup.host_bytes for backup in backups if backup),
        )

    def holders(self) -> dict[str, int]:
        """Return the committed bytes by tag, including the page pool."""
        holders = {arena.tag: arena.stats.committed for arena in self.tags}
        return holders | {PAGE_POOL: self.pool.held_bytes}


def _report(arena: Arena, leases: int) -> TagReport:
    stats, backup, aliased = arena.stats, arena.backup, arena.aliased
    return TagReport(
        state="paused" if arena.paused else "active",
        content=arena.content,
        reserved_bytes=stats.reserved,
        committed_bytes=stats.committed,
        aliased_bytes=0 if aliased is None else aliased.nbytes,
        live_bytes=sum(nbytes for _, nbytes in live_ranges(arena)),
        backup_bytes=backup.host_bytes if backup else 0,
        disk_bytes=backup.disk_bytes if backup else 0,
        extents=stats.extents,
        leases=leases,
    )
