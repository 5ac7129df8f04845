"""Do the tables of extents, tags and page pool agree?"""

from __future__ import annotations

from collections.abc import Iterable

from memsaver.native import shim
from memsaver.sharing.import_table import imports
from memsaver.tag.arena import Arena
from memsaver.vmm.backend import Backend
from memsaver.vmm.page_pool import PagePool


def check(arenas: Iterable[Arena], pool: PagePool, backend: Backend) -> None:
    """Raises ``AssertionError`` where they do not."""
    found, borrowed = [*pool.extents], set[int]()
    for arena in arenas:
        extents, end = shim.extents(arena.slot), 0
        for extent in extents:
            assert extent.offset == end, f"{arena.tag}: extents have a hole at {end}"
            end += extent.nbytes
        committed = arena.stats.committed
        assert end == committed, f"{arena.tag}: {end} bytes of extents, {committed} committed"
        assert not (arena.paused and end), f"{arena.tag} is paused with {end} bytes committed"
        found += extents
        if arena.borrowed is not None:
            _check_borrowed(arena)
            borrowed |= {extent.id for extent in arena.borrowed.extents}
    total = sum(extent.nbytes for extent in found)
    assert total == backend.committed_bytes, f"{total} bytes known, {backend.committed_bytes} made"
    assert len(found) == len({extent.id for extent in found}), "an extent is in two places"
    assert borrowed.isdisjoint(extent.id for extent in found), (
        "an extent is borrowed from the saver itself"
    )


def _check_borrowed(arena: Arena) -> None:
    borrowed, stats = arena.borrowed, arena.stats
    assert borrowed is not None and not arena.paused, f"{arena.tag} is paused with borrowed pages"
    assert not stats.committed, (
        f"{arena.tag} has borrowed pages and {stats.committed} bytes of its own"
    )
    assert stats.state == shim.PAUSED, f"{arena.tag} could grow behind borrowed pages"
    ends = [extent.offset + extent.nbytes for extent in borrowed.extents]
    assert [0, *ends] == [*(extent.offset for extent in borrowed.extents), borrowed.nbytes], (
        f"{arena.tag}: a hole in borrowed pages"
    )
    assert imports.pinned([extent.id for extent in borrowed.extents]), (
        f"{arena.tag}: borrowed extents are not held"
    )
