"""The arena of saved content: pieces never overlap, no memory is lost, the budget holds."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaver import BackendError, HostMemoryError, MemorySaver
from memsaver.content.on_host import HostBackup
from memsaver.memory import pinned_arena
from memsaver.memory.pinned_arena import HUGE_PAGE, UNIT, PinnedArena, PinnedPiece
from tests.helpers.memsaver.savers import until

MIB = 1 << 20


class Pinned:
    """Pinner that only records the ranges."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        self.ranges[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.ranges[address]


def resident() -> int:
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(field[1]) * 1024 for field in fields if field[0] == "RssAnon:")


@pytest.mark.parametrize("segment", [HUGE_PAGE, 1 << 30])
@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "give", "trim", "reserve", "stop"]),
            st.integers(1, 3 * HUGE_PAGE),
        )
    )
)
def test_pieces_never_overlap_and_no_memory_is_lost(
    segment: int, steps: list[tuple[str, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_arena, "SEGMENT", segment)
        _check_steps(steps)


class Owner:
    """Owner of a reservation, such as a saver."""


def nothing() -> None:
    pass


def _check_steps(steps: list[tuple[str, int]]) -> None:
    arena, held = PinnedArena(Pinned(), budget_bytes=16 * MIB), []
    owners = Owner(), Owner()
    for step, number in steps:
        if step == "take":
            try:
                held.append((arena.take(number), number))
            except HostMemoryError as error:
                assert arena.committed_bytes + error.requested_bytes > 16 * MIB
        elif step == "give" and held:
            arena.give(held.pop(number % len(held))[0])
        elif step == "trim":
            arena.trim()
        elif step == "reserve":  # continues during the next steps
            arena.reserve(owners[number % 2], {"tag": 2 * number}, nothing)
        elif step == "stop":
            arena.stop()
        pieces = sorted(piece for taken, _ in held for piece in taken)
        assert all(a.address + a.nbytes <= b.address for a, b in itertools.pairwise(pieces))
        assert all(
            sum(p.nbytes for p in taken) == -(-number // UNIT) * UNIT for taken, number in held
        )
        assert (
            arena.used_bytes
            == sum(piece.nbytes for piece in pieces)
            <= arena.committed_bytes
            <= 16 * MIB
        )
        for piece in pieces:
            ctypes.memset(piece.address, 1, piece.nbytes)
    for taken, _ in held:
        arena.give(taken)
    arena.trim()
    assert (arena.used_bytes, arena.committed_bytes) == (0, 0)


class SlowlyPinned(Pinned):
    """Pinner that pins `at_once` ranges, and waits for a permit before each of the others."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.permits, self.begun = threading.Semaphore(at_once), threading.Semaphore(0)

    def pin(self, address: int, nbytes: int) -> None:
        self.begun.release()
        assert self.permits.acquire(timeout=20)
        super().pin(address, nbytes)


def test_take_waits_for_reserved_memory_and_obtains_none_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned_arena, "SEGMENT", HUGE_PAGE)
    pinned, bound = SlowlyPinned(2), list[int]()
    arena = PinnedArena(pinned)
    owner, bind = Owner(), lambda: bound.append(threading.get_ident())
    arena.reserve(owner, {"tag": 6 * HUGE_PAGE}, bind)
    first = arena.take(2 * HUGE_PAGE)  # two ranges are pinned
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(arena.take, 4 * HUGE_PAGE)
        assert arena.committed_bytes == 2 * HUGE_PAGE and not taking.done()
        arena.reserve(owner, {"tag": 4 * HUGE_PAGE}, nothing)  # is being obtained
        pinned.permits.release(20)
        rest = taking.result(20)
    assert arena.used_bytes == arena.committed_bytes == 6 * HUGE_PAGE == sum(pinned.ranges.values())
    assert len(bound) == 6 and threading.get_ident() not in bound
    arena.give([*first, *rest])
    arena.reserve(owner, {"tag": 6 * HUGE_PAGE}, nothing)
    assert arena.trim() == 6 * HUGE_PAGE and not pinned.ranges


def test_reservations_of_several_owners_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each tag of an owner once, until the owner has stopped or is gone.

    Memory that was taken without a reservation leaves no room for reservations.
    """
    monkeypatch.setattr(pinned_arena, "SEGMENT", HUGE_PAGE)
    arena, first, second = PinnedArena(Pinned()), Owner(), Owner()

    def pages(owner: Owner, **sizes: int) -> int:
        arena.reserve(owner, {tag: size * HUGE_PAGE for tag, size in sizes.items()}, nothing)
        until(lambda: not arena.coming_bytes)
        return arena.committed_bytes // HUGE_PAGE

    assert pages(first, params=3, optim=2) == 5 == pages(first, params=3, optim=2)
    assert pages(second, weights=4) == 9, "the first owner's free pages are reserved"
    taken = arena.take(5 * HUGE_PAGE)
    assert pages(first, params=2) == 9 == pages(second, weights=4)
    unreserved = arena.take(4 * HUGE_PAGE)
    assert pages(second, weights=4) == 13
    arena.stop(first)
    arena.give([*taken, *unreserved])
    assert pages(second, weights=13) == 13
    del second
    gc.collect()
    assert pages(first, params=13) == 13
    assert arena.trim() == 13 * HUGE_PAGE
    assert pages(first, optim=1) == 1, "released memory is not reserved any more"
    arena.trim()


def test_stop_of_one_owner_keeps_the_reservation_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wait for no segment of the other owner."""
    monkeypatch.setattr(pinned_arena, "SEGMENT", HUGE_PAGE)
    pinned, first, second = SlowlyPinned(0), Owner(), Owner()
    arena = PinnedArena(pinned)
    arena.reserve(first, {"tag": 20 * HUGE_PAGE}, nothing)
    assert pinned.begun.acquire(timeout=20)
    arena.reserve(second, {"tag": 20 * HUGE_PAGE}, nothing)
    arena.stop(Owner())  # has no reservation
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(arena.stop, second)
        pinned.permits.release(20)
        stopping.result(20)
    until(lambda: not arena.coming_bytes)
    assert 20 * HUGE_PAGE <= arena.committed_bytes < 40 * HUGE_PAGE
    arena.stop(first)
    arena.trim()


@pytest.mark.parametrize("kept", [False, True], ids=["paused", "clean copy"])
def test_saved_content_of_a_tag_is_not_reserved_again(kept: bool) -> None:
    """Reserve like a second `Cycle` over a rollout that sleeps at level 1."""
    saver = MemorySaver()
    saver.pinned_arena.trim()
    before = saver.pinned_arena.committed_bytes
    tensor = saver.empty(32 * MIB, torch.uint8, tag="weights", content="host").fill_(7)
    if kept:
        saver.save("weights", 1)
    else:
        saver.pause()
    held = saver.pinned_arena.committed_bytes
    saver.reserve_host({"weights": 32 * MIB})
    assert not saver.pinned_arena.coming_bytes and saver.pinned_arena.committed_bytes == held
    saver.reserve_host({"weights": 40 * MIB})
    until(lambda: not saver.pinned_arena.coming_bytes)
    assert saver.pinned_arena.committed_bytes <= before + 40 * MIB
    saver.resume()
    del tensor
    saver.close()
    saver.pinned_arena.trim()


def test_stop_cancels_reservation_and_keeps_running_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use the obtained segments in a later `take`, which obtains the rest itself."""
    monkeypatch.setattr(pinned_arena, "SEGMENT", HUGE_PAGE)
    pinned = SlowlyPinned(0)
    arena = PinnedArena(pinned)
    arena.reserve(Owner(), {"tag": 50 * HUGE_PAGE}, nothing)
    assert pinned.begun.acquire(timeout=20)
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(arena.stop)
        assert not stopping.done()
        while not stopping.done():
            pinned.permits.release()
            time.sleep(0.02)
    there = arena.committed_bytes
    assert HUGE_PAGE <= there <= 40 * HUGE_PAGE
    pinned.permits.release(50)
    arena.give(arena.take(there + HUGE_PAGE))
    assert arena.committed_bytes == there + HUGE_PAGE == arena.trim()


def test_refused_reservation_is_raised_by_a_later_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_arena, "SEGMENT", HUGE_PAGE)
    arena = PinnedArena(Pinned(), budget_bytes=8 * MIB)
    arena.reserve(Owner(), {"tag": 10 * MIB}, nothing)
    arena.stop()
    assert arena.committed_bytes == 0
    with pytest.raises(HostMemoryError, match="budget is 8.0 MiB"):
        arena.take(10 * MIB)
    pinned, begun = Pinned(), list[int]()

    def pin(address: int, nbytes: int) -> None:
        begun.append(address)
        raise BackendError("pinning host memory failed: CUDA_ERROR_OUT_OF_MEMORY")

    arena = PinnedArena(pinned)
    monkeypatch.setattr(pinned, "pin", pin)
    arena.reserve(Owner(), {"tag": 40 * HUGE_PAGE}, nothing)
    with pytest.raises(HostMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        arena.take(UNIT)
    assert len(begun) < 10, "the first refusal ends the reservation"
    assert not pinned.ranges and arena.committed_bytes == 0


def test_interpreter_exit_waits_only_for_running_segments() -> None:
    """Exit long before the whole reservation is obtained, which would take 60 s."""
    code = """
import time
from memsaver.memory import pinned_arena
from memsaver.memory.pinned_arena import PinnedArena
from memsaver.memory.pinned_arena import HUGE_PAGE

class Slow:
    def pin(self, address, nbytes): time.sleep(0.3)
    def unpin(self, address): pass

pinned_arena.SEGMENT = HUGE_PAGE
PinnedArena(Slow()).reserve(Slow, {"tag": 400 * HUGE_PAGE}, lambda: None)
print(time.time(), flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0 and not ran.stderr
    assert time.time() - float(ran.stdout) < 30


def test_taken_memory_is_resident_and_reused() -> None:
    pinned = Pinned()
    arena, before = PinnedArena(pinned), resident()
    first = arena.take(64 * MIB)
    assert len(first) == 1 and first[0].address % HUGE_PAGE == 0
    assert resident() - before >= 63 * MIB, "pages are populated before they are used"
    assert list(pinned.ranges.values()) == [64 * MIB]
    arena.give(first)
    assert arena.take(64 * MIB) == first and len(pinned.ranges) == 1
    arena.give(first)
    assert arena.trim() == 64 * MIB and not pinned.ranges
    assert resident() - before < 8 * MIB


def test_refusal_takes_no_memory_and_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PinnedArena(Pinned(), budget_bytes=8 * MIB)
    kept = arena.take(3 * MIB)
    with pytest.raises(
        HostMemoryError, match="budget is 8.0 MiB.*budget_bytes.*nothing was changed"
    ) as caught:
        arena.take(7 * MIB)
    # 1 MiB of the 4 is free, so 6 more are needed, of which 4 are allowed
    assert caught.value.missing_bytes == 2 * MIB
    assert (arena.used_bytes, arena.committed_bytes) == (3 * MIB, 4 * MIB)
    arena.give(kept)


def test_all_users_of_pinned_memory_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin at most 80 of 100 available MiB, for saved content and other users together.

    The test compensates for memory that this process already holds (`before`).
    """
    arena, before = PinnedArena(None), pinned_arena.held_bytes()

    def available() -> int:
        return 100 * MIB + before // 4 - (pinned_arena.held_bytes() - before)

    monkeypatch.setattr(pinned_arena, "available_memory", available)
    (block,) = pinned_arena.obtain([60 * MIB], None)
    with pytest.raises(HostMemoryError, match="20.0 MiB more may be taken"):
        arena.take(22 * MIB)
    arena.give(arena.take(18 * MIB))
    assert pinned_arena.room_bytes() == 2 * MIB
    pinned_arena.give_back(block, 60 * MIB, None)
    assert pinned_arena.room_bytes() == 62 * MIB
    assert arena.trim() == 18 * MIB and pinned_arena.held_bytes() == before


def test_dead_backup_returns_its_pieces() -> None:
    arena = PinnedArena(None)
    backup = HostBackup([(0, 100), (4096, 50)], arena)
    assert backup.nbytes == 150 and arena.used_bytes == UNIT
    view = backup.views(0, 100)[0]
    del backup
    gc.collect()
    assert arena.used_bytes == UNIT, "a tensor still uses the piece"
    del view
    gc.collect()
    assert arena.used_bytes == 0


def test_large_backup_is_pinned_in_parts_and_viewed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_arena, "SEGMENT", 2 * HUGE_PAGE)
    pinned = Pinned()
    arena = PinnedArena(pinned)
    backup = HostBackup([(0, 5 * HUGE_PAGE)], arena)
    assert list(pinned.ranges.values()) == [2 * HUGE_PAGE, 2 * HUGE_PAGE, HUGE_PAGE]
    assert [nbytes for _, _, nbytes in backup.runs()] == list(pinned.ranges.values()), (
        "a copy stays in one part"
    )
    assert [len(view) for view in backup.views(HUGE_PAGE, 3 * HUGE_PAGE)] == [3 * HUGE_PAGE]
    del backup
    gc.collect()
    assert arena.trim() == 5 * HUGE_PAGE and not pinned.ranges


def test_failed_pinning_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_arena, "SEGMENT", 32 * MIB)
    pinned, before = Pinned(), resident()

    def pin(address: int, nbytes: int) -> None:
        if pinned.ranges:
            raise BackendError("pinning host memory failed: CUDA_ERROR_OUT_OF_MEMORY")
        pinned.ranges[address] = nbytes

    arena = PinnedArena(pinned)
    monkeypatch.setattr(pinned, "pin", pin)
    with pytest.raises(
        HostMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY.*content='disk'; nothing was changed"
    ):
        arena.take(96 * MIB)
    assert not pinned.ranges and arena.committed_bytes == 0
    assert resident() - before < 8 * MIB


def test_forked_child_maps_nothing_accessible_at_the_arena() -> None:
    arena = PinnedArena(None)
    piece: PinnedPiece = arena.take(HUGE_PAGE)[0]
    if (pid := os.fork()) == 0:
        maps = Path("/proc/self/maps").read_text().splitlines()
        open_maps = [line for line in maps if line.split()[1] != "---p"]
        ranges = [tuple(int(p, 16) for p in line.split()[0].split("-")) for line in open_maps]
        os._exit(any(start <= piece.address < end for start, end in ranges))
    assert os.waitpid(pid, 0)[1] == 0
    arena.give([piece])


def test_child_forked_during_a_reservation_has_its_own_arena() -> None:
    saver = MemorySaver()
    saver.reserve_host({"t": saver.pinned_arena.committed_bytes + 64 * MIB})
    if (pid := os.fork()) == 0:
        own = MemorySaver()
        tensor = own.empty(MIB, tag="t", content="host").fill_(3)
        own.pause()
        own.resume()
        os._exit(not bool((tensor == 3).all()))
    assert os.waitpid(pid, 0)[1] == 0
    saver.close()  # ends the reservation
