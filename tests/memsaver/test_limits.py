"""Limits of the process (ulimit) are named with their remedy; a pause works at the limit."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

from tests.helpers.peers import Peer


def _speak(pipe: Connection, code: str) -> None:
    lines = list[str]()
    exec(code, {"print": lambda *words: lines.append(" ".join(map(str, words)))})
    pipe.send("\n".join(lines))


def said(code: str) -> str:
    """Return what code prints in a process of its own."""
    peer = Peer(_speak, START + code)
    text = str(peer.hear())
    peer.bury()
    return text


START = """
import os, resource, psutil, torch, memsaver
def limit(kind, more):
    resource.setrlimit(kind, (more, more))
def use_all_descriptors():
    limit(resource.RLIMIT_NOFILE, 200)
    try:
        while True:
            os.dup(0)
    except OSError:
        pass
def refused(call):
    try:
        call()
    except memsaver.MemSaverError as error:
        print(type(error).__name__, error)
"""
ADDRESSES = """
limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + (4 << 30))
saver = memsaver.MemorySaver("cpu", reserve_bytes=1 << 40)
refused(lambda: saver.empty((8 << 20,), torch.uint8))
small = memsaver.MemorySaver("cpu", reserve_bytes=1 << 30)
small.empty((8 << 20,), torch.uint8).fill_(3)
"""
FILES = """
saver = memsaver.MemorySaver("cpu")
limit(resource.RLIMIT_FSIZE, 1 << 20)
refused(lambda: saver.empty((8 << 20,), torch.uint8))
"""
DESCRIPTORS = """
saver = memsaver.MemorySaver("cpu")
use_all_descriptors()
refused(lambda: saver.empty((8 << 20,), torch.uint8))
"""
SAVED = """
from memsaver.memory import pinned_arena
limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + (1 << 30))
try:
    pinned_arena.obtain([1 << 40], None)
except MemoryError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ADDRESSES, ("BackendError", "ENOMEM", "ulimit -v", "smaller reserve_bytes")),
        (FILES, ("OutOfMemory", "EFBIG", "ulimit -f, now 1024 KiB", "Have that limit raised")),
        (DESCRIPTORS, ("OutOfMemory", "EMFILE", "ulimit -n, now 200", "Have that limit raised")),
        (SAVED, ("mapping 1024.00 GiB", "ulimit -v")),
    ],
)
def test_limit_is_named_with_its_remedy(code: str, words: tuple[str, ...]) -> None:
    message = said(code)
    assert all(word in message for word in words), message
    assert "max_map_count" not in message and "free memory of the holders" not in message


PAUSES = """
saver = memsaver.MemorySaver("cpu")
kept = saver.empty((8 << 20,), torch.uint8, tag="kept", content="host").fill_(3)
other = saver.empty((8 << 20,), torch.uint8, tag="other")
use_all_descriptors()
saver.pause("other")
saver.pause("kept")
print(saver.is_paused("kept"), saver.is_paused("other"), saver.free_bytes > 0)
saver.report()
os.closerange(100, 200)
saver.resume("kept")
print(int(kept.sum()) == 3 << 23)
"""


def test_pause_needs_no_descriptor() -> None:
    assert said(PAUSES).split() == ["True"] * 4
