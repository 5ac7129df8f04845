"""The interface of ``torch_memory_saver`` 0.0.10 on memsaver; docs/compat.md lists differences.

A tag of that library may hold memory with and without a backup. Here, such a tag has one part for
each content policy, which is the saver's tag ``tag:content``. `TorchMemorySaver.pause` and
`TorchMemorySaver.resume` handle all parts of a tag together.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from memsaver.compat.savers import GraphPools, Handle, Region, Savers, outside
from memsaver.errors import StateError, TagError
from memsaver.saver import MemorySaver
from memsaver.types import Content, check_choice

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

logger = logging.getLogger("memsaver")

_DEFAULT = "default"
_SAVERS = Savers()  # shared by all TorchMemorySaver of the process, as in the library

CpuBackupBackend = Literal["mmap", "pinned"]


class TorchMemorySaver:
    """Pausable memory by tags, on the current CUDA device, or on the CPU if there is no GPU.

    Attributes:
        hook_mode: Has no effect; memory is always placed through torch's memory pools.
        memory_margin_bytes: Has no effect; ``MemorySaver(limit_bytes=)`` keeps memory free.
        retain_cpu_backup: Has no effect; host memory for backups is always kept for the next pause.
    """

    __slots__ = (
        *("_savers", "_graphs", "_unused"),
        *("hook_mode", "memory_margin_bytes", "retain_cpu_backup"),
    )

    def __init__(self, savers: Savers | None = None) -> None:
        self._savers = _SAVERS if savers is None else savers
        self._graphs = GraphPools()
        self._unused: set[str] = set()
        self.hook_mode = "preload"
        self.memory_margin_bytes = 0
        self.retain_cpu_backup = False

    @property
    def enabled(self) -> bool:
        return True

    def set_disk_backup_dir(self, path: str) -> None:
        """Set the directory for disk backups, and create it if missing."""
        os.makedirs(path, exist_ok=True)
        self._savers.set_disk_dir(Path(path))

    # ---------------------------------------------------------------- placing

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Place the allocations of this thread on a tag; of nested regions the innermost applies.

        Args:
            tag: Tag to allocate on, created on first use.
            enable_cpu_backup: Keep the content in host memory during a pause.
            enable_disk_backup: Keep the content in a file during a pause.
            cpu_backup_backend: Accepted for compatibility; both kinds are the same pinned memory.

        Raises:
            StateError: The tag is paused, or ``TMS_INIT_ENABLE`` is set.
            OutOfMemory: An allocation inside failed.
            ValueError: The arguments contradict each other.
        """
        content = _content(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        saver = self._saver_to_place(tag)
        with Region(lambda: saver.region(_part(tag, content), content)):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Handle | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Capture a graph like ``torch.cuda.graph``, with its memory on a tag.

        Graphs with the same `pool` share memory. For the tag's arguments, see `region`.

        Raises:
            StateError: The tag is paused, ``TMS_INIT_ENABLE`` is set, or NCCL would register the
                tag's pages with other ranks.
            ValueError: There is no GPU, or the arguments contradict each other.
        """
        content = _content(enable_cpu_backup, False, cpu_backup_backend)
        saver = self._saver_to_place(tag)
        if saver.device.type != "cuda":
            raise ValueError("cuda_graph needs a CUDA device")
        with self._graphs.capture(
            cuda_graph, saver, _part(tag, content), content, pool, stream, capture_error_mode
        ):
            yield

    def disable(self) -> contextlib.AbstractContextManager[None]:
        """Suspend this thread's regions: allocations inside are torch's own.

        Leaving the context raises ``StateError`` if the tag of a region is paused.
        """
        return outside()

    def _saver_to_place(self, tag: str) -> MemorySaver:
        _refuse_whole_process()
        saver = self._savers.current()
        if any(_tag_of(part) == tag and saver.is_paused(part) for part in saver.tags):
            raise StateError(f"tag {tag!r} is paused; call resume({tag!r}) before allocating on it")
        return saver

    # ---------------------------------------------------------------- pause and resume

    def pause(self, tag: str | None = None) -> None:
        """Release the memory of a tag, or of all tags, on every device.

        A tag without any region is accepted, because engines pause every tag that they know. If a
        second device fails, the first one stays paused, because its content may be gone; another
        call pauses the rest.

        Raises:
            StateError: The tag is paused already, a region of it is open, or ``TMS_INIT_ENABLE`` is
                set. Nothing has changed on that device.
        """
        _refuse_whole_process()
        for saver, parts in self._select(tag, paused=False):
            saver.pause(*parts)

    def resume(self, tag: str | None = None) -> None:
        """Map memory behind the addresses of a tag, or of all tags, on every device or on none.

        Raises:
            StateError: The tag is not paused. Nothing has changed.
            OutOfMemory: Memory is short. Nothing has changed.
        """
        with contextlib.ExitStack() as undo:
            for saver, parts in self._select(tag, paused=True):
                saver.resume(*parts)
                undo.callback(saver.pause, *parts)
            undo.pop_all()

    def _select(self, tag: str | None, paused: bool) -> list[tuple[MemorySaver, list[str]]]:
        """Return the parts in this state by saver; raise ``StateError`` if a tag has none."""
        states: dict[str, set[bool]] = {}
        chosen: dict[MemorySaver, list[str]] = {}
        for saver, part in self._parts(tag):
            is_paused = saver.is_paused(part)
            states.setdefault(_tag_of(part), set()).add(is_paused)
            if is_paused == paused:
                chosen.setdefault(saver, []).append(part)
        if tag and not states:
            self._warn_unused(tag)
        if wrong := [name for name, present in states.items() if paused not in present]:
            state, call = ("not paused", "pause") if paused else ("paused already", "resume")
            names = ", ".join(map(repr, wrong))
            raise StateError(
                f"{names}: {state}; call {call} for it first, or name the tags that you mean"
            )
        return list(chosen.items())

    def _parts(self, tag: str | None = None) -> Iterator[tuple[MemorySaver, str]]:
        """Yield the parts of a tag, or of all tags, on every device."""
        for saver in self._savers:
            for part in saver.tags:
                if not tag or _tag_of(part) == tag:
                    yield saver, part

    def _warn_unused(self, tag: str) -> None:
        if tag not in self._unused:
            self._unused.add(tag)
            known = {repr(_tag_of(part)) for _, part in self._parts()}
            logger.warning(
                "no region was entered with tag %r, there is nothing to pause or resume; known: %s",
                tag,
                ", ".join(sorted(known)) or "none yet",
            )

    # ---------------------------------------------------------------- saved content

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Return the saved content of a tensor, or ``None`` if it is active or in no region.

        The content is on the CPU. With `zero_copy`, the result is the saved bytes themselves if
        they are in host memory in one piece; they are valid until the tag is resumed.

        Raises:
            StateError: The pause discarded the content.
            ValueError: `x` is not contiguous.
        """
        if not x.is_contiguous():
            raise ValueError(
                f"get_cpu_backup needs a contiguous tensor, got {tuple(x.shape)} with {x.stride()}"
            )
        for saver in self._savers:
            part = _part_at(saver, x)
            if part is not None:
                return self._saved(saver, part, x, zero_copy) if saver.is_paused(part) else None
        return None

    def _saved(
        self, saver: MemorySaver, part: str, x: torch.Tensor, zero_copy: bool
    ) -> torch.Tensor:
        tag, _, content = part.rpartition(":")
        if content == "discard":
            raise StateError(
                f"the pause of {tag!r} discarded this tensor; "
                "allocate it in a region with enable_cpu_backup=True"
            )
        if zero_copy:
            with contextlib.suppress(ValueError):  # on disk, or in several pieces
                return saver.saved(x, zero_copy=True)
        return saver.saved(x)


def configure_subprocess() -> contextlib.AbstractContextManager[None]:
    """Do nothing: no library is preloaded, and a subprocess calls `memsaver.compat.install`."""
    return contextlib.nullcontext()


def _content(
    enable_cpu_backup: bool, enable_disk_backup: bool, cpu_backup_backend: str | None
) -> Content:
    if enable_cpu_backup and enable_disk_backup:
        raise ValueError("enable_cpu_backup and enable_disk_backup exclude each other")
    if cpu_backup_backend is not None and not enable_cpu_backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if cpu_backup_backend is not None:
        check_choice("cpu_backup_backend", cpu_backup_backend, CpuBackupBackend)
    return "host" if enable_cpu_backup else "disk" if enable_disk_backup else "discard"


def _part(tag: str, content: Content) -> str:
    return f"{tag}:{content}"


def _tag_of(part: str) -> str:
    return part.rpartition(":")[0]


def _part_at(saver: MemorySaver, x: torch.Tensor) -> str | None:
    with contextlib.suppress(TagError):
        return saver.tag_of(x)
    return None


def _refuse_whole_process() -> None:
    """Refuse the variable with which the preloaded library catches every allocation."""
    if os.environ.get("TMS_INIT_ENABLE", "").lower() in ("1", "true", "yes"):
        raise StateError(
            "TMS_INIT_ENABLE requests every allocation of this process, but memsaver places only "
            "allocations in region() on tags; unset it, and allocate pausable memory in a region"
        )


torch_memory_saver = TorchMemorySaver()
