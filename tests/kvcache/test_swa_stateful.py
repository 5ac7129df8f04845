"""The two ledgers of a sliding-window model against a plain dict, with either side exhausted at any moment."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvcache import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from kvcache.allocators.base import Indices, Int64Array, as_int64
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import DEVICE, ledger_state

PAGES = 9
STARVED = st.sampled_from([None, None, "full", "swa"])


@contextmanager
def starved(ledger: PagedTokenToKVPoolAllocator) -> Iterator[None]:
    """No page can be taken from this side."""
    none = np.empty(0, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "next_pages", lambda count: None if count else none)
        yield


class SWAMachine(RuleBasedStateMachine):
    kind: type[SWATokenToKVPoolAllocator] = SWATokenToKVPoolAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), swa_pages=st.sampled_from([5, 3, PAGES]))
    def build(self, page_size: int, swa_pages: int) -> None:
        self.ps, self.swa_pages = page_size, swa_pages
        self.real = self.kind(PAGES * page_size, swa_pages * page_size, page_size, DEVICE)
        self.owners: Counter[int] = Counter()
        self.window: Counter[int] = Counter()  # owners that have the page in their window
        self.slot: dict[int, int] = {}  # window page of each page, as seen when it was issued
        self.sequences: list[list[int]] = []
        self.held: tuple[set[int], set[int]] | None = None  # what the open group holds back: pages, window pages

    def _left(self) -> tuple[int, int]:
        full, swa = self.held or (set(), set())
        return PAGES - len(+self.owners) - len(full), self.swa_pages - len(+self.window) - len(swa)

    def _take(self, pages: set[int]) -> None:
        full, swa = self.held or (set(), set())
        assert all(0 < page <= PAGES and not self.owners[page] and page not in full for page in pages)
        slots = self._slots()
        for page in pages:
            assert 0 < slots[page] <= self.swa_pages and slots[page] not in swa
            self.slot[page] = slots[page]
        self.owners.update(pages)
        self.window.update(pages)

    def _slots(self) -> dict[int, int]:
        """The window page of each page on the device; fails unless its tokens are there in order."""
        mapping = self.real.full_to_swa_index_mapping.tolist()
        slots = {}
        for page in range(PAGES + 1):
            got = mapping[page * self.ps : (page + 1) * self.ps]
            slots[page] = got[0] // self.ps
            in_order = [slots[page] * self.ps + at for at in range(self.ps)]
            assert got == in_order if slots[page] else not any(got)
        return slots

    def _fits(self, needed: int, side: str | None) -> bool:
        return needed == 0 or (side is None and needed <= min(self._left()))

    def _side(self, side: str | None) -> AbstractContextManager[None]:
        return nullcontext() if side is None else starved(getattr(self.real, side))

    @rule(count=st.integers(0, PAGES), side=STARVED)
    def alloc_pages(self, count: int, side: str | None) -> None:
        before = ledger_state(self.real)
        with self._side(side):
            pages = self.real.alloc_pages(count)
        if not self._fits(count, side):
            assert pages is None
            assert ledger_state(self.real) == before
            return
        assert pages is not None
        assert len(set(pages.tolist())) == count
        self._take(set(pages.tolist()))

    @rule(gains=st.lists(st.integers(0, 7), min_size=1, max_size=4), decode=st.booleans(), side=STARVED)
    def extend(self, gains: list[int], decode: bool, side: str | None) -> None:
        if decode:
            gains = [1] * len(gains)
        grown = self.sequences[: len(gains)] + [[] for _ in gains[len(self.sequences) :]]
        prefix = [len(s) for s in grown]
        seq = [p + g for p, g in zip(prefix, gains, strict=True)]
        last = [s[-1] if s else -1 for s in grown]
        before = ledger_state(self.real)
        with self._side(side):
            real = self.real
            loc = real.alloc_decode(seq, last) if decode else real.alloc_extend(prefix, seq, last, sum(gains))
        needed = sum(-(-s // self.ps) - -(-p // self.ps) for p, s in zip(prefix, seq, strict=True))
        if not self._fits(needed, side):
            assert loc is None
            assert ledger_state(self.real) == before
            return
        assert loc is not None
        fresh, old = loc.tolist(), {i // self.ps for s in grown for i in s}
        for ids, gain in zip(grown, gains, strict=True):
            ids += fresh[:gain]
            del fresh[:gain]
            assert ids == [ids[at - at % self.ps] + at % self.ps for at in range(len(ids))]
        new = {i // self.ps for s in grown for i in s} - old
        assert len(new) == needed
        self._take(new)
        self.sequences[: len(gains)] = [s for s in grown if s]

    @rule(pages=st.lists(st.integers(1, PAGES), max_size=4))
    def share(self, pages: list[int]) -> None:
        before = ledger_state(self.real)
        if all(self.owners[page] for page in pages):
            self.real.share(pages)
            self.owners.update(pages)
            self.window.update(page for page in pages if self.window[page])
            return
        with pytest.raises(ValueError, match="is free"):
            self.real.share(pages)
        assert ledger_state(self.real) == before

    @rule(pages=st.lists(st.integers(1, PAGES), max_size=6))
    def free(self, pages: list[int]) -> None:
        before = ledger_state(self.real)
        if all(self.owners[page] >= times for page, times in Counter(pages).items()):
            self.real.free_pages(pages)
            self._drop(Counter(pages))
            return
        with pytest.raises(ValueError, match="double free of page"):
            self.real.free_pages(pages)
        assert ledger_state(self.real) == before

    @rule(data=st.data())
    def free_sequence(self, data: st.DataObject) -> None:
        if self.sequences:
            ids = data.draw(st.sampled_from(self.sequences))
            self.real.free(ids)
            self._drop(Counter({i // self.ps for i in ids}))

    @rule(data=st.data(), whole=st.sampled_from([True, True, True, False]))
    def leave_window(self, data: st.DataObject, whole: bool) -> None:
        pages = data.draw(st.lists(st.integers(1, PAGES), max_size=4, unique=True))
        ids = [page * self.ps + at for page in pages for at in range(self.ps)]
        before = ledger_state(self.real)
        if not whole and self.ps > 1 and ids:
            with pytest.raises(ValueError, match="the others would lose"):
                self.real.free_swa(ids[1:])
        elif all(self.window[page] for page in pages):
            self.real.free_swa(ids)
            self._drop_window(Counter(pages))
            return
        else:
            with pytest.raises(ValueError, match="double free of the window slots"):
                self.real.free_swa(ids)
        assert ledger_state(self.real) == before

    @rule()
    def group_begins_or_ends(self) -> None:
        if self.held is None:
            self.real.free_group_begin()
            self.held = set(), set()
        else:
            self.real.free_group_end()
            self.held = None

    def _drop(self, times: Counter[int]) -> None:
        """Shares that have left the window go first."""
        excess = {page: self.window[page] - (self.owners[page] - n) for page, n in times.items()}
        self._drop_window(Counter({page: n for page, n in excess.items() if n > 0}))
        self.owners.subtract(times)
        if self.held:
            self.held[0].update(page for page in times if not self.owners[page])
        self._forget()

    def _drop_window(self, times: Counter[int]) -> None:
        self.window.subtract(times)
        if self.held:
            self.held[1].update(self.slot[page] for page in times if not self.window[page])
        self._forget()

    def _forget(self) -> None:
        """Sequences that can't grow any more: a page is free, or the partial last one has left the window."""
        self.sequences = [
            s for s in self.sequences if all(self.owners[i // self.ps] for i in s) and self.window[s[-1] // self.ps]
        ]

    @invariant()
    def both_ledgers_equal_the_model(self) -> None:
        self.real.check_integrity()
        every = range(1, PAGES + 1)
        assert self.real.ref_counts(every).tolist() == [self.owners[page] for page in every]
        assert self.real.swa_ref_counts(every).tolist() == [self.window[page] for page in every]
        left = self._left()
        assert (self.real.full.available_pages, self.real.swa.available_pages) == left
        assert self.real.available_size() == min(left) * self.ps
        slots = self._slots()
        mapped = {page: slot for page, slot in slots.items() if slot}
        assert len(set(mapped.values())) == len(mapped)
        assert all(mapped.get(page) == self.slot[page] for page in +self.window)
        if self.held is None:
            assert set(mapped) == set(+self.window)


TestSWA = pytest.mark.soak(SWAMachine.TestCase)
TestSWA.settings = settings(max_examples=rounds(150, 3000), stateful_step_count=30, derandomize=True, deadline=None)


class TakesFullFirst(SWATokenToKVPoolAllocator):
    """Keeps the full pages when the window pool then has none."""

    def next_pages(self, count: int) -> Int64Array | None:
        if self.swa.next_pages(count) is None:
            self.full.alloc_pages(count)
            return None
        return self.full.next_pages(count)

    def alloc_pages(self, count: int) -> Int64Array | None:
        return None if self.next_pages(count) is None else super().alloc_pages(count)


class TakesWindowFirst(SWATokenToKVPoolAllocator):
    """Keeps the window pages when the full pool then has none."""

    def next_pages(self, count: int) -> Int64Array | None:
        if self.full.next_pages(count) is None:
            self.swa.alloc_pages(count)
            return None
        return super().next_pages(count)

    def alloc_pages(self, count: int) -> Int64Array | None:
        return None if self.next_pages(count) is None else super().alloc_pages(count)


class MapsBeforeTheCheck(SWATokenToKVPoolAllocator):
    """Writes the mapping of the pages that the window pool has, before it finds that they are too few."""

    def alloc_pages(self, count: int) -> Int64Array | None:
        full, swa = self.full.next_pages(count), self.swa.next_pages(min(count, self.swa.available_pages))
        if full is not None and swa is not None:
            self._map(full[: len(swa)], swa)
        return super().alloc_pages(count)


class ChecksFullLast(SWATokenToKVPoolAllocator):
    """Drops the window half before a double free of the full page is found."""

    def free_pages(self, pages: Indices) -> None:
        ids = as_int64(pages, "pages")
        self.free_swa_pages(ids[self._swa_page[ids] > 0][:1])
        super().free_pages(ids)


class NeverUnmaps(SWATokenToKVPoolAllocator):
    def _give_back(self, pages: Int64Array) -> None:
        pass


@pytest.mark.parametrize("broken", [TakesFullFirst, TakesWindowFirst, MapsBeforeTheCheck, ChecksFullLast, NeverUnmaps])
def test_the_machine_catches_a_broken_allocator(broken: type[SWATokenToKVPoolAllocator]) -> None:
    machine = type("Broken", (SWAMachine,), {"kind": broken})
    quick = settings(
        max_examples=100,
        stateful_step_count=30,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
