"""The page ledger against a plain dict page -> number of owners."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import DEVICE, ledger_state

PAGES = 9


class LedgerMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7]))
    def build(self, page_size: int) -> None:
        self.ps = page_size
        self.ledger = (
            TokenToKVPoolAllocator(PAGES, DEVICE)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, DEVICE)
        )
        self.owners: Counter[int] = Counter()
        self.group: set[int] | None = None  # pages that the open free group holds back
        self.sequences: list[list[int]] = []  # token ids of each

    def _take(self, pages: set[int]) -> None:
        assert 0 not in pages
        assert all(0 < page <= PAGES and self.owners[page] == 0 for page in pages)
        assert not pages & (self.group or set())
        self.owners.update(pages)

    def _drop(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        self.owners.subtract(pages)
        if self.group is not None:
            self.group |= {page for page in pages if not self.owners[page]}
        self.sequences = [s for s in self.sequences if all(self.owners[i // self.ps] for i in s)]

    def _free_pages(self) -> int:
        return PAGES - len(+self.owners) - len(self.group or ())

    @rule(count=st.integers(0, PAGES))
    def alloc(self, count: int) -> None:
        before = ledger_state(self.ledger)
        loc = self.ledger.alloc(count * self.ps)
        if count > self._free_pages():
            assert loc is None
            assert ledger_state(self.ledger) == before
            return
        assert loc is not None
        ids = loc.tolist()
        pages = [i // self.ps for i in ids[:: self.ps]]
        assert ids == [page * self.ps + o for page in pages for o in range(self.ps)]
        assert len(set(pages)) == count
        self._take(set(pages))

    @rule(gains=st.lists(st.integers(0, 9), max_size=5), decode=st.booleans())
    def extend(self, gains: list[int], decode: bool) -> None:
        if decode:
            gains = [1] * len(gains)
        grown = self.sequences[: len(gains)] + [[] for _ in gains[len(self.sequences) :]]
        prefix = [len(s) for s in grown]
        seq = [p + g for p, g in zip(prefix, gains, strict=True)]
        last = [s[-1] if s else -1 for s in grown]
        before = ledger_state(self.ledger)
        ledger = self.ledger
        loc = ledger.alloc_decode(seq, last) if decode else ledger.alloc_extend(prefix, seq, last, sum(gains))
        needed = sum(-(-s // self.ps) - -(-p // self.ps) for p, s in zip(prefix, seq, strict=True))
        if needed > self._free_pages():
            assert loc is None
            assert ledger_state(self.ledger) == before
            return
        assert loc is not None
        fresh = loc.tolist()
        old_pages = {i // self.ps for s in grown for i in s}
        for ids, gain in zip(grown, gains, strict=True):
            ids += fresh[:gain]
            del fresh[:gain]
            pages = [i // self.ps for i in ids[:: self.ps]]
            assert ids == [pages[at // self.ps] * self.ps + at % self.ps for at in range(len(ids))]
        new_pages = [i // self.ps for s in grown for i in s[:: self.ps] if i // self.ps not in old_pages]
        assert len(new_pages) == len(set(new_pages)) == needed
        self._take(set(new_pages))
        self.sequences[: len(gains)] = [s for s in grown if s]

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(1, PAGES), max_size=4))
        before = ledger_state(self.ledger)
        if all(self.owners[page] for page in pages):
            self.ledger.share(pages)
            self.owners.update(pages)
            return
        with pytest.raises(ValueError, match="is free"):
            self.ledger.share(pages)
        assert ledger_state(self.ledger) == before

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(1, PAGES), max_size=6))
        before = ledger_state(self.ledger)
        if all(self.owners[page] >= times for page, times in Counter(pages).items()):
            self.ledger.free_pages(pages)
            self._drop(pages)
            return
        with pytest.raises(ValueError, match="double free"):
            self.ledger.free_pages(pages)
        assert ledger_state(self.ledger) == before

    @rule(data=st.data())
    def free_tokens(self, data: st.DataObject) -> None:
        if not self.sequences:
            return
        ids = data.draw(st.sampled_from(self.sequences))
        before = ledger_state(self.ledger)
        with pytest.raises(ValueError, match="double free of token"):
            self.ledger.free([*ids, ids[0]])
        assert ledger_state(self.ledger) == before
        self.ledger.free(ids)
        self._drop({i // self.ps for i in ids})

    @rule()
    def group_begins_or_ends(self) -> None:
        if self.group is None:
            self.ledger.free_group_begin()
            self.group = set()
        else:
            self.ledger.free_group_end()
            self.group = None

    @invariant()
    def ledger_equals_the_model(self) -> None:
        self.ledger.check_integrity()
        assert ledger_state(self.ledger)[0] == [self.owners[page] for page in range(1, PAGES + 1)]
        assert self.ledger.available_size() == self._free_pages() * self.ps


TestLedger = pytest.mark.soak(LedgerMachine.TestCase)
TestLedger.settings = settings(max_examples=rounds(150, 3000), stateful_step_count=30, derandomize=True, deadline=None)
