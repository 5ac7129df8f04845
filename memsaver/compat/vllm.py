"""What ``vllm.device_allocator.cumem`` offers, on memsaver. docs/compat.md tells what differs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator
from typing import ClassVar

import torch

from memsaver.compat.savers import Savers

__all__ = ["CuMemAllocator", "cumem_available"]

cumem_available = True


class CuMemAllocator:
    """Memory by tags that can be put to sleep; ``sleep`` says which tags' content is kept in host memory."""

    instance: ClassVar[CuMemAllocator | None] = None
    default_tag: ClassVar[str] = "default"

    def __init__(self, savers: Savers | None = None) -> None:
        """Programs call ``get_instance``; savers: for memory of one's own."""
        self._savers = Savers() if savers is None else savers
        self.current_tag = self.default_tag

    @staticmethod
    def get_instance() -> CuMemAllocator:
        """The one of this process."""
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Place what this thread allocates on ``tag``. ``StateError`` if the tag is asleep."""
        chosen = self.default_tag if tag is None else tag
        with self._savers.current().region(chosen):
            before, self.current_tag = self.current_tag, chosen
            try:
                yield
            finally:
                self.current_tag = before

    def sleep(
        self, offload_tags: Collection[str] | str | None = None, *, tags: Collection[str] | str | None = None
    ) -> None:
        """Give memory back: of ``tags``, or of all. Memory that is asleep stays as it is.

        offload_tags: their content is kept and comes back (``None``: the default tag's); other content is undefined
        after ``wake_up``. A failure has changed nothing on its device.
        """
        kept = {self.default_tag} if offload_tags is None else _names(offload_tags)
        chosen = None if tags is None else _names(tags)
        gc.collect()  # dead tensors are not worth saving
        for saver in self._savers:
            awake = [tag for tag in saver.tags if not saver.is_paused(tag) and (chosen is None or tag in chosen)]
            saved, lost = [tag for tag in awake if tag in kept], [tag for tag in awake if tag not in kept]
            with contextlib.ExitStack() as undo:
                if saved:  # first: only what was saved can be brought back
                    saver.pause(*saved, content="host")
                    undo.callback(saver.resume, *saved)
                if lost:
                    saver.pause(*lost, content="discard")
                undo.pop_all()
        _empty_cache()

    def discard(self, tags: Collection[str] | str) -> None:
        """Give the memory of these tags back, without their content."""
        self.sleep((), tags=tags)

    def wake_up(self, tags: Collection[str] | str | None = None) -> None:
        """Put memory behind the same addresses again: of ``tags``, or of all. Memory that is awake stays as it is.

        All or nothing on a device: ``OutOfMemory``, which is a ``RuntimeError``, has changed nothing there.
        """
        chosen = None if tags is None else _names(tags)
        for saver in self._savers:
            asleep = [tag for tag in saver.tags if saver.is_paused(tag) and (chosen is None or tag in chosen)]
            if asleep:
                saver.resume(*asleep)

    def get_current_usage(self) -> int:
        """Bytes of all tensors on the tags, asleep or not."""
        return sum(tag.live_bytes for saver in self._savers for tag in saver.report().tags.values())


def _names(tags: Collection[str] | str) -> set[str]:
    return {tags} if isinstance(tags, str) else set(tags)


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
