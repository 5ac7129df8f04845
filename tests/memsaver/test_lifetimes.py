"""Threads, forks, finalizers and a missing compiler must not crash a process.

Exits of a process are in compat/test_misuse.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import mmap
import operator
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import memsaver
from memsaver.memory.backend import dlpack_tensor
from memsaver.memory.memfd import HostBackend
from memsaver.native import build
from memsaver.system.libc import libc
from memsaver.system.threads import workers
from tests.helpers.memory import memfd_bytes, uncollected
from tests.helpers.memsaver.prefetches import gated
from tests.helpers.memsaver.savers import MIB, ROOT, at_once, until
from tests.helpers.peers import Peer

MAP_FIXED_NOREPLACE = 0x100000


class Keeper:
    """An object that a tensor keeps alive."""


def _exits(child: Callable[[], object]) -> int:
    """Return how a forked child ends that runs a function: 0, 1, or minus a signal's number."""
    if not (pid := os.fork()):
        status = 1
        with contextlib.suppress(BaseException):
            child()
            status = 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_is_inert_and_holds_no_memory() -> None:
    saver = memsaver.MemorySaver("cpu")
    with saver.region("a"):
        a = torch.ones(100000)
    b = saver.empty(1000, tag="b").fill_(3)

    def child() -> None:
        nonlocal a, b
        assert not memfd_bytes([os.getpid()])
        del a, b
        gc.collect()
        with pytest.raises(memsaver.StateError, match="forked child"):
            saver.pause("a")

    assert _exits(child) == 0
    assert memfd_bytes([os.getpid()])
    assert a.sum() == 100000 and b.sum() == 3000
    saver.check_integrity()


def test_forked_child_crashes_on_its_parents_memory_whatever_it_maps_itself() -> None:
    saver = memsaver.MemorySaver("cpu")
    own = saver.empty(9 * MIB, torch.uint8, tag="own").fill_(1)
    saved = saver.empty(3 * MIB, torch.uint8, tag="saved", content="host").fill_(2)
    grown = [saver.empty(n * MIB, torch.uint8, tag="grown").fill_(n) for n in (1, 5, 2)]
    saver.pause("saved")
    kept = [piece.address for piece in saver.pinned_arena.take(2 * MIB)]
    with memsaver.attach(saver.share("own")) as lease:
        leased = lease.tensor((9 * MIB,), torch.uint8)
        places = [t.data_ptr() + at for t in (own, leased, *grown) for at in (0, t.nbytes - 1)]
        for place in (*places, saved.data_ptr(), *kept):

            def child(place: int = place) -> None:
                faulthandler.disable()
                mine = [mmap.mmap(-1, n << 12) for n in (*range(1, 300), *[256] * 40)]
                ctypes.string_at(place, 1)
                assert mine

            assert _exits(child) == -signal.SIGSEGV, place
    assert own.sum() == 9 * MIB


def test_forked_child_does_not_deadlock_on_lock_of_another_thread() -> None:
    # A deadlocked child is ended by its alarm.
    saver = memsaver.MemorySaver("cpu")
    saver.empty(1000, tag="a")
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            saver.report()
            saver.empty(1000, tag="a")

    def child() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        saver.report()
        with contextlib.closing(memsaver.MemorySaver("cpu")) as own:
            own.empty(1000, tag="a").fill_(1)
            own.report()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert [_exits(child) for _ in range(6)] == [0] * 6
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_child_forked_during_attach_and_inside_region_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another thread holds the lock of the connections at the fork.
    saver = memsaver.MemorySaver("cpu")
    tensor = saver.empty(MIB, torch.uint8, content="host").fill_(7)
    ticket = saver.share("default")
    lease = memsaver.attach(ticket)
    held, leave = threading.Event(), threading.Event()

    class Stays(socket.socket):
        """Socket whose connect blocks, as with a stopped owner."""

        def connect(self, address: object) -> None:
            held.set()
            leave.wait()
            super().connect(address)

    def child() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        monkeypatch.undo()
        with memsaver.attach(ticket) as own:
            assert bool((own.tensor((MIB,), torch.uint8) == 7).all())
        assert torch.ones(1000).sum() == 1000, "on no tag"
        saver.report()

    monkeypatch.setattr(socket, "socket", Stays)
    other = dataclasses.replace(ticket, socket_name="unknown")
    thread = threading.Thread(target=_refused, args=[other])
    try:
        thread.start()
        assert held.wait(20)
        with saver.region("a"):
            torch.ones(10)
            assert _exits(child) == 0
            inside = torch.ones(10)
        assert saver.tag_of(inside) == "a"
    finally:
        leave.set()
        thread.join()
    lease.close()
    del tensor


