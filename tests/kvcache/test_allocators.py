"""Page ledgers of one pool, and of the two pools of a sliding-window model: against a plain dict
page -> number of owners, where either side may be exhausted; then failing devices.
"""

import time
from collections import Counter
from collections.abc import Callable
from timeit import repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache import BlockManager, KVAllocator, ReqToTokenPool
from kvcache.allocators import Int64Array, PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from tests.helpers.case_selection import rounds
from tests.helpers.kvcache.blocks import DEVICE, ledger_state, make_pool

PAGES = 9
SOME = st.lists(st.integers(1, PAGES), max_size=6)
IDS = [list, lambda ids: np.array(ids, np.int32), lambda ids: torch.tensor(ids, dtype=torch.int64)]


class LedgerMachine(RuleBasedStateMachine):
    """What every ledger does."""

    real: KVAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7]))
    def build(self, page_size: int) -> None:
        self.start(PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, DEVICE))

    def start(self, real: KVAllocator) -> None:
        self.real, self.ps = real, real.page_size
        self.owners: Counter[int] = Counter()
        self.open = PAGES  # the pages up to here are handed out
        # arrays that were handed out, and what was in them
        self.issued: list[tuple[Int64Array, list[int]]] = []

    def left(self) -> int:
        """Pages that can be taken."""
        return self.open - len(+self.owners)

    def take(self, pages: set[int]) -> None:
        assert all(0 < page <= self.open and not self.owners[page] for page in pages)
        self.owners.update(pages)

    def drop(self, times: Counter[int]) -> None:
        self.owners.subtract(times)

    @precondition(lambda self: isinstance(self.real, PagedTokenToKVPoolAllocator))
    @rule(pages=st.integers(0, PAGES), rest=st.integers(0, 3))
    def limit(self, pages: int, rest: int) -> None:
        real = self.real
        assert isinstance(real, PagedTokenToKVPoolAllocator)
        if not any(page > pages for page in +self.owners):
            real.limit(min(PAGES * self.ps, pages * self.ps + min(rest, self.ps - 1)))
            self.open = pages

    @rule(count=st.integers(0, PAGES))
    def alloc(self, count: int) -> None:
        before = ledger_state(self.real)
        got = self.real.alloc_pages(count)
        if count > self.left():
            assert got is None
            assert ledger_state(self.real) == before
            return
        assert got is not None
        pages = got.tolist()
        self.issued.append((got, pages))
        assert len(set(pages)) == count
        self.take(set(pages))

    @rule(pages=SOME)
    def share(self, pages: list[int]) -> None:
        before = ledger_state(self.real)
        if all(self.owners[page] for page in pages):
            self.real.share(pages)
            self.shared(pages)
            return
        with pytest.raises(AssertionError, match="are free"):
            self.real.share(pages)
        assert ledger_state(self.real) == before

    def shared(self, pages: list[int]) -> None:
        self.owners.update(pages)

    @rule(pages=SOME, kind=st.sampled_from(IDS))
    def free(self, pages: list[int], kind: Callable[[list[int]], Any]) -> None:
        before = ledger_state(self.real)
        if all(self.owners[page] >= times for page, times in Counter(pages).items()):
            self.real.free_pages(kind(pages))
            self.drop(Counter(pages))
            return
        with pytest.raises(ValueError, match="double free of pages"):
            self.real.free_pages(pages)
        assert ledger_state(self.real) == before

    @invariant()
    def ledger_equals_the_model(self) -> None:
        self.real.check_integrity()
        every = range(1, PAGES + 1)
        assert self.real.ref_counts(every).tolist() == [self.owners[page] for page in every]
        assert self.real.available_pages == self.left()
        assert all(pages.tolist() == as_they_were for pages, as_they_were in self.issued)


