"""Putting tensors on tags: torch's own allocations in a region or a pool, and single tensors."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator

import torch

from memsaver.common.signals import Unbroken, held
from memsaver.core import SaverCore
from memsaver.tag.arena import Arena
from memsaver.vmm.backend import ShortOfMemory


class Placing(SaverCore):
    """The operations of ``MemorySaver`` that allocate on a tag, and make it on first use."""

    def region(self, tag: str = "default", content: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Place this thread's torch allocations on ``tag``; the innermost region wins.

        ``content``: what a pause does with the content: ``"discard"`` (default for a new tag), ``"host"``, ``"disk"``.
        Allocations of other threads (autograd's, loaders') are not caught. Raises ``StateError`` on a paused tag,
        ``OutOfMemory`` where torch's own error would say less, ``CompilerError`` on the CPU without a C++ compiler.
        """
        return Unbroken(self._region(tag, content))

    @contextlib.contextmanager
    def _region(self, tag: str, content: str | None) -> Iterator[None]:
        arena = self._open_for_use(tag, content, enter=True)
        before = arena.stats.committed
        try:
            with self._hook(arena):
                arena.settle_frees()
                yield
        except torch.OutOfMemoryError as error:
            cause = arena.cause()
            if cause.code:
                raise self._shortage(f"region {tag!r}", [arena], cause) from error
            raise
        finally:
            with self._lock:
                arena.leave()
            self._settle(arena, before)

    def empty(
        self,
        shape: tuple[int, ...] | list[int] | int,
        dtype: torch.dtype = torch.float32,
        tag: str = "default",
        content: str | None = None,
        elastic: bool = False,
    ) -> torch.Tensor:
        """An uninitialised tensor at a fixed place on ``tag``, freed when its storage dies. Needs no compiler.

        elastic: its memory comes in pieces of at most 1 GiB, now and at each resume, so that ``resize`` can give some
        back; on a GPU the memory of other tensors is one piece each.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(length < 0 for length in size):
            raise ValueError(f"empty: no length of the shape {list(size)} may be negative")
        nbytes = min(math.prod(size) * dtype.itemsize, sys.maxsize)  # more does not go through C as it is
        first = tag not in self.tags
        arena = self._open_for_use(tag, content)
        if not nbytes:
            return torch.empty(size, dtype=dtype, device=self.device)
        before = arena.stats.committed
        if elastic:
            self._commit_pieces(arena, nbytes)
        tensor = arena.empty(nbytes)
        if tensor is None and self._switch.make_room():
            tensor = arena.empty(nbytes)
        if tensor is None:
            error = self._shortage(f"empty({list(size)}, {dtype}) on tag {tag!r}", [arena], arena.cause())
            if first:
                self._forget(arena)
            raise error
        self._settle(arena, before, trim=False)
        return tensor.view(dtype).view(size)

    def _commit_pieces(self, arena: Arena, nbytes: int) -> None:
        """Put memory behind the next ``nbytes`` of a tag, in pieces, which it keeps to."""
        arena.in_pieces(elastic=True)
        end = self.backend.round_up(arena.stats.top + nbytes)
        before = arena.stats.committed
        if before < end <= arena.reservation.nbytes:  # beyond: the allocation fails, and says why
            with self._operation():
                self._active(arena.tag, "empty")  # still
                try:
                    self._switch.resize(arena, end)
                except ShortOfMemory as short:
                    raise self._shortage(f"empty on tag {arena.tag!r}", [arena], short.cause, end - before) from None

    def mem_pool(self, tag: str, content: str | None = None) -> torch.cuda.MemPool:
        """A pool for ``torch.cuda.use_mem_pool`` and ``torch.cuda.graph(pool=...)`` whose memory is on ``tag``."""
        if self.device.type != "cuda":
            raise ValueError("mem_pool needs a CUDA device; on the CPU use region() or empty()")
        from memsaver.native import cuda_hook

        return cuda_hook.new_pool(self._open_for_use(tag, content).slot)

    def _hook(self, arena: Arena) -> contextlib.AbstractContextManager[None]:
        if self.device.type == "cuda":
            from memsaver.native import cuda_hook

            return cuda_hook.allocate_from(arena.slot, self.device)
        from memsaver.native import cpu_hook

        return cpu_hook.allocate_from(arena.slot)

    def _open_for_use(self, tag: str, content: str | None, enter: bool = False) -> Arena:
        """The tag's arena, made on first use; ``enter`` counts one more open region, so that no pause comes between."""
        with held(), self._lock:
            self._require_open()
            arena = self._tags.open(tag, content)
            if enter:
                arena.enter()
        return arena

    def _forget(self, arena: Arena) -> None:
        """A tag whose first tensor could not be made, unless another thread has found it meanwhile."""
        with self._operation():
            if not arena.open_regions and not arena.stats.blocks and not arena.paused:
                self._tags.forget(arena.tag)
                arena.close()

    def _settle(self, arena: Arena, before: int, trim: bool = True) -> None:
        """After allocating: give back the unused tail (never under a lease), and tell the timeline."""
        with self._operation():
            if trim and not arena.open_regions and not self._leases(arena.tag):
                arena.trim()
            if arena.stats.committed != before:
                self._recorder.record("grow" if arena.stats.committed > before else "trim", arena, 0.0)
