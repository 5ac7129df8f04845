"""The interface of ``vllm.device_allocator.cumem`` of vLLM 0.24 and 0.33 on memsaver.

docs/compat.md lists the differences. A tag of that module may be partly asleep, because new
allocations on a sleeping tag are awake. Here, such a tag consists of several tags of the saver,
named ``tag``, ``tag again, 2`` and so on. Each of them is awake or asleep as a whole.
"""

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
from memsaver.system.replaced import having

__all__ = ["CuMemAllocator", "cumem_available"]

cumem_available = True

_DEFERRABLE = ("weights", "kv_cache")  # every wake-up resumes all other tags
_GRAPHS = "cudagraph"
_AGAIN = " again, "


class CuMemAllocator:
    """Allocator of memory by tags, which can sleep with or without their content.

    Programs obtain the instance of their process from `get_instance`.
    """

    instance: ClassVar["CuMemAllocator | None"] = None
    default_tag: ClassVar[str] = "default"

    def __init__(self, savers: Savers | None = None) -> None:
        self._savers = Savers() if savers is None else savers
        self._graph_pools: dict[tuple[torch.device, str], torch.cuda.MemPool] = {}
        self.current_tag = self.default_tag

    @staticmethod
    def get_instance() -> "CuMemAllocator":
        """Return the allocator of this process."""
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
            # torch may abort if a pool is dropped only when the interpreter exits.
            atexit.register(CuMemAllocator.instance.release_pools)
        return CuMemAllocator.instance

    @property
    def saver(self) -> MemorySaver:
        """Return the saver of the current device."""
        return self._savers.current()

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Place this thread's allocations on a tag; sleeping memory of the tag stays asleep."""
        chosen = self.default_tag if tag is None else tag
        saver = self._savers.current()
        with saver.region(_awake(saver, chosen)), having(self, current_tag=chosen):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Provide the handle of a graph pool on the tag "cudagraph".

        ``torch.cuda.graph(pool=...)`` accepts the handle. It stays the same on a device until
        `release_pools`, except while the pool's memory is asleep.

        Raises:
            StateError: NCCL would register the tag's pages with other ranks.
            ValueError: There is no GPU.
        """
        check_capture(_GRAPHS)
        saver = self._savers.current()
        tag = _awake(saver, _GRAPHS)
        if (key := (saver.device, tag)) not in self._graph_pools:
            self._graph_pools[key] = saver.mem_pool(tag)
        # Creates cuBLAS's workspace, which torch keeps forever, outside of the tag.
        torch.cuda.current_blas_handle()
        with having(self, current_tag=_GRAPHS):
            yield self._graph_pools[key].id

    def sleep(
        self,
        offload_tags: Collection[str] | str | None = None,
        *,
        tags: Collection[str] | str | None = None,
    ) -> None:
        """Release the memory of tags; memory that is asleep already is not changed.

        If the call fails on a device, nothing has changed on that device.

        Args:
            offload_tags: Tags whose content is kept on the host and restored by `wake_up`; ``None``
                for the default tag. Other content is undefined after `wake_up`.
            tags: Tags to put to sleep; ``None`` for all tags.

        Raises:
            StateError: A `use_memory_pool` of a tag is open.
            HostMemoryError: Host memory for the content is short.
        """
        kept = {self.default_tag} if offload_tags is None else _names(offload_tags)
        chosen = None if tags is None else _names(tags)
        gc.collect()  # frees dead tensors, so that they are not saved
        for saver in self._savers:
            awake = [tag for tag in saver.tags if not saver.is_paused(tag)]
            awake = [tag for tag in awake if chosen is None or _name(tag) in chosen]
            saved = [tag for tag in awake if _name(tag) in kept]
            lost = [tag for tag in awake if _name(tag) not in kept]
            with contextlib.ExitStack() as undo:
                if saved:  # before the others, because a failure can undo only saved content
                    saver.pause(*saved, content="host")
                    undo.callback(saver.resume, *saved)
                if lost:
                    saver.pause(*lost, content="discard")
                undo.pop_all()
            saver.backend.reclaim()

    def discard(self, tags: Collection[str] | str) -> None:
        """Release the memory of tags without keeping their content."""
        self.sleep((), tags=tags)

    def wake_up(self, tags: Collection[str] | str | None = None) -> None:
        """Map memory behind the addresses of sleeping tags; memory that is awake is not changed.

        Args:
            tags: Which of "weights" and "kv_cache" to resume; ``None`` for both. Every call resumes
                all other tags.

        Raises:
            OutOfMemory: Memory is short; a ``RuntimeError``. Nothing has changed on that device.
        """
        left = set() if tags is None else {*_DEFERRABLE} - _names(tags)
        for saver in self._savers:
            asleep = [tag for tag in saver.tags if saver.is_paused(tag) and _name(tag) not in left]
            if asleep:
                saver.resume(*asleep)

    def get_current_usage(self) -> int:
        """Return the bytes of all tensors on the tags, asleep or awake."""
        tags = (saver.report(others=False).tags.values() for saver in self._savers)
        return sum(tag.live_bytes for tag in itertools.chain.from_iterable(tags))

    def release_pools(self) -> None:
        """Release memory that no tensor and no graph uses, as an engine does before it ends.

        Tensors and graphs stay valid. The next `cudagraph_pool` is a new pool. May be repeated.
        """
        while self._graph_pools:
            cuda_hook.retire(self._graph_pools.popitem()[1])
        for saver in self._savers:
            saver.trim()

    close = release_pools


def _awake(saver: MemorySaver, name: str) -> str:
    """Return the saver's first tag for this name that is awake, or the name of a new tag."""
    more = (f"{name}{_AGAIN}{number}" for number in itertools.count(2))
    tags = itertools.chain([name], more)
    return next(tag for tag in tags if tag not in saver.tags or not saver.is_paused(tag))


def _name(tag: str) -> str:
    """Return vLLM's name for a tag of the saver."""
    return tag.partition(_AGAIN)[0]


def _names(tags: Collection[str] | str) -> set[str]:
    return {tags} if isinstance(tags, str) else set(tags)
