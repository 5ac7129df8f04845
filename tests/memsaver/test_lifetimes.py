"""Threads, forks, exits and a missing compiler: what must not crash a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import memsaver

ROOT = Path(__file__).parent.parent.parent


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exit_with_paused_and_active_tags(device: str) -> None:
    code = f"""
import memsaver, torch
saver = memsaver.MemorySaver({device!r})
with saver.region("a", content="host"):
    a = torch.ones(100000, device={device!r})
b = saver.empty(100000, tag="b")
saver.pause("a")
cycle = [a, b]; cycle.append(cycle)
print("end")
"""
    assert run(code) == "end"


def test_a_forked_child_is_inert_and_holds_nothing() -> None:
    code = """
import gc, os, memsaver, torch
from tests.helpers.memory import memfd_bytes
saver = memsaver.MemorySaver("cpu")
with saver.region("a"):
    a = torch.ones(100000)
b = saver.empty(1000, tag="b").fill_(3)
child = os.fork()
if child == 0:
    if memfd_bytes([os.getpid()]):
        os._exit(2)
    del a, b
    gc.collect()
    try:
        saver.pause("a")
    except memsaver.StateError as error:
        assert "forked child" in str(error)
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert memfd_bytes([os.getpid()])
assert a.sum() == 100000 and b.sum() == 3000
saver.check_integrity()
print("fine")
"""
    assert run(code) == "fine"


def test_without_a_compiler_regions_say_so_and_empty_works(tmp_path: Path) -> None:
    memsaver.MemorySaver("cpu").empty(1)  # the shim exists by now
    from memsaver.allocator import build

    shim = build.shim_library()
    code = f"""
import memsaver, torch
from pathlib import Path
from memsaver.allocator import build
build.shim_library = lambda: Path({str(shim)!r})
saver = memsaver.MemorySaver("cpu")
saver.empty(10).fill_(1)
try:
    with saver.region("a"):
        pass
except memsaver.CompilerError as error:
    print("g++" in str(error))
saver.pause()
"""
    assert run(code, PATH="", XDG_CACHE_HOME=str(tmp_path)) == "True"


def test_frees_from_other_threads_and_regions_in_parallel(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for step in range(30):
                with saver.region(name):
                    pieces = [torch.full((1000 + 64 * step,), step, device=device) for _ in range(5)]
                assert all(int(piece[0]) == step for piece in pieces)
                saver.pause(name)
                handed = threading.Thread(target=pieces.clear)
                handed.start()
                handed.join()
                saver.resume(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"tag{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    if device != "cpu":
        torch.cuda.empty_cache()
    saver.check_integrity()
    assert sum(tag.live_bytes for tag in saver.report().tags.values()) == 0


def test_a_failing_driver_call_in_resume_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = memsaver.MemorySaver("cpu")
    one = saver.empty(5000, tag="one", content="host").fill_(1)
    two = saver.empty(5000, tag="two", content="host").fill_(2)
    saver.pause()
    real, calls = saver.backend.map, []

    def fail_second(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise memsaver.BackendError("map failed: injected")
        real(*arguments)

    monkeypatch.setattr(saver.backend, "map", fail_second)
    with pytest.raises(memsaver.BackendError, match="injected"):
        saver.resume()
    assert saver.is_paused("one") and saver.is_paused("two")
    assert saver.report().committed_bytes == 0
    saver.check_integrity()
    monkeypatch.undo()
    saver.resume()
    assert one.sum() == 5000 and two.sum() == 10000


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


def test_the_hook_is_installed_once_however_many_threads_ask() -> None:
    code = """
import threading, memsaver, torch
saver = memsaver.MemorySaver("cpu")
start = threading.Barrier(8)
def work(n):
    start.wait()
    with saver.region(f"tag{n}"):
        torch.ones(100)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(int(torch.ones(100).sum()))
"""
    assert run(code) == "100"