def _refused(ticket: memsaver.Ticket) -> None:
    with pytest.raises(memsaver.LeaseError):
        memsaver.attach(ticket)


def test_child_forked_inside_region_can_leave_it() -> None:
    saver = memsaver.MemorySaver("cpu")

    def child() -> None:
        region.__exit__(None, None, None)
        with memsaver.MemorySaver("cpu").region("b"):
            assert torch.ones(1000).sum() == 1000

    region = saver.region("a")
    region.__enter__()
    assert _exits(child) == 0
    region.__exit__(None, None, None)
    saver.pause("a")


def test_forked_child_refuses_to_wait_for_prefetch() -> None:
    saver = memsaver.MemorySaver("cpu")
    tensor = saver.empty(MIB, torch.uint8, content="host").fill_(7)
    saver.pause()
    with gated(saver) as gate:
        prefetch = saver.begin_resume()

        def child() -> None:
            signal.alarm(20)
            for wait in (prefetch.wait, partial(prefetch.wait, [tensor]), saver.resume):
                with pytest.raises(memsaver.StateError, match="forked child"):
                    wait()

        assert _exits(child) == 0
        gate.let(1)
        prefetch.wait()
    assert bool((tensor == 7).all())


@pytest.mark.parametrize("how", ["close", "drop"])
def test_forked_child_keeps_mapping_made_at_parents_addresses(how: str) -> None:
    savers = [memsaver.MemorySaver("cpu")]
    tensor = savers[0].empty(64 * MIB, torch.uint8)
    first = tensor.data_ptr()
    del tensor  # the tag keeps the memory

    def child() -> None:
        libc().munmap(first, 64 * MIB)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        start = libc().mmap(first, 64 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert start == first, "the addresses are in use"
        ctypes.memset(start, 7, 64 * MIB)
        savers[0].close() if how == "close" else savers.clear()
        gc.collect()
        assert ctypes.string_at(start + 64 * MIB - 1, 1) == b"\7"

    assert _exits(child) == 0


def test_saver_dropped_in_forked_child_keeps_parents_listener() -> None:
    savers = [memsaver.MemorySaver("cpu")]
    tensors = [savers[0].empty(100, torch.uint8).fill_(7)]
    ticket = savers[0].share("default")

    def child() -> None:
        savers.clear()
        tensors.clear()
        gc.collect()

    assert _exits(child) == 0
    with memsaver.attach(ticket) as lease:
        assert int(lease.tensor((100,), torch.uint8).sum()) == 700


def test_region_tensor_that_outlives_its_saver_releases_memory_and_slot() -> None:
    held = memfd_bytes([os.getpid()])
    gc.freeze()  # collections below then look at the objects of this test only
    for number in range(300):  # there are 256 slots
        saver = memsaver.MemorySaver("cpu", reserve_bytes=MIB)
        with saver.region("a"):
            tensor = torch.ones(1000)
        del saver
        gc.collect()
        assert float(tensor.sum()) == 1000
        assert number % 10 or memfd_bytes([os.getpid()]) > held  # reads all maps
        del tensor
        gc.collect()
        assert number % 10 or memfd_bytes([os.getpid()]) == held


def test_slot_of_closed_saver_is_reused_after_last_tensor_dies() -> None:
    gc.collect()
    gc.freeze()
    for _ in range(300):
        saver = memsaver.MemorySaver("cpu", reserve_bytes=MIB)
        with saver.region("a"):
            tensor = torch.ones(1000)
        saver.close()
        del saver, tensor
        gc.collect()


def _without_a_compiler(pipe: Connection, cache: Path) -> None:
    """Use a saver in a process that has not loaded the shim or entered a region."""
    os.environ |= {"PATH": "", "XDG_CACHE_HOME": str(cache)}
    saver = memsaver.MemorySaver("cpu")
    saver.empty(10).fill_(1)
    with pytest.raises(memsaver.CompilerError, match=r"install g\+\+"), saver.region("a"):
        pass
    saver.pause()
    pipe.send("paused")


def test_region_needs_compiler_but_empty_does_not(tmp_path: Path) -> None:
    (tmp_path / "memsaver").mkdir()
    shutil.copy(build.shim_library(), tmp_path / "memsaver")
    peer = Peer(_without_a_compiler, tmp_path)
    assert peer.hear() == "paused"
    peer.bury()


def test_compiling_without_a_writable_cache_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(memsaver.CompilerError, match=r"/dev/null/memsaver .* set XDG_CACHE_HOME"):
        build.cpu_hook_library()


def test_concurrent_regions_and_frees_from_other_threads(device: str) -> None:
    saver = memsaver.MemorySaver(device)

    def work(name: str) -> None:
        for step in range(30):
            with saver.region(name):
                pieces = [torch.full((1000 + 64 * step,), step, device=device) for _ in range(5)]
            assert all(int(piece[0]) == step for piece in pieces)
            saver.pause(name)
            handed = threading.Thread(target=pieces.clear)
            handed.start()
            handed.join()
            saver.resume(name)

    at_once(*(partial(work, f"tag{n}") for n in range(3)))
    if device != "cpu":
        torch.cuda.empty_cache()
    saver.check_integrity()
    assert sum(tag.live_bytes for tag in saver.report().tags.values()) == 0


def _first_regions(pipe: Connection) -> None:
    """Enter the first regions of a process in several threads."""
    saver, start = memsaver.MemorySaver("cpu"), threading.Barrier(8)

    def work(n: int) -> None:
        start.wait()
        with saver.region(f"tag{n}"):
            torch.ones(100)

    at_once(*(partial(work, n) for n in range(8)))
    pipe.send(int(torch.ones(100).sum()))


def test_hook_is_installed_once_by_concurrent_first_regions() -> None:
    peer = Peer(_first_regions)
    assert peer.hear() == 100
    peer.bury()


def test_dlpack_tensor_releases_its_keeper_when_an_exception_unwinds() -> None:
    # A Ctrl-C in the middle of an expression has this effect.
    buffer = torch.arange(8, dtype=torch.uint8)
    keeper = Keeper()
    gone = weakref.ref(keeper)
    window = dlpack_tensor(buffer.data_ptr(), 8, buffer.device, keeper)
    del keeper
    assert gone() and window.tolist() == list(range(8))
    with pytest.raises(ZeroDivisionError):
        dlpack_tensor(buffer.data_ptr(), 8, buffer.device, None).add(1 // 0)
    view = window[5:]
    del window
    assert gone() and view.tolist() == [5, 6, 7]
    del view
    assert gone() is None


class ThreadedCopies(HostBackend):
    """A backend that copies in a thread, like the backend of a GPU."""

    def copy_overlapped(self, transfers: Any, keeper: object, done: Any) -> None:
        work = workers("beside", 1).submit(self.feed, [transfers], lambda _: None, False)
        self._overlapped.append(work)

    def synchronize(self, copies: bool = True) -> None:
        if copies:
            wait(self._overlapped, 20)
        super().synchronize()


class Owner:
    """Owner of a saver, in a reference cycle with itself."""

    def __init__(self, device: str) -> None:
        self.me = self
        self.saver = memsaver.MemorySaver(device)
        self.params = self.saver.empty(MIB, torch.uint8, tag="params", content="host").fill_(1)
        self.kv = self.saver.empty(MIB, torch.uint8, tag="kv_cache")


def test_saver_collected_by_its_copying_thread_is_released_after_the_copy(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The finalizers run in that thread, and must not release memory that is being copied.
    monkeypatch.setattr("memsaver.memory.HostBackend", ThreadedCopies)
    go, copied = threading.Event(), list[int]()
    with uncollected():
        owner = Owner(device)
        backend = owner.saver.backend
        feed = backend.feed

        def collecting(*args: Any, **named: Any) -> None:
            assert go.wait(20)
            gc.collect()
            copied.append(backend.committed_bytes)
            feed(*args, **named)

        monkeypatch.setattr(backend, "feed", collecting)
        owner.saver.save("params", 1)
        gone = weakref.ref(owner)
        del owner
        go.set()
        workers("beside", 1).submit(int).result(30)  # runs after the copy
    assert gone() is None and copied[0] >= 2 * MIB
    until(lambda: not backend.committed_bytes)


def _in_a_region(saver: memsaver.MemorySaver, tag: str) -> Iterator[None]:
    with saver.region(tag):
        yield


def _elsewhere(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result(60)


@pytest.mark.parametrize("by", ["thread", "collector"])
def test_region_left_by_another_thread_ends_for_the_entering_thread(by: str, device: str) -> None:
    # Another thread closes a generator inside a region, or its garbage collector does.
    saver = memsaver.MemorySaver(device)
    steps = _in_a_region(saver, "a")
    next(steps)
    inside = torch.ones(1000, device=device)
    if by == "thread":
        _elsewhere(steps.close)
    else:
        cycle: list[object] = [steps]
        cycle.append(cycle)
        del steps, cycle
        _elsewhere(gc.collect)
    outside = torch.ones(1000, device=device)
    assert saver.tag_of(inside) == "a"
    with pytest.raises(memsaver.TagError):
        saver.tag_of(outside)
    saver.pause("a")
    assert outside.sum() == 1000
    with saver.region("b"):
        assert saver.tag_of(torch.ones(1000, device=device)) == "b"
    saver.resume()
    saver.close()


def test_innermost_open_region_applies_after_regions_end_in_any_order(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    regions = {tag: _in_a_region(saver, tag) for tag in "abc"}
    for steps in regions.values():
        next(steps)

    def tag() -> str | None:
        with contextlib.suppress(memsaver.TagError):
            return saver.tag_of(torch.ones(1000, device=device))
        return None

    assert tag() == "c"
    regions["b"].close()
    assert tag() == "c"
    regions["c"].close()
    assert tag() == "a"
    regions["a"].close()
    assert tag() is None
    saver.pause()
    saver.close()


def test_interpreter_exits_silently_with_living_savers() -> None:
    code = """
import gc, os, sys, torch, memsaver
from memsaver.memory import host_memory
class Owner: pass
owner = Owner()
owner.me, owner.saver = owner, memsaver.MemorySaver()
owner.tensor = owner.saver.empty(1 << 20, torch.uint8, tag="a", content="disk")
owner.saver.pause()
owner.memory = host_memory(1 << 21, torch.device("cpu"), "it", "ask for less")
gc.disable()
if not (child := os.fork()):
    sys.exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert (ended.returncode, ended.stderr) == (0, "")


class Hit(BaseException):
    """Exception that arrives at any instruction, like KeyboardInterrupt."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_at_first_instruction_of_finalizer_loses_no_memory() -> None:
    saver = memsaver.MemorySaver("cpu")
    box, interrupted = [saver.empty(MIB, torch.uint8, tag="a")], []

    def handler(number: int, frame: FrameType) -> None:
        interrupted.append(frame.f_code.co_filename)
        raise Hit

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        # Both steps run in C: the finalizer's first instruction is Python's next one.
        steps = [partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGUSR1), box.clear]
        deque(map(operator.call, steps), maxlen=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(interrupted) == 1 and interrupted[0] != __file__
    saver.trim()
    assert saver.report().tags["a"].live_bytes == 0