class SWAMachine(LedgerMachine):
    """And what a ledger of two pools does besides."""

    real: SWATokenToKVPoolAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), swa_pages=st.sampled_from([5, 3, PAGES]))
    def build(self, page_size: int, swa_pages: int) -> None:  # type: ignore[override]
        self.swa_pages = swa_pages
        self.window: Counter[int] = Counter()  # owners that have the page in their window
        self.slot: dict[int, int] = {}  # window page of each page, as seen when it was issued
        self.start(
            SWATokenToKVPoolAllocator(PAGES * page_size, swa_pages * page_size, page_size, DEVICE)
        )

    def sides(self) -> tuple[int, int]:
        return super().left(), self.swa_pages - len(+self.window)

    def left(self) -> int:
        return min(self.sides())

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
            assert 0 < slots[page] <= self.swa_pages
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

    @rule(data=st.data())
    def leave_window(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(1, PAGES), max_size=4, unique=True))
        before = ledger_state(self.real)
        if all(self.window[page] for page in pages):
            self.real.free_swa_pages(pages)
            self.drop_window(Counter(pages))
            return
        with pytest.raises(AssertionError, match="double free of window slots"):
            self.real.free_swa_pages(pages)
        assert ledger_state(self.real) == before

    @invariant()
    def window_equals_the_model(self) -> None:
        every = range(1, PAGES + 1)
        assert self.real.swa_ref_counts(every).tolist() == [self.window[page] for page in every]
        assert (self.real.full.available_pages, self.real.swa.available_pages) == self.sides()
        mapped = {page: slot for page, slot in self.slots().items() if slot}
        assert len(set(mapped.values())) == len(mapped)
        assert all(mapped.get(page) == self.slot[page] for page in +self.window)
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


@pytest.mark.parametrize("pages", [[0], [-1], [4], [[1]], [0.5]])
def test_pages_that_do_not_exist_are_refused(pages: Any) -> None:
    with pytest.raises(AssertionError):
        one(3, 4).share(pages)


def test_a_failing_device_leaves_the_ledgers_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = two(4, 3, 2)
    allocator.alloc_pages(2)
    before = ledger_state(allocator)
    calls: list[tuple[Callable[[Any], object], Any]] = [
        (allocator.free_pages, [1, 2]),
        (allocator.free_swa_pages, [1, 2]),
        (allocator.alloc_pages, 1),
    ]
    for call, argument in calls:
        with monkeypatch.context() as patch:
            patch.setattr("kvcache.allocators.to_device", fail)
            with pytest.raises(torch.OutOfMemoryError):
                call(argument)
        assert ledger_state(allocator) == before
        allocator.check_integrity()


def drop(page: int, times: int) -> Callable[[PagedTokenToKVPoolAllocator], None]:
    """Owners that the page may not have; a page without owners is freed again."""
    return lambda allocator: allocator.drop(np.array([page]), np.array([times]))


@pytest.mark.parametrize(
    "harm",
    [
        lambda two: drop(1, 2)(two.full),  # a negative count
        lambda two: drop(3, 0)(two.full),  # a free page, freed again
        lambda two: two.full_to_swa_index_mapping[3].zero_(),
        lambda two: two.swa.alloc_pages(1),  # a window page without a full page
        lambda two: two.swa.free_pages([1]),  # or the reverse
        lambda two: two.swa.share([1]),  # more window owners than owners
    ],
)
def test_check_integrity_sees_damage(harm: Callable[[SWATokenToKVPoolAllocator], object]) -> None:
    allocator = two(3, 3, 2)
    allocator.alloc_pages(2)
    allocator.check_integrity()
    harm(allocator)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_freeing_does_not_look_at_the_whole_pool() -> None:
    """The same frees in a pool 4,096 times as large: reading all of it once a free would take over
    1,000 times as long as a free does.
    """

    def seconds(size: int) -> float:
        allocator = one(size, 1)
        allocator.alloc_pages(512)
        pages = iter(range(1, 513))

        # of this thread's CPU: others may be busy
        def free() -> None:
            allocator.free_pages([next(pages)])

        return min(repeat(free, timer=time.thread_time, number=128, repeat=4))

    assert seconds(2**22) < 20 * seconds(2**10)


# ---------------------------------------------------------------- nothing waits for the kernels
# under way

TOKENS = 64 * 1024  # ids of half a MiB: CUDA takes 64 KiB from pageable memory without waiting


def check_no_wait(run: Callable[[], object]) -> None:
    """AssertionError or RuntimeError if `run` waits for the device, which is kept busy meanwhile.

    Warm it up before.
    """
    if not torch.cuda.is_available():  # nobody to wait for
        run()
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # 0.2 s
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query(), "the call came back after the device was done: it waited"
    torch.cuda.synchronize()


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
