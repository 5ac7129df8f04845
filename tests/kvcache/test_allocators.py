"""Page ledgers of one pool and of two pools, against a dict from page to number of owners.

Worked examples cover invalid pages, failing devices, cost and waiting.
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
    """Operations of every ledger, against a count of owners per page."""

    real: KVAllocator

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 7]))
    def build(self, page_size: int) -> None:
        self.start(PagedTokenToKVPoolAllocator(PAGES * page_size, page_size, DEVICE))

    def start(self, real: KVAllocator) -> None:
        self.real, self.ps = real, real.page_size
        self.owners: Counter[int] = Counter()
        self.open = PAGES  # the last page that may be allocated
        # Arrays that `alloc_pages` returned, and their content at that time.
        self.issued: list[tuple[Int64Array, list[int]]] = []

    def left(self) -> int:
        """Return the number of pages that can be allocated."""
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
        all_pages = range(1, PAGES + 1)
        assert self.real.ref_counts(all_pages).tolist() == [self.owners[page] for page in all_pages]
        assert self.real.available_pages == self.left()
        assert all(pages.tolist() == content for pages, content in self.issued)


class SWAMachine(LedgerMachine):
    """Further operations of a ledger of two pools."""

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
        """Read each page's window page from the device; fail unless its tokens are in order."""
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
        """Drop owners whose window has passed the page first."""
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
        all_pages = range(1, PAGES + 1)
        counts = self.real.swa_ref_counts(all_pages).tolist()
        assert counts == [self.window[page] for page in all_pages]
        assert (self.real.full.available_pages, self.real.swa.available_pages) == self.sides()
        mapped = {page: slot for page, slot in self.slots().items() if slot}
        assert len(set(mapped.values())) == len(mapped)
        assert all(mapped.get(page) == self.slot[page] for page in +self.window)
        assert set(mapped) == set(+self.window)


TestLedger = pytest.mark.soak(LedgerMachine.TestCase)
TestLedger.settings = settings(max_examples=rounds(30, 3000), stateful_step_count=30)
TestSWA = pytest.mark.soak(SWAMachine.TestCase)
TestSWA.settings = settings(max_examples=rounds(30, 3000), stateful_step_count=30)


# ---------------------------------------------------------------- worked examples


def one(pages: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(pages * page_size, page_size, DEVICE)


def two(pages: int, swa_pages: int, page_size: int) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(pages * page_size, swa_pages * page_size, page_size, DEVICE)


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("pages", [[0], [-1], [4], [[1]], [0.5]])
def test_share_refuses_pages_that_do_not_exist(pages: Any) -> None:
    with pytest.raises(AssertionError):
        one(3, 4).share(pages)


def test_device_failure_leaves_both_ledgers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Return a function that drops more owners of a page than `free_pages` allows."""
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
def test_check_integrity_detects_damage(
    harm: Callable[[SWATokenToKVPoolAllocator], object],
) -> None:
    allocator = two(3, 3, 2)
    allocator.alloc_pages(2)
    allocator.check_integrity()
    harm(allocator)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_cost_of_freeing_does_not_depend_on_pool_size() -> None:
    """Compare with a pool of 4,096 times the size, whose scan would take 1,000 times as long."""

    def seconds(size: int) -> float:
        allocator = one(size, 1)
        allocator.alloc_pages(512)
        pages = iter(range(1, 513))

        def free() -> None:
            allocator.free_pages([next(pages)])

        # CPU time of this thread, because the machine may be busy.
        return min(repeat(free, timer=time.thread_time, number=128, repeat=4))

    assert seconds(2**22) < 20 * seconds(2**10)


# ---------------------------------------------------------------- waiting for the device

TOKENS = 64 * 1024  # half a MiB of slots; CUDA copies up to 64 KiB of pageable memory directly


def check_no_wait(run: Callable[[], object]) -> None:
    """Raise AssertionError or RuntimeError if `run`, warmed up before, waits for a busy device."""
    if not torch.cuda.is_available():  # there is no device to wait for
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
    assert not awake.query(), "the call returned after the device had finished, so it waited"
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_extend_with_copy_on_write_does_not_wait_for_the_device() -> None:
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
