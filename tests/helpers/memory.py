"""Physical memory, descriptors and maps in use, as counted by the kernel or the driver."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
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
    """Return a byte count of this process's status, such as "VmSize"."""
    return _kib("/proc/self/status", key)


def process_bytes(device: str) -> int:
    """Return this process's shared memory (host), or the device's used memory (GPU)."""
    if device == "cpu":
        return status_bytes("RssShmem")
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def machine_bytes(device: str) -> int:
    """Return the machine's shared memory (host), or the device's used memory (GPU)."""
    return _kib("/proc/meminfo", "Shmem") if device == "cpu" else process_bytes(device)


def memfd_bytes(pids: list[int]) -> int:
    """Return the bytes of all memfds of memsaver that these processes have open or mapped.

    Each memfd counts once. Unlike the kernel's count for the machine, this is not disturbed by
    other processes. Savers of earlier tests in reference cycles are collected first.
    """
    gc.collect()
    sizes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:memsaver" in line:
                    link = Path(f"/proc/{pid}/map_files/{line.split()[0]}")
                    with contextlib.suppress(OSError):  # unmapped meanwhile
                        sizes[line.split()[4]] = link.stat().st_size
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "/memfd:memsaver" in os.readlink(link):
                        sizes[str(link.stat().st_ino)] = link.stat().st_size
    return sum(sizes.values())


_TABLES = 64 << 10


def counted(nbytes: int, device: str, mappings: int = 1) -> Any:
    """Return a value that equals any count of ``nbytes`` of tags by the functions here.

    On the host it is ``nbytes``. On a GPU it allows for page tables of ``mappings`` that begin or
    end in any process between two counts. The driver takes tables in chunks of 64 KiB, each 16
    tables of 4 KiB. A table has 256 entries of 16 bytes for pages of 2 MiB and serves addresses of
    512 MiB, so a mapping of up to 6 GiB needs 13 tables and 3 directories at most, one chunk.
    """
    return nbytes if device == "cpu" else pytest.approx(nbytes, abs=mappings * _TABLES)


def family_bytes(device: str) -> int:
    """Return the memfd bytes of this process and its descendants, or the GPU's used memory."""
    if device != "cpu":
        return process_bytes(device)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return memfd_bytes([process.pid for process in family])


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection for code that is interrupted or reaches the recursion limit.

    A collection there would fail in finalizers of older garbage, for which pytest blames the test.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def own_fds() -> int:
    """Count descriptors of memsaver's kinds: memfds of its name, and sequenced-packet sockets.

    The kinds of gloo and Ray, which come and go, are not among them.
    """
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    packets = {f"socket:[{words[6]}]" for words in sockets if int(words[4], 16) == SOCK_SEQPACKET}
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            link = os.readlink(f"/proc/self/fd/{fd}")
            count += link in packets or link.startswith("/memfd:memsaver")
    return count


def settled(read: Callable[[], int], still: float = 0.05, patience: float = 2.0) -> int:
    """Return a count once it has not changed for `still` seconds, or after `patience` seconds.

    Garbage cycles of earlier tests are collected first; threads may still release what they held.
    """
    gc.collect()
    count, since = read(), time.monotonic()
    end = since + patience
    while time.monotonic() < min(since + still, end):
        time.sleep(0.005)
        if (now := read()) != count:
            count, since = now, time.monotonic()
    return count


def settled_fds(patience: float = 2.0) -> int:
    """Return `open_fds()` after descriptors of earlier tests are gone.

    Garbage cycles, such as gloo's process groups, hold some, and threads close connections.
    """
    return settled(open_fds, patience=patience)


def open_files_in(directory: Path) -> int:
    """Count the files below a directory that this process has open, including unnamed ones."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(f"{directory}/") for link in links)


def memory_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


class Scribbler:
    """A second process that, on request, allocates memory, fills it with 0xFF and frees it."""

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
    """Fill memory once in another process, so that freed pages cannot keep their content."""
    scribbler = Scribbler(device)
    scribbler.fill(nbytes)
    scribbler.close()
