"""Restore of saved content in the background, in the order in which the caller needs it."""

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain, pairwise
from typing import Any

import torch

from memsaver.content import HostBackup
from memsaver.errors import BackendError
from memsaver.memory.backend import PIECE, Backend, Transfer
from memsaver.ops.layout import Range, Ranges, cut
from memsaver.system.interrupts import deliver, held
from memsaver.system.threads import workers
from memsaver.tag.arena import Arena

_POLL_SECONDS = 0.1


class Prefetch:
    """Background restore of tags whose memory is mapped, returned by `MemorySaver.begin_resume`.

    A tensor on these tags must not be used before `wait` has returned for it. Operations of the
    saver on the tags wait for the whole prefetch.

    Args:
        backend: Backend of the arenas.
        arenas: Arenas to restore.
        order: Tensors whose content to restore first.
        settle: `Transactions.settle`, under the saver's lock.
        done: Called with the seconds that all copies took, unless they fail.

    Attributes:
        arenas: Arenas of the tags.
        undo: Steps that unmap the memory again after a failure.
        failure: Error of the copies, once an operation has waited for them.
        arrived: Whether all copies are complete.
    """

    def __init__(
        self,
        backend: Backend,
        arenas: Sequence[Arena],
        order: Sequence[torch.Tensor],
        settle: "Callable[[Prefetch], None]",
        done: Callable[[float], None],
    ) -> None:
        self.arenas = tuple(arenas)
        self.undo = contextlib.ExitStack()
        self.failure: Exception | None = None
        self.arrived = False
        self._backend, self._settle, self._done = backend, settle, done
        wanted = [(tensor.data_ptr(), tensor.nbytes) for tensor in order]
        saved = sorted(chain.from_iterable(map(_saved, arenas)))
        self._pieces = [parts for _, parts in cut(_in_order(saved, wanted), PIECE)]
        # The copying thread sets these futures and `arrived`. The user's thread waits for futures
        # and sets `failure` in `settle`, under the saver's lock, so the fields need no lock. The
        # copying thread must not take the saver's lock, whose holder may wait for the copies.
        self._queued: list[Future[Any]] = [Future() for _ in self._pieces]
        self._copied: Future[Any] = Future()
        self._spans: list[tuple[int, int, int]] = []  # from, until, number of the piece
        for number, parts in enumerate(self._pieces):
            self._spans += [(at, at + nbytes, number) for at, nbytes in parts]
        self._spans.sort()

    def start(self) -> None:
        """Begin the copies in a background thread."""
        # One thread for all prefetches of the process: they share the link to the device, and the
        # content of the first one is needed first.
        workers("prefetches", 1).submit(self._copy)

    def wait(
        self,
        tensors: Sequence[torch.Tensor] | None = None,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        """Wait until the content of the given tensors is restored.

        Args:
            tensors: Tensors on the tags; ``None`` for all content.
            streams: GPU streams that wait for the copies. The caller then waits only until the
                copies are queued.

        Raises:
            BackendError: A copy failed. The tags are paused again and their content is kept, so
                that `MemorySaver.resume` restores it.
            StateError: The process is a forked child.
        """
        self._backend.require_own_process()  # a forked child has no copying thread
        if tensors is None:
            self._settle(self)
        elif not self.arrived:
            try:
                events = _results([self._queued[number] for number in self._numbers(tensors)])
            except Exception:
                self._settle(self)  # raises the error of the copies
                raise
            with self._backend.allow_captures():
                for event in events:
                    for stream in streams:
                        stream.wait_event(event)
                    if not streams:
                        event.synchronize()

    def join(self) -> None:
        """Wait for all copies and re-raise their error, if any."""
        _results([self._copied])

    def error(self) -> BackendError:
        """Build the exception to raise for `failure`.

        Returns:
            An error that names the tags and the cause.
        """
        tags = ", ".join(repr(arena.tag) for arena in self.arenas)
        why = f"the content of {tags} was not restored: {self.failure}"
        return BackendError(f"{why}; resume again (the content is kept, the memory is released)")

    def _numbers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the pieces that hold the tensors."""
        numbers = set[int]()
        for tensor in tensors:
            first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            begin = max(0, bisect_right(self._spans, (first,)) - 1)
            spans = self._spans[begin : bisect_left(self._spans, (end,))]
            numbers |= {number for at, until, number in spans if at < end and until > first}
        return sorted(numbers)

    def _copy(self) -> None:
        started, rest = time.perf_counter(), iter(self._queued)
        try:
            self._backend.bind_thread()
            pieces = ([*chain.from_iterable(map(self._from_host, part))] for part in self._pieces)
            self._backend.feed(pieces, lambda event: next(rest).set_result(event), inward=True)
            self._done(time.perf_counter() - started)
            self.arrived = True
            self._copied.set_result(None)
        except BaseException as error:
            for future in (*rest, self._copied):
                future.set_exception(error)

    def _from_host(self, part: Range) -> Iterator[Transfer]:
        at, nbytes = part
        for arena in self.arenas:
            if 0 <= (offset := at - arena.address) < arena.reservation.nbytes:
                assert isinstance(arena.backup, HostBackup)
                for to, source, size in arena.backup.part(offset, nbytes):
                    yield arena.address + to, source, size


@held()
def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all futures and return their results, without ``None``.

    Interrupts are delivered between two polls, because an interrupted poll would leave a future
    locked.
    """
    while wait(futures, _POLL_SECONDS).not_done:
        deliver()
    return [value for future in futures if (value := future.result()) is not None]


def _saved(arena: Arena) -> Iterator[Range]:
    """Yield (address, nbytes) of content in host memory, except in ends that were trimmed since."""
    if isinstance(arena.backup, HostBackup):
        for offset, nbytes in arena.backup.ranges:
            if (size := min(nbytes, arena.committed_when_paused - offset)) > 0:
                yield arena.address + offset, size


def _in_order(ranges: Ranges, wanted: Ranges) -> list[Range]:
    """Cut sorted (address, nbytes) ranges at the edges of wanted ranges, and order the parts.

    The wanted parts come first, in the order of `wanted`, then the others in order of address.
    """
    edges = sorted({*chain.from_iterable((at, at + nbytes) for at, nbytes in wanted)})
    parts: list[Range] = []
    for at, nbytes in ranges:
        inside = edges[bisect_right(edges, at) : bisect_left(edges, at + nbytes)]
        parts += [(a, b - a) for a, b in pairwise([at, *inside, at + nbytes])]
    first = (
        range(bisect_left(parts, (at,)), bisect_left(parts, (at + nbytes,)))
        for at, nbytes in wanted
    )
    numbers = dict.fromkeys(chain(chain.from_iterable(first), range(len(parts))))
    return [parts[number] for number in numbers]
