"""Do the tables of extents, tags and page pool agree?"""

from __future__ import annotations

from collections.abc import Iterable

from memsaver.allocator import shim
from memsaver.arena import Arena
from memsaver.backends.base import Backend
from memsaver.page_pool import PagePool


def check(arenas: Iterable[Arena], pool: PagePool, backend: Backend) -> None:
    """``AssertionError`` where they do not."""
    found = [*pool.extents]
    for arena in arenas:
        extents, end = shim.extents(arena.slot), 0
        for extent in extents:
            assert extent.offset == end, f"{arena.tag}: extents have a hole at {end}"
            end += extent.nbytes
        committed = arena.stats.committed
        assert end == committed, f"{arena.tag}: {end} bytes of extents, {committed} committed"
        assert not (arena.paused and end), f"{arena.tag} is paused with {end} bytes committed"
        found += extents
    total = sum(extent.nbytes for extent in found)
    assert total == backend.committed_bytes, f"{total} bytes known, {backend.committed_bytes} made"
    assert len(found) == len({extent.id for extent in found}), "an extent is in two places"
