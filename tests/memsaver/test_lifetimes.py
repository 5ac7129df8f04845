"""Threads, forks and a missing compiler: what must not crash a process. (Exits: compat/test_misuse.)"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import memsaver
from memsaver.allocator import build
from tests.helpers.memory import memfd_bytes
from tests.helpers.memsaver.savers import at_once
from tests.helpers.peers import Peer


def test_a_forked_child_is_inert_and_holds_nothing() -> None:
    saver = memsaver.MemorySaver("cpu")
    with saver.region("a"):
        a = torch.ones(100000)
    b = saver.empty(1000, tag="b").fill_(3)
    if not (child := os.fork()):
        code = 1
        with contextlib.suppress(BaseException):
            assert not memfd_bytes([os.getpid()])
            del a, b
            gc.collect()
            with pytest.raises(memsaver.StateError, match="forked child"):
                saver.pause("a")
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert memfd_bytes([os.getpid()])
    assert a.sum() == 100000 and b.sum() == 3000
    saver.check_integrity()


def _without_a_compiler(pipe: Connection, cache: str, shim: Path) -> None:
    """In a process that has neither loaded the shim nor had a region yet."""
    os.environ |= {"PATH": "", "XDG_CACHE_HOME": cache}
    build.shim_library = lambda: shim
    saver = memsaver.MemorySaver("cpu")
    saver.empty(10).fill_(1)
    with pytest.raises(memsaver.CompilerError, match=r"g\+\+"), saver.region("a"):
        pass
    saver.pause()
    pipe.send("paused")


def test_without_a_compiler_regions_say_so_and_empty_works(tmp_path: Path) -> None:
    peer = Peer(_without_a_compiler, str(tmp_path), build.shim_library())
    assert peer.hear() == "paused"
    peer.bury()


def test_frees_from_other_threads_and_regions_in_parallel(device: str) -> None:
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


def test_no_host_memory_for_the_backup_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = memsaver.MemorySaver(device)
    tensor = saver.empty(8 << 20, torch.uint8, tag="one", content="host").fill_(1)
    monkeypatch.setattr(saver.host_arena, "budget_bytes", saver.host_arena.committed_bytes)
    free = saver.host_arena.committed_bytes - saver.host_arena.used_bytes
    larger = saver.empty(free + 1, torch.uint8, tag="two", content="host")
    with pytest.raises(memsaver.HostMemoryError, match="budget.*nothing was changed") as caught:
        saver.pause()
    assert caught.value.missing_bytes > 0
    assert not saver.is_paused("one") and not saver.is_paused("two") and int(tensor.sum()) == 8 << 20
    assert saver.host_arena.committed_bytes - saver.host_arena.used_bytes == free
    saver.empty(10, tag="one")
    saver.pause(content="discard")
    del larger


def _first_regions(pipe: Connection) -> None:
    """In a process that has had none yet."""
    saver, start = memsaver.MemorySaver("cpu"), threading.Barrier(8)

    def work(n: int) -> None:
        start.wait()
        with saver.region(f"tag{n}"):
            torch.ones(100)

    at_once(*(partial(work, n) for n in range(8)))
    pipe.send(int(torch.ones(100).sum()))


def test_the_hook_is_installed_once_however_many_threads_ask() -> None:
    peer = Peer(_first_regions)
    assert peer.hear() == 100
    peer.bury()
