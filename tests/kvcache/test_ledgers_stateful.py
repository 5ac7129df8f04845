"""Page ledgers against a plain dict page -> number of owners: of one pool, and of the two pools of a sliding-window
model, either side of which may be exhausted at any moment."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvcache import KVAllocator, PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcache.allocators.base import Indices, Int64Array, as_int64
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import DEVICE, ledger_state

PAGES = 9
SOME = st.lists(st.integers(1, PAGES), max_size=6)
STARVED = st.sampled_from([None, None, "full", "swa"])


class LedgerMachine(RuleBasedStateMachine):
    """What every ledger does."""

    real: KVAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7]))
    def build(self, page_size: int) -> None:
        one = TokenToKVPoolAllocator(PAGES, DEVICE)
        self.start(one if page_size == 1 else PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, DEVICE))

    def start(self, real: KVAllocator) -> None:
        self.real, self.ps = real, real.page_size
        self.owners: Counter[int] = Counter()
        self.held: set[int] | None = None  # pages that the open group holds back
        self.sequences: list[list[int]] = []  # token ids of each

    def left(self, side: str | None) -> int:
        """Pages that can be taken."""
        return PAGES - len(+self.owners) - len(self.held or ())

    @contextmanager
    def starved(self, side: str | None) -> Iterator[None]:
        """No page can be taken from this side; a single ledger has none."""
        yield

    def take(self, pages: set[int]) -> None:
        assert all(0 < page <= PAGES and not self.owners[page] for page in pages)
        assert not pages & (self.held or set())
        self.owners.update(pages)

    def drop(self, times: Counter[int]) -> None:
        self.owners.subtract(times)
        if self.held is not None:
            self.held.update(page for page in times if not self.owners[page])
        self.forget()

    def forget(self) -> None:
        """Sequences that can't grow any more, as one of their pages is free."""
        self.sequences = [s for s in self.sequences if all(self.owners[i // self.ps] for i in s)]

    @rule(count=st.integers(0, PAGES), by_page=st.booleans(), side=STARVED)
    def alloc(self, count: int, by_page: bool, side: str | None) -> None:
        before = ledger_state(self.real)
        with self.starved(side):
            got = self.real.alloc_pages(count) if by_page else self.real.alloc(count * self.ps)
        if count > self.left(side):
            assert got is None
            assert ledger_state(self.real) == before
            return
        assert got is not None
        ids = got.tolist()
        pages = ids if by_page else [i // self.ps for i in ids[:: self.ps]]
        assert by_page or ids == [page * self.ps + at for page in pages for at in range(self.ps)]
        assert len(set(pages)) == count
        self.take(set(pages))

    @rule(gains=st.lists(st.integers(0, 9), max_size=5), decode=st.booleans(), side=STARVED)
    def extend(self, gains: list[int], decode: bool, side: str | None) -> None:
        if decode:
            gains = [1] * len(gains)
        grown = self.sequences[: len(gains)] + [[] for _ in gains[len(self.sequences) :]]
        prefix = [len(s) for s in grown]
        seq = [p + g for p, g in zip(prefix, gains, strict=True)]
        last = [s[-1] if s else -1 for s in grown]
        before, real = ledger_state(self.real), self.real
        with self.starved(side):
            loc = real.alloc_decode(seq, last) if decode else real.alloc_extend(prefix, seq, last, sum(gains))
        needed = sum(-(-s // self.ps) - -(-p // self.ps) for p, s in zip(prefix, seq, strict=True))
        if needed > self.left(side):
            assert loc is None
            assert ledger_state(self.real) == before
            return
        assert loc is not None
        fresh, old = loc.tolist(), {i // self.ps for s in grown for i in s}
        for ids, gain in zip(grown, gains, strict=True):
            ids += fresh[:gain]
            del fresh[:gain]
            assert ids == [ids[at - at % self.ps] + at % self.ps for at in range(len(ids))]
        new = [i // self.ps for s in grown for i in s[:: self.ps] if i // self.ps not in old]
        assert len(new) == len(set(new)) == needed and not any(s[0] % self.ps for s in grown if s)
        self.take(set(new))
        self.sequences[: len(gains)] = [s for s in grown if s]

    @rule(pages=SOME)
    def share(self, pages: list[int]) -> None:
        before = ledger_state(self.real)
        if all(self.owners[page] for page in pages):
            self.real.share(pages)
            self.shared(pages)
            return
        with pytest.raises(ValueError, match="is free"):
            self.real.share(pages)
        assert ledger_state(self.real) == before

    def shared(self, pages: list[int]) -> None:
        self.owners.update(pages)

    @rule(pages=SOME)
    def free(self, pages: list[int]) -> None:
        before = ledger_state(self.real)
        if all(self.owners[page] >= times for page, times in Counter(pages).items()):
            self.real.free_pages(pages)
            self.drop(Counter(pages))
            return
        with pytest.raises(ValueError, match="double free of page"):
            self.real.free_pages(pages)
        assert ledger_state(self.real) == before

    @rule(data=st.data())
    def free_sequence(self, data: st.DataObject) -> None:
        if not self.sequences:
            return
        ids = data.draw(st.sampled_from(self.sequences))
        before = ledger_state(self.real)
        with pytest.raises(ValueError, match="double free of token"):
            self.real.free([*ids, ids[0]])
        assert ledger_state(self.real) == before
        self.real.free(ids)
        self.drop(Counter({i // self.ps for i in ids}))

    @rule()
    def group_begins_or_ends(self) -> None:
        if self.held is None:
            self.real.free_group_begin()
            self.held = set()
        else:
            self.real.free_group_end()
            self.held = None

    @invariant()
    def ledger_equals_the_model(self) -> None:
        self.real.check_integrity()
        every = range(1, PAGES + 1)
        assert self.real.ref_counts(every).tolist() == [self.owners[page] for page in every]
        assert self.real.available_size() == self.left(None) * self.ps


class SWAMachine(LedgerMachine):
    """And what a ledger of two pools does besides."""

    kind: type[SWATokenToKVPoolAllocator] = SWATokenToKVPoolAllocator
    real: SWATokenToKVPoolAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), swa_pages=st.sampled_from([5, 3, PAGES]))
    def build(self, page_size: int, swa_pages: int) -> None:  # type: ignore[override]
        self.swa_pages = swa_pages
        self.window: Counter[int] = Counter()  # owners that have the page in their window
        self.slot: dict[int, int] = {}  # window page of each page, as seen when it was issued
        self.held_swa: set[int] = set()  # window pages that the open group holds back
        self.start(self.kind(PAGES * page_size, swa_pages * page_size, page_size, DEVICE))

    def sides(self) -> tuple[int, int]:
        return super().left(None), self.swa_pages - len(+self.window) - len(self.held_swa)

    def left(self, side: str | None) -> int:
        return 0 if side else min(self.sides())

    @contextmanager
    def starved(self, side: str | None) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if side:
                none = np.empty(0, dtype=np.int64)
                patch.setattr(getattr(self.real, side), "next_pages", lambda count: None if count else none)
            yield

    def slots(self) -> dict[int, int]:
        """The window page of each page on the device; fails unless its tokens are there in order."""
        mapping = self.real.full_to_swa_index_mapping.tolist()
        slots = {}
        for page in range(PAGES + 1):
            got = mapping[page * self.ps : (page + 1) * self.ps]
            slots[page] = got[0] // self.ps
            in_order = [slots[page] * self.ps + at for at in range(self.ps)]
            assert got == in_order if slots[page] else not any(got)
        return slots

    def take(self, pages: set[int]) -> None:
        super().take(pages)
        slots = self.slots()
        for page in pages:
            assert 0 < slots[page] <= self.swa_pages and slots[page] not in self.held_swa
            self.slot[page] = slots[page]
        self.window.update(pages)

    def shared(self, pages: list[int]) -> None:
        super().shared(pages)
        self.window.update(page for page in pages if self.window[page])

    def drop(self, times: Counter[int]) -> None:
        """Shares that have left the window go first."""
        excess = {page: self.window[page] - (self.owners[page] - n) for page, n in times.items()}
        self.drop_window(Counter({page: n for page, n in excess.items() if n > 0}))
        super().drop(times)

    def drop_window(self, times: Counter[int]) -> None:
        self.window.subtract(times)
        if self.held is not None:
            self.held_swa.update(self.slot[page] for page in times if not self.window[page])
        self.forget()

    def forget(self) -> None:
        """And sequences whose partial last page has left the window."""
        super().forget()
        self.sequences = [s for s in self.sequences if self.window[s[-1] // self.ps]]

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
            self.drop_window(Counter(pages))
            return
        else:
            with pytest.raises(ValueError, match="double free of the window slots"):
                self.real.free_swa(ids)
        assert ledger_state(self.real) == before

    @rule()
    def group_begins_or_ends(self) -> None:
        super().group_begins_or_ends()
        self.held_swa = set()

    @invariant()
    def window_equals_the_model(self) -> None:
        every = range(1, PAGES + 1)
        assert self.real.swa_ref_counts(every).tolist() == [self.window[page] for page in every]
        assert (self.real.full.available_pages, self.real.swa.available_pages) == self.sides()
        mapped = {page: slot for page, slot in self.slots().items() if slot}
        assert len(set(mapped.values())) == len(mapped)
        assert all(mapped.get(page) == self.slot[page] for page in +self.window)
        if self.held is None:
            assert set(mapped) == set(+self.window)


TestLedger = pytest.mark.soak(LedgerMachine.TestCase)
TestLedger.settings = settings(max_examples=rounds(100, 3000), stateful_step_count=30)
TestSWA = pytest.mark.soak(SWAMachine.TestCase)
TestSWA.settings = settings(max_examples=rounds(100, 3000), stateful_step_count=30)


class TakesFullFirst(SWATokenToKVPoolAllocator):
    """Keeps the full pages when the window pool then has none."""

    def next_pages(self, count: int) -> Int64Array | None:
        if self.swa.next_pages(count) is None:
            self.full.alloc_pages(count)
            return None
        return self.full.next_pages(count)

    def alloc_pages(self, count: int) -> Int64Array | None:
        return None if self.next_pages(count) is None else super().alloc_pages(count)


class ChecksFullLast(SWATokenToKVPoolAllocator):
    """Drops the window half before a double free of the full page is found."""

    def free_pages(self, pages: Indices) -> None:
        ids = as_int64(pages, "pages")
        self.free_swa_pages(ids[self.swa_ref_counts(ids) > 0][:1])
        super().free_pages(ids)


class NeverUnmaps(SWATokenToKVPoolAllocator):
    def _give_back(self, pages: Int64Array) -> None:
        pass


@pytest.mark.parametrize("broken", [TakesFullFirst, ChecksFullLast, NeverUnmaps])
def test_the_machine_catches_a_broken_allocator(broken: type[SWATokenToKVPoolAllocator]) -> None:
    machine = type("Broken", (SWAMachine,), {"kind": broken})
    quick = settings(stateful_step_count=30, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
