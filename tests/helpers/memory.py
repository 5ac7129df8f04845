"""Oracles for physical memory: what the kernel or the driver says is in use."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from socket import SOCK_SEQPACKET
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.peers import Peer


def _kib(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def status_bytes(key: str) -> int:
    """Of this process, as the kernel counts: "VmSize", say."""
    return _kib("/proc/self/status", key)


def process_bytes(device: str) -> int:
    """Shared-memory pages of this process (host), or the device's used memory (GPU)."""
    if device == "cpu":
        return status_bytes("RssShmem")
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def machine_bytes(device: str) -> int:
    """Shared memory of the whole machine (host), or the device's used memory (GPU)."""
    return _kib("/proc/meminfo", "Shmem") if device == "cpu" else process_bytes(device)


def memfd_bytes(pids: list[int]) -> int:
    """Bytes of all memfds of memsaver that these processes have open or mapped, each counted once.

    Unlike what the machine's kernel counts, this is not disturbed by others. Savers of earlier
    tests that only cycles keep go first.
    """
    gc.collect()
    sizes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:memsaver" in line:
                    link = Path(f"/proc/{pid}/map_files/{line.split()[0]}")
                    sizes[line.split()[4]] = link.stat().st_size
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "/memfd:memsaver" in os.readlink(link):
                        sizes[str(link.stat().st_ino)] = link.stat().st_size
    return sum(sizes.values())


_TABLES = 64 << 10


def counted(nbytes: int, device: str, mappings: int = 1) -> Any:
    """Return what is equal to the bytes that the functions here may count for ``nbytes`` of tags.

    On the host it is ``nbytes``. On a GPU page tables come and go with mappings, those that begin
    or end in any process between the two counts. The driver takes tables in chunks of 64 KiB, each
    16 tables of 4 KiB. A table has 256 entries of 16 bytes for pages of 2 MiB and serves 512 MiB of
    addresses: a mapping of up to 6 GiB needs 13 tables and 3 directories at most, one chunk.
    """
    return nbytes if device == "cpu" else pytest.approx(nbytes, abs=mappings * _TABLES)


def family_bytes(device: str) -> int:
    """Memfds of memsaver that this process and its descendants hold (host), or the device's used
    memory (GPU).
    """
    if device != "cpu":
        return process_bytes(device)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return memfd_bytes([process.pid for process in family])


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What others left dies later. For what is interrupted, or goes to Python's recursion limit: a
    collection there fails in the finalizers of all that it finds, and pytest tells it of the test.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def own_fds() -> int:
    """Those of memsaver's kinds: memfds by its name, sockets of whole packets. Gloo's and
    Ray's, which come and go by themselves, are of others.
    """
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    packets = {f"socket:[{words[6]}]" for words in sockets if int(words[4], 16) == SOCK_SEQPACKET}
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            link = os.readlink(f"/proc/self/fd/{fd}")
            found += link in packets or link.startswith("/memfd:memsaver")
    return found


def settled_fds(patience: float = 2.0) -> int:
    """`open_fds()` when what earlier tests left is gone: cycles (process groups of gloo among
    them), and connections that threads close.
    """
    gc.collect()
    count, since = open_fds(), time.monotonic()
    end = since + patience
    while time.monotonic() < min(since + 0.05, end):
        time.sleep(0.005)
        if (now := open_fds()) != count:
            count, since = now, time.monotonic()
    return count


def open_files_in(directory: Path) -> int:
    """Files below a directory that this process has open, nameless ones too; a test runner's own
    don't count.
    """
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(f"{directory}/") for link in links)


def memory_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


class Scribbler:
    """A second process that, when told, takes memory, fills it with 0xFF and gives it back."""

    def __init__(self, device: str) -> None:
        self._peer = Peer(_scribble, device)

    def fill(self, nbytes: int) -> None:
        assert self._peer.ask(nbytes) == "done"

    def close(self) -> None:
        self._peer.bury()


def _scribble(pipe: Connection, device: str) -> None:
    while True:
        x = torch.full((pipe.recv(),), 255, dtype=torch.uint8, device=device)
        if x.is_cuda:
            torch.cuda.synchronize()
            del x
            torch.cuda.empty_cache()
        pipe.send("done")


def scribble(nbytes: int, device: str) -> None:
    """One fill by another process: freed pages cannot keep their old content."""
    scribbler = Scribbler(device)
    scribbler.fill(nbytes)
    scribbler.close()
