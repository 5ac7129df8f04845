"""Offers what ``vllm.device_allocator.cumem`` of vLLM 0.24 and 0.33 does, on memsaver.

docs/compat.md tells what differs. A tag of that module may be asleep in part: what is allocated on
it while it is asleep is awake. Here such a tag has several tags of the saver, by the names ``tag``
and ``tag again, 2``; each is awake or asleep as a whole.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
from collections.abc import Collection, Iterator
from typing import ClassVar

import torch

from memsaver.compat.savers import Savers
from memsaver.memory.torch_allocator import check_capture
from memsaver.native import cuda_hook
from memsaver.saver import MemorySaver

__all__ = ["CuMemAllocator", "cumem_available"]

cumem_available = True

_DEFERRABLE = ("weights", "kv_cache")  # all other tags come back with any wake-up
_GRAPHS = "cudagraph"
_AGAIN = " again, "


class CuMemAllocator:
    """Memory by tags that can be put to sleep; ``sleep`` says whose content is kept on the host."""

    instance: ClassVar[CuMemAllocator | None] = None
    default_tag: ClassVar[str] = "default"

    def __init__(self, savers: Savers | None = None) -> None:
        """Programs call ``get_instance``; savers: for memory of one's own."""
        self._savers = Savers() if savers is None else savers
        self._graph_pools: dict[tuple[torch.device, str], torch.cuda.MemPool] = {}
        self.current_tag = self.default_tag

    @staticmethod
    def get_instance() -> CuMemAllocator:
        """The one of this process."""
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
            # torch may abort where a pool goes only with the interpreter
            atexit.register(CuMemAllocator.instance.release_pools)
        return CuMemAllocator.instance

    @property
    def saver(self) -> MemorySaver:
        """Returns the saver that has the tags of the current device."""
        return self._savers.current()

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Place what this thread allocates on ``tag``. What of the tag is asleep stays asleep."""
        chosen = self.default_tag if tag is None else tag
        saver = self._savers.current()
        with saver.region(_awake(saver, chosen)), self._current(chosen):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """The handle of a pool on the tag "cudagraph", for ``torch.cuda.graph(pool=...)`` inside.

        The same one until ``release_pools``. ``StateError`` where NCCL would register the tag's
        pages with other ranks, ``ValueError`` without a GPU.
        """
        check_capture(_GRAPHS)
        saver = self._savers.current()
        tag = _awake(saver, _GRAPHS)
        if (key := (saver.device, tag)) not in self._graph_pools:
            self._graph_pools[key] = saver.mem_pool(tag)
        # makes cuBLAS's workspace, which torch keeps for ever, outside of the tag
        torch.cuda.current_blas_handle()
        with self._current(_GRAPHS):
            yield self._graph_pools[key].id

    @contextlib.contextmanager
    def _current(self, tag: str) -> Iterator[None]:
        before, self.current_tag = self.current_tag, tag
        try:
            yield
        finally:
            self.current_tag = before

    def sleep(
        self,
        offload_tags: Collection[str] | str | None = None,
        *,
        tags: Collection[str] | str | None = None,
    ) -> None:
        """Give memory back: of ``tags``, or of all. Memory that is asleep stays as it is.

        offload_tags: their content is kept and comes back (``None``: the default tag's); other
        content is undefined after ``wake_up``. A failure has changed nothing on its device.
        """
        kept = {self.default_tag} if offload_tags is None else _names(offload_tags)
        chosen = None if tags is None else _names(tags)
        gc.collect()  # dead tensors are not worth saving
        for saver in self._savers:
            awake = [tag for tag in saver.tags if not saver.is_paused(tag)]
            awake = [tag for tag in awake if chosen is None or _name(tag) in chosen]
            saved = [tag for tag in awake if _name(tag) in kept]
            lost = [tag for tag in awake if _name(tag) not in kept]
            with contextlib.ExitStack() as undo:
                if saved:  # first: only what was saved can be brought back
                    saver.pause(*saved, content="host")
                    undo.callback(saver.resume, *saved)
                if lost:
                    saver.pause(*lost, content="discard")
                undo.pop_all()
            saver.backend.reclaim()

    def discard(self, tags: Collection[str] | str) -> None:
        """Give the memory of these tags back, without their content."""
        self.sleep((), tags=tags)

    def wake_up(self, tags: Collection[str] | str | None = None) -> None:
        """Put memory behind the same addresses again. Memory that is awake stays as it is.

        tags: which of "weights" and "kv_cache"; ``None``: both. All other tags come back each time.
        ``OutOfMemory``, a ``RuntimeError``, has changed nothing on its device.
        """
        left = set() if tags is None else {*_DEFERRABLE} - _names(tags)
        for saver in self._savers:
            asleep = [tag for tag in saver.tags if saver.is_paused(tag) and _name(tag) not in left]
            if asleep:
                saver.resume(*asleep)

    def get_current_usage(self) -> int:
        """Bytes of all tensors on the tags, asleep or not."""
        tags = (saver.report(others=False).tags.values() for saver in self._savers)
        return sum(tag.live_bytes for tag in itertools.chain.from_iterable(tags))

    def release_pools(self) -> None:
        """Give back memory that no tensor and no graph uses, as an engine does before it ends.

        Tensors and graphs stay valid; the next ``cudagraph_pool`` is another one. May be repeated.
        """
        while self._graph_pools:
            cuda_hook.retire(self._graph_pools.popitem()[1])
        for saver in self._savers:
            saver.trim()

    close = release_pools


def _awake(saver: MemorySaver, name: str) -> str:
    """The saver's tag to allocate on for ``name``: the first that is not asleep, else a new one."""
    more = (f"{name}{_AGAIN}{number}" for number in itertools.count(2))
    tags = itertools.chain([name], more)
    return next(tag for tag in tags if tag not in saver.tags or not saver.is_paused(tag))


def _name(tag: str) -> str:
    """Returns what a tag of the saver is called here."""
    return tag.partition(_AGAIN)[0]


def _names(tags: Collection[str] | str) -> set[str]:
    return {tags} if isinstance(tags, str) else set(tags)
