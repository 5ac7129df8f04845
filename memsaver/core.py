"""What all operations of a saver stand on: its parts, its lock, its tags, what it tells about itself, and its end."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memsaver.backup.disk_file import default_directory
from memsaver.common.signals import held
from memsaver.errors import StateError
from memsaver.native import shim
from memsaver.report import CallStats, Event, Report, TagReport, Usage
from memsaver.tag import integrity
from memsaver.tag.arena import Arena
from memsaver.tag.out_of_memory import PAGE_POOL, explain
from memsaver.tag.recorder import Recorder
from memsaver.tag.table import Tags
from memsaver.tag.transaction import Switch
from memsaver.vmm.backend import make_backend
from memsaver.vmm.page_pool import PagePool
from memsaver.vmm.registrations import check_segments
from memsaver.vmm.torch_usage import TorchUse

if TYPE_CHECKING:
    from memsaver.vmm.pinned_arena import HostArena

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def _unlock_in_child() -> None:
    """Threads that held a saver's lock when the child was forked are not there to release it."""
    for lock in _LOCKS:
        lock._at_fork_reinit()  # as `logging` does


os.register_at_fork(after_in_child=_unlock_in_child)


class SaverCore:
    """A saver without its operations on tags; ``MemorySaver`` has them, and says what the arguments are.

    ``backend``: the device that its memory comes from, whose calls may be counted, or made to fail.
    """

    @held()
    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        limit_bytes: int | None = None,
        reserve_bytes: int | None = None,
        disk_dir: str | Path | None = None,
        debug: bool = False,
    ) -> None:
        for name, value in (("limit_bytes", limit_bytes), ("reserve_bytes", reserve_bytes)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")
        device = torch.device(device)
        if device.type == "cuda":
            check_segments()
        self.backend = make_backend(device, limit_bytes)
        self._pool = PagePool(self.backend)
        self._tags = Tags(self.backend, reserve_bytes or self.backend.total_bytes)
        directory = Path(disk_dir or default_directory())
        self._switch = Switch(self.backend, self._pool, debug, directory, self._tags)
        self._recorder = Recorder(self.backend)
        self._torch_use = TorchUse(self.backend.device)
        self._lock = threading.RLock()
        _LOCKS.add(self._lock)
        self._closed = False
        self._pid = os.getpid()
        self._guard = None
        if debug:
            from memsaver.debug import PausedGuard

            self._guard = PausedGuard(self._tags.paused_at)
            self._guard.enable()

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def limit_bytes(self) -> int | None:
        """May be set at any time; below what is held, nothing more is taken until enough was given back."""
        return self.backend.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | None) -> None:
        self.backend.limit_bytes = nbytes

    @property
    def disk_dir(self) -> Path:
        """Where content ``"disk"`` is saved, from the next pause on."""
        return self._switch.saving.disk_dir

    @disk_dir.setter
    def disk_dir(self, path: str | Path) -> None:
        self._switch.saving.disk_dir = Path(path)

    @property
    def host_arena(self) -> HostArena:
        """Where content is saved; one for all savers of the process with the same kind of device."""
        return self.backend.host_arena

    @property
    def tags(self) -> list[str]:
        """Tags in the order of their first use."""
        return [arena.tag for arena in self._tags]

    def is_paused(self, tag: str) -> bool:
        return self._arena(tag).paused

    def tag_of(self, tensor: torch.Tensor) -> str:
        """The tag that a tensor is on; ``TagError`` if on none."""
        return self._tags.at(tensor.data_ptr()).tag

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Byte offset of a tensor's first element in its tag's arena."""
        with self._lock:
            return tensor.data_ptr() - self._tags.at(tensor.data_ptr()).address

    def report(self) -> Report:
        """What every tag holds now."""
        with self._lock:
            tags = {arena.tag: self._tag_report(arena) for arena in self._tags}
            return Report(
                device=str(self.device),
                limit_bytes=self.limit_bytes,
                committed_bytes=self.backend.committed_bytes,
                pool_bytes=self._pool.held_bytes,
                backup_bytes=sum(tag.backup_bytes for tag in tags.values()),
                tags=tags,
                others=self.backend.other_holders(),
            )

    def leases(self, tag: str) -> int:
        """How often the tag is mapped by leases and loans now; much cheaper than ``report``."""
        with self._lock:
            return len(self._leases(self._arena(tag).tag))

    def _tag_report(self, arena: Arena) -> TagReport:
        stats = arena.stats
        return TagReport(
            state="paused" if arena.paused else "active",
            content=arena.content,
            reserved_bytes=stats.reserved,
            committed_bytes=stats.committed,
            borrowed_bytes=0 if arena.loan is None else arena.loan.nbytes,
            live_bytes=sum(nbytes for _, nbytes in arena.live_ranges()),
            backup_bytes=arena.backup.host_bytes if arena.backup else 0,
            disk_bytes=arena.backup.disk_bytes if arena.backup else 0,
            extents=stats.extents,
            leases=len(self._leases(arena.tag)),
            last_pause_seconds=arena.last_pause_seconds,
            last_resume_seconds=arena.last_resume_seconds,
        )

    def take_usage(self) -> Usage:
        """What this process holds of the device now, and torch's most since the last call. Takes some 0.1 ms."""
        with self._lock:
            tags = {arena.tag: arena.stats.committed for arena in self._tags}
            if kept := self._pool.held_bytes:
                tags[PAGE_POOL] = kept
            saved = sum(arena.backup.host_bytes for arena in self._tags if arena.backup)
            now, peak, used = self._torch_use.take(tuple((a.tag, a.stats.blocks, a.stats.frees) for a in self._tags))
            return Usage(tags=tags, torch_bytes=now, torch_peak_bytes=peak, device_used_bytes=used, host_bytes=saved)

    def statistics(self) -> dict[str, CallStats]:
        """Calls, failures, bytes and seconds of every driver operation so far (``"create"``, ``"map"``, ...)."""
        return self._recorder.statistics()

    def drain_events(self) -> list[Event]:
        """The operations since the last call, oldest first."""
        with self._lock:
            return self._recorder.drain()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the tables contradict each other; callable at any time."""
        with self._lock:
            integrity.check(self._tags, self._pool, self.backend)

    def close(self) -> None:
        """Give everything back. Tensors still alive must not be touched: their addresses stay without memory.

        Does nothing in a forked child, which has none of it.
        """
        if os.getpid() != self._pid:
            return
        with self._operation():
            if self._closed:
                return
            self._switch.close(list(self._tags))
            if self._guard is not None:
                self._guard.disable()
            self._closed = True

    # ---------------------------------------------------------------- for the operations

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """One at a time, no interrupt in the middle, and its driver calls go to the log."""
        with held(), self._lock, self._recorder.logged():
            yield

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this MemorySaver is closed; make a new one")
        if os.getpid() != self._pid:
            raise StateError("this is a forked child, where the saver is inert; make a MemorySaver of its own")
        if self._guard is not None:
            self._guard.enable()  # in this thread, too

    def _arena(self, tag: str) -> Arena:
        self._require_open()
        return self._tags.get(tag)

    def _active(self, tag: str, what: str) -> Arena:
        """A tag with memory of its own; ``StateError``, ``LeaseError``."""
        arena = self._arena(tag)
        if arena.paused:
            raise StateError(f"{what}({tag!r}): the tag is paused; resume it first")
        arena.require_own(f"{what}({tag!r})")
        return arena

    def _select(self, tags: tuple[str, ...]) -> list[Arena]:
        self._require_open()
        return self._tags.select(tags)

    def _leases(self, tag: str) -> list[int]:
        return [] if self._switch.server is None else self._switch.server.holders(tag)

    def _shortage(self, what: str, arenas: list[Arena], cause: shim.Cause, needed: int = 0) -> Exception:
        """needed: bytes; 0: those of the paused arenas, or what the failed call asked for."""
        needed = needed or sum(arena.committed_when_paused for arena in arenas if arena.paused)
        holders = {arena.tag: arena.stats.committed for arena in self._tags}
        holders[PAGE_POOL] = self._pool.held_bytes
        return explain(what, cause, needed or cause.requested, self._tags.reserve_bytes, holders, self.backend)
