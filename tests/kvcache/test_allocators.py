"""Page ledgers of one pool, and of the two pools of a sliding-window model: against a plain dict
page -> number of owners, where either side may be exhausted at any moment; then mistakes, failing
devices, error texts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from timeit import repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache import BlockManager, KVAllocator, ReqToTokenPool
from kvcache.allocators import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvcache.allocators.paged import Int64Array
from tests.helpers.effort import rounds
from tests.helpers.kvcache.blocks import DEVICE, ledger_state, make_pool
from tests.helpers.no_wait import check_no_wait

PAGES = 9
SOME = st.lists(st.integers(1, PAGES), max_size=6)
IDS = [
    list,
    lambda ids: np.array(ids, np.int32),
    lambda ids: torch.tensor(ids, dtype=torch.int64, device=DEVICE),
]
STARVED = st.sampled_from([None, None, "full", "swa"])


class LedgerMachine(RuleBasedStateMachine):
    """What every ledger does."""

    real: KVAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7]))
    def build(self, page_size: int) -> None:
        one = TokenToKVPoolAllocator(PAGES, DEVICE)
        self.start(
            one
            if page_size == 1
            else PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, DEVICE)
        )

    def start(self, real: KVAllocator) -> None:
        self.real, self.ps = real, real.page_size
        self.owners: Counter[int] = Counter()
        self.held: set[int] | None = None  # pages that the open group holds back
        self.open = PAGES  # the pages up to here are handed out
        self.sequences: list[list[int]] = []  # token ids of each
        # arrays that were handed out, and what was in them
        self.issued: list[tuple[Int64Array, list[int]]] = []

    def left(self, side: str | None) -> int:
        """Pages that can be taken."""
        return self.open - len(+self.owners) - len(self.held or ())

    @contextmanager
    def starved(self, side: str | None) -> Iterator[None]:
        """No page can be taken from this side; a single ledger has none."""
        yield

    def take(self, pages: set[int]) -> None:
        assert all(0 < page <= self.open and not self.owners[page] for page in pages)
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

    @precondition(lambda self: isinstance(self.real, PagedTokenToKVPoolAllocator))
    @rule(pages=st.integers(0, PAGES), rest=st.integers(0, 3))
    def limit(self, pages: int, rest: int) -> None:
        before, real = ledger_state(self.real), self.real
        assert isinstance(real, PagedTokenToKVPoolAllocator)
        size = min(PAGES * self.ps, pages * self.ps + min(rest, self.ps - 1))
        if any(page > pages for page in [*+self.owners, *(self.held or ())]):
            with pytest.raises(ValueError, match=rf"limit\({size}\): page \d has an owner"):
                real.limit(size)
            assert ledger_state(real) == before
            return
        real.limit(size)
        self.open = pages

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
        if by_page:
            self.issued.append((got, ids))
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
            if decode:
                loc = real.alloc_decode(np.array(seq, int), torch.tensor(last).long())
            else:
                loc = real.alloc_extend(prefix, seq, last, sum(gains))
        needed = sum(-(-s // self.ps) - -(-p // self.ps) for p, s in zip(prefix, seq, strict=True))
        if needed > self.left(side):
            assert loc is None
            assert ledger_state(self.real) == before
            return
        assert loc is not None and loc.dtype == torch.int64 and loc.device.type == DEVICE
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
        with pytest.raises(ValueError, match=r"page \d+ is free and can't be shared"):
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

    @rule(data=st.data(), kind=st.sampled_from(IDS), whole=st.booleans())
    def free_sequence(
        self, data: st.DataObject, kind: Callable[[list[int]], Any], whole: bool
    ) -> None:
        if not self.sequences:
            return
        ids = data.draw(st.sampled_from(self.sequences))
        before = ledger_state(self.real)
        with pytest.raises(ValueError, match="double free of token"):
            self.real.free([*ids, ids[0]])
        assert ledger_state(self.real) == before
        self.real.free(kind([]))
        self.real.free(kind(ids if whole else ids[:: self.ps]))  # one token names its page
        self.drop(Counter({i // self.ps for i in ids}))

    @rule()
    def group_begins_or_ends(self) -> None:
        if self.held is None:
            with pytest.raises(ValueError, match="no free group is open"):
                self.real.free_group_end()
            self.real.free_group_begin()
            self.held = set()
        else:
            with pytest.raises(ValueError, match="open already"):
                self.real.free_group_begin()
            self.real.free_group_end()
            self.held = None

    @invariant()
    def ledger_equals_the_model(self) -> None:
        self.real.check_integrity()
        every = range(1, PAGES + 1)
        assert self.real.ref_counts(every).tolist() == [self.owners[page] for page in every]
        assert self.real.available_size() == self.left(None) * self.ps
        assert all(pages.tolist() == as_they_were for pages, as_they_were in self.issued)


class SWAMachine(LedgerMachine):
    """And what a ledger of two pools does besides."""

    real: SWATokenToKVPoolAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), swa_pages=st.sampled_from([5, 3, PAGES]))
    def build(self, page_size: int, swa_pages: int) -> None:  # type: ignore[override]
        self.swa_pages = swa_pages
        self.window: Counter[int] = Counter()  # owners that have the page in their window
        self.slot: dict[int, int] = {}  # window page of each page, as seen when it was issued
        self.held_swa: set[int] = set()  # window pages that the open group holds back
        self.start(
            SWATokenToKVPoolAllocator(PAGES * page_size, swa_pages * page_size, page_size, DEVICE)
        )

    def sides(self) -> tuple[int, int]:
        return super().left(None), self.swa_pages - len(+self.window) - len(self.held_swa)

    def left(self, side: str | None) -> int:
        return 0 if side else min(self.sides())

    @contextmanager
    def starved(self, side: str | None) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if side:
                none = np.empty(0, dtype=np.int64)
                patch.setattr(
                    getattr(self.real, side), "next_pages", lambda count: None if count else none
                )
            yield

    def slots(self) -> dict[int, int]:
        """The window page of each page on the device; fails unless it holds its tokens in order."""
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

    @rule(data=st.data())
    def leave_window(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(1, PAGES), max_size=4, unique=True))
        before = ledger_state(self.real)
        if all(self.window[page] for page in pages):
            self.real.free_swa_pages(pages)
            self.drop_window(Counter(pages))
            return
        with pytest.raises(ValueError, match="double free of the window slots"):
            self.real.free_swa_pages(pages)
        assert ledger_state(self.real) == before

    @rule()
    def group_begins_or_ends(self) -> None:
        super().group_begins_or_ends()
        self.held_swa = set()

    @invariant()
    def window_equals_the_model(self) -> None:
        every = range(1, PAGES + 1)
        assert self.real.swa_ref_counts(every).tolist() == [self.window[page] for page in every]
        sizes = self.real.full.available_size(), self.real.swa.available_size()
        assert sizes == tuple(side * self.ps for side in self.sides())
        mapped = {page: slot for page, slot in self.slots().items() if slot}
        assert len(set(mapped.values())) == len(mapped)
        assert all(mapped.get(page) == self.slot[page] for page in +self.window)
        if self.held is None:
            assert set(mapped) == set(+self.window)


TestLedger = pytest.mark.soak(LedgerMachine.TestCase)
TestLedger.settings = settings(max_examples=rounds(100, 3000), stateful_step_count=30)
TestSWA = pytest.mark.soak(SWAMachine.TestCase)
TestSWA.settings = settings(max_examples=rounds(100, 3000), stateful_step_count=30)


# ---------------------------------------------------------------- by worked steps


def one(pages: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, DEVICE)


def two(pages: int, swa_pages: int, page_size: int) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages * page_size, swa_pages * page_size, page_size, DEVICE)


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("full")


def three_pages() -> PagedTokenToKVPoolAllocator:
    return one(3, 4)


def three_of_four_pages() -> SWATokenToKVPoolAllocator:
    """The first of them has left the window."""
    allocator = two(4, 4, 2)
    allocator.alloc(6)
    allocator.free_swa_pages([1])
    return allocator


MISTAKES: list[tuple[Callable[[], Any], Callable[[Any], object], str]] = [
    (three_pages, lambda a: a.alloc(3), "multiple of page_size 4"),
    (three_pages, lambda a: a.alloc(-4), "multiple of page_size 4"),
    (three_pages, lambda a: a.alloc_pages(-1), "count >= 0"),
    (three_pages, lambda a: a.alloc_extend([2], [1], [5], -1), "can't go from 2 to 1 tokens"),
    (three_pages, lambda a: a.alloc_extend([-4], [1], [-1], 5), "can't go from -4"),
    (three_pages, lambda a: a.alloc_extend([2], [3], [6], 1), "last_loc 6"),
    (
        three_pages,
        lambda a: a.alloc_extend([2], [3], [5], 1),
        "last_loc is in page 1, which is free",
    ),
    (
        three_pages,
        lambda a: a.alloc_extend([0], [3], [-1], 2),
        "extend_num_tokens is 2, but the lengths grow by 3",
    ),
    (three_pages, lambda a: a.alloc_extend([0, 0], [3], [-1], 3), "2 prefix_lens, 1 seq_lens"),
    (
        three_pages,
        lambda a: a.alloc_extend([0.5], [3], [-1], 3),
        "prefix_lens must be one-dimensional integers",
    ),
    (three_pages, lambda a: a.alloc_decode([[1]], [-1]), "one-dimensional"),
    (three_pages, lambda a: a.alloc_decode([0], [-1]), "can't go from -1"),
    (
        three_pages,
        lambda a: a.alloc_decode(torch.empty(1, device="meta"), [-1]),
        "the ledger is on the CPU",
    ),
    (three_pages, lambda a: a.share([0]), "page 0 was never issued"),
    (three_pages, lambda a: a.free([2]), "page 0 is padding"),
    (three_pages, lambda a: a.free([-1]), "never issued"),
    (three_pages, lambda a: a.free_pages([4]), "page 4 was never issued: pages are 1..3"),
    (three_of_four_pages, lambda a: a.free([4, 5, 4]), "double free of token 4"),
    (
        three_of_four_pages,
        lambda a: a.free_swa_pages([2, 3, 2]),
        "double free of the window slots of page 2: 1 owner",
    ),
    (three_of_four_pages, lambda a: a.free_swa_pages([0]), "page 0 was never issued"),
    (three_of_four_pages, lambda a: a.free_swa_pages([4]), "window slots of page 4"),
    (
        three_of_four_pages,
        lambda a: a.alloc_decode([2], [2]),
        "page 1, whose window slots were freed",
    ),
    (three_of_four_pages, lambda a: a.alloc_decode([2], [8]), "page 4, which is free"),
]


@pytest.mark.parametrize("grouped", [False, True])
def test_mistakes_raise_and_change_nothing(grouped: bool) -> None:
    for make, call, message in MISTAKES:
        allocator = make()
        if grouped:
            allocator.free_group_begin()
        before = ledger_state(allocator)
        with pytest.raises(ValueError, match=message):
            call(allocator)
        assert ledger_state(allocator) == before, message
        allocator.check_integrity()


@pytest.mark.parametrize(("size", "page_size"), [(0, 4), (7, 4), (8, 0), (4, 8)])
def test_sizes_must_be_whole_pages(size: int, page_size: int) -> None:
    two_pools = SWATokenToKVPoolAllocator
    for kind, sizes in (
        (PagedTokenToKVPoolAllocator, (size,)),
        (two_pools, (size, 8)),
        (two_pools, (8, size)),
    ):
        with pytest.raises(ValueError, match="multiple of page_size"):
            kind(*sizes, page_size, DEVICE)  # type: ignore[arg-type]


def test_a_failing_device_leaves_the_ledgers_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    single, allocator = one(3, 4), two(4, 3, 2)
    single.alloc(12)
    single.free_pages([2])
    single.free_pages([1])
    allocator.alloc(4)
    before = [ledger_state(each) for each in (single, allocator)]
    calls: list[tuple[str, Callable[[Any], object], Any]] = [
        ("paged.expand_pages", single.alloc, 8),
        ("paged.expand_pages", allocator.alloc, 2),
        ("windows.to_device", allocator.free, [2, 3, 4, 5]),
        ("windows.to_device", allocator.free_swa_pages, [1, 2]),
        ("windows.to_device", allocator.alloc, 2),
    ]
    for where, call, argument in calls:
        with monkeypatch.context() as patch:
            patch.setattr(f"kvcache.allocators.{where}", fail)
            with pytest.raises(torch.OutOfMemoryError):
                call(argument)
        assert [ledger_state(each) for each in (single, allocator)] == before
        single.check_integrity()
        allocator.check_integrity()
    allocator.free_group_begin()
    allocator.free([2])
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.allocators.windows.to_device", fail)
        with pytest.raises(torch.OutOfMemoryError):
            allocator.free_group_end()
    allocator.check_integrity()
    allocator.free_group_end()
    assert allocator.swa.available_pages == 2
    allocator.check_integrity()


class LosesPages(PagedTokenToKVPoolAllocator):
    def _give_back(self, pages: Int64Array) -> None:
        pass


def drop(page: int, times: int) -> Callable[[PagedTokenToKVPoolAllocator], None]:
    """Owners that the page may not have; a page without owners is freed again."""
    return lambda allocator: allocator.drop(np.array([page]), np.array([times]))


@pytest.mark.parametrize(
    ("make", "harm"),
    [
        (lambda: LosesPages(12, 4, DEVICE), drop(1, 1)),
        (lambda: one(3, 4), drop(1, 2)),
        (lambda: one(3, 4), drop(2, 0)),
        (lambda: one(3, 4), lambda a: (drop(2, 0)(a), a.alloc_pages(1))),  # owned and free
        (lambda: one(3, 4), drop(0, 0)),
        (lambda: two(3, 3, 2), lambda a: a.full_to_swa_index_mapping[3].zero_()),
        (lambda: two(3, 3, 2), lambda a: a.full_to_swa_index_mapping[0].fill_(2)),
        (lambda: two(3, 3, 2), lambda a: a.swa.alloc_pages(1)),  # a window page without a full page
        (lambda: two(3, 3, 2), lambda a: a.swa.free_pages([1])),  # or the reverse
        (lambda: two(3, 3, 2), lambda a: a.swa.share([1])),  # more window owners than owners
    ],
)
def test_check_integrity_sees_damage(
    make: Callable[[], KVAllocator], harm: Callable[[KVAllocator], object]
) -> None:
    allocator = make()
    allocator.alloc(4)
    allocator.check_integrity()
    harm(allocator)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_freeing_does_not_look_at_the_whole_pool() -> None:
    """The same frees in a pool 4,096 times as large: reading all of it once a free would take over
    1,000 times as long as a free does.
    """

    def seconds(size: int) -> float:
        allocator = TokenToKVPoolAllocator(size, DEVICE)
        allocator.alloc_pages(512)
        tokens = iter(range(1, 513))
        # of this thread's CPU: others may be busy
        return min(
            repeat(
                lambda: allocator.free([next(tokens)]), timer=time.thread_time, number=128, repeat=4
            )
        )

    assert seconds(2**22) < 20 * seconds(2**10)


# ---------------------------------------------------------------- nothing waits for the kernels
# under way

TOKENS = 64 * 1024  # ids of half a MiB: CUDA takes 64 KiB from pageable memory without waiting


@pytest.mark.gpu
@pytest.mark.parametrize("window", [False, True])
def test_alloc_extend_does_not_wait(window: bool) -> None:
    allocator = two(4 * TOKENS, 4 * TOKENS, 1) if window else one(4 * TOKENS, 1)

    def run() -> None:
        assert allocator.alloc_extend([0], [TOKENS], [-1], TOKENS) is not None

    run()  # compiles
    check_no_wait(run)


@pytest.mark.gpu
def test_extend_and_a_copy_on_write_do_not_wait() -> None:
    pool = make_pool(4 * TOKENS, 16)
    manager = BlockManager(ReqToTokenPool(4, 2 * TOKENS, DEVICE), one(pool.size // 16, 16), pool)

    def run() -> None:
        parent = manager.admit()
        assert parent is not None and manager.extend([parent], [TOKENS + 3]) is not None
        child = manager.fork(parent)
        assert child is not None and manager.extend([parent, child], [TOKENS + 4] * 2) is not None
        manager.release(parent)
        manager.release(child)

    run()  # compiles
    check_no_wait(run)
