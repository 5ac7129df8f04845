"""Content that comes back behind work, in the order in which that needs it."""

from __future__ import annotations

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
    """Content on its way into tags that have memory again (``MemorySaver.begin_resume``).

    Nobody may touch a tensor of theirs before ``wait`` has returned for it. An operation of the
    saver on one of the tags waits for all of it.
    """

    def __init__(
        self,
        backend: Backend,
        arenas: Sequence[Arena],
        order: Sequence[torch.Tensor],
        settle: Callable[[Prefetch], None],
        done: Callable[[float], None],
    ) -> None:
        """order: what is to come first. settle: `Transactions.settle`, under the saver's lock.
        done: is told the seconds that all copies took, unless they fail.
        """
        self.arenas = tuple(arenas)
        self.undo = contextlib.ExitStack()  # takes the memory away again
        self.failure: Exception | None = None
        self.arrived = False  # all copies are done
        self._backend, self._settle, self._done = backend, settle, done
        wanted = [(each.data_ptr(), each.nbytes) for each in order]
        saved = sorted(chain.from_iterable(map(_saved, arenas)))
        self._pieces = [parts for _, parts in cut(_in_order(saved, wanted), PIECE)]
        self._queued: list[Future[Any]] = [Future() for _ in self._pieces]
        self._copied: Future[Any] = Future()
        self._spans: list[tuple[int, int, int]] = []  # from, until, number of the piece
        for number, parts in enumerate(self._pieces):
            self._spans += [(at, at + nbytes, number) for at, nbytes in parts]
        self._spans.sort()

    def start(self) -> None:
        """Has a thread begin."""
        workers("prefetches", 1).submit(self._copy)

    def wait(
        self,
        tensors: Sequence[torch.Tensor] | None = None,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        """Waits until the bytes of these tensors (None: of everything) are there, and no others'.

        streams: of a GPU: they wait, and the caller only until the copies are queued. Raises
        ``BackendError`` where a copy failed, with its cause: the tags are paused again then, their
        content is kept, and ``resume`` brings it.
        """
        self._backend.require_own_process()  # the thread that copies is not there in a child
        if tensors is None:
            self._settle(self)
        elif not self.arrived:
            try:
                events = _results([self._queued[each] for each in self._numbers(tensors)])
            except Exception:
                self._settle(self)  # raises it
                raise
            with self._backend.allow_captures():
                for event in events:
                    for stream in streams:
                        stream.wait_event(event)
                    if not streams:
                        event.synchronize()

    def join(self) -> None:
        """Waits for the copies; raises what became of them."""
        _results([self._copied])

    def error(self) -> BackendError:
        """Returns what is raised for `failure`."""
        tags = ", ".join(repr(arena.tag) for arena in self.arenas)
        why = f"content did not come back to {tags}: {self.failure}"
        return BackendError(f"{why}; it is kept, and the memory is given up: resume again")

    def _numbers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the pieces that these lie in."""
        found = set[int]()
        for each in tensors:
            first, end = each.data_ptr(), each.data_ptr() + each.nbytes
            begin = max(0, bisect_right(self._spans, (first,)) - 1)
            spans = self._spans[begin : bisect_left(self._spans, (end,))]
            found |= {number for at, until, number in spans if at < end and until > first}
        return sorted(found)

    def _copy(self) -> None:
        started, rest = time.perf_counter(), iter(self._queued)
        try:
            self._backend.bind_thread()
            pieces = map(self._transfers, self._pieces)
            self._backend.feed(pieces, lambda event: next(rest).set_result(event), inward=True)
            self._done(time.perf_counter() - started)
            self.arrived = True
            self._copied.set_result(None)
        except BaseException as error:
            for each in (*rest, self._copied):
                each.set_exception(error)

    def _transfers(self, parts: Ranges) -> list[Transfer]:
        return [*chain.from_iterable(map(self._from_host, parts))]

    def _from_host(self, part: Range) -> Iterator[Transfer]:
        at, nbytes = part
        for arena in self.arenas:
            if 0 <= (offset := at - arena.address) < arena.reservation.nbytes:
                assert isinstance(arena.backup, HostBackup)
                for to, source, size in arena.backup.part(offset, nbytes):
                    yield arena.address + to, source, size


@held()
def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Waits for all; returns what is not None. An interrupt comes between two looks: in the middle
    of one it would leave a future locked.
    """
    while wait(futures, _POLL_SECONDS).not_done:
        deliver()
    return [value for each in futures if (value := each.result()) is not None]


def _saved(arena: Arena) -> Iterator[Range]:
    """Yields (address, nbytes) of what the host keeps; what was trimmed meanwhile has no memory."""
    if isinstance(arena.backup, HostBackup):
        for offset, nbytes in arena.backup.ranges:
            if (size := min(nbytes, arena.committed_when_paused - offset)) > 0:
                yield arena.address + offset, size


def _in_order(ranges: Ranges, wanted: Ranges) -> list[Range]:
    """Returns sorted ``ranges``, cut where those wanted begin and end: what is wanted comes first,
    in its order, then the rest in its own.
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
